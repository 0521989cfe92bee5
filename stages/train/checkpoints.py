"""What the trainer writes: its part of a checkpoint, and the files from which a restarted trainer catches up.

Its part of a checkpoint is the state of the backend and the groups in care, in one draft, then reported. Invariants: a
checkpoint is reported once all of it is on disk, and before the report of any later step, so that the ledger that is
committed with it is the ledger after its own step; it holds the groups of the moment of its report.

    RUN/trainer/batch-00000012.msgpack   groups of step 12, in the order in which they were trained
    RUN/trainer/state-00000010/          a recovery point: the state of the backend after step 10

A step is reported only after its batch is written here. A restarted trainer loads the newest state, checkpoint or
recovery point, and trains the batches after it again: same groups, same versions, the same weights up to rounding. The
ledger, the engines and the waiting groups are not involved.

Invariants:
- a committed checkpoint removes all files at or before its step;
- a recovery point is complete or absent; recovery points take at most `SHARE` of the time;
- these files never end a run: where the disk has no room they are given up, and a lost trainer then ends the run with
  the command to resume it;
- no file here outlives the start of the run that wrote it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from models.checkpoint import CheckpointError, draft_path
from models.disk import remove
from stages.base import StageContext, TrainOptions
from stages.engines.colocation import InTorch
from stages.errors import SavedBatchError
from stages.messages import CheckpointReady, RolloutSlice
from stages.ports import Readable
from stages.train.held_groups import HeldGroups
from stages.train.saved_groups import read_file, write_batch, write_groups

if TYPE_CHECKING:
    from models.train.interface import TrainBackend

COMMIT_POLL_S = 0.05
SAVE: Final = "save"  # on the topic: the number of the newest checkpoint that the user requested


@dataclass
class Checkpoints:
    """Writes drafts in the run directory. With `--async-save` the backend writes on while the next batch trains."""

    context: StageContext
    backend: TrainBackend
    groups: HeldGroups
    in_torch: InTorch
    timed: Callable[[str, str], AbstractContextManager[None]]  # counts a block as work, under a name in the trace
    report: Callable[[CheckpointReady], Awaitable[None]]
    _begun: CheckpointReady | None = None  # begun, not reported
    _reported: Path | None = None  # the newest draft that was reported to the controller
    _request: bytes | None = None  # the newest value of `SAVE`

    def __post_init__(self) -> None:
        self._background = self.context.config.checkpoint.async_save
        self._step = self.context.given(TrainOptions).start_step  # of the newest save, or where this run began
        self._kept = _ids(self.groups)  # groups that are in it

    def requested(self, topic: Readable) -> bool:
        """Whether the user requested a checkpoint since the last call; each request counts once."""
        newest = topic.get(SAVE)
        requested, self._request = newest != self._request, newest
        return requested

    def lacks(self, step: int, *, groups: bool) -> bool:
        """Whether the newest save is behind: of an earlier step or, with `groups`, without groups that came since."""
        return step > self._step or (groups and not self._kept.issuperset(_ids(self.groups)))

    async def save(self, step: int) -> None:
        """Write the state after `step` batches, or begin to.

        A step may be saved twice, the second time with more groups. Waits until the first draft is committed then, that
        is renamed by the controller, which reads it; bounded by the drain's deadline.
        """
        await self.finish()
        draft = draft_path(self.context.run_dir / "checkpoints", step)
        while draft == self._reported and draft.exists():  # noqa: ASYNC110  (a rename announces nothing)
            await asyncio.sleep(COMMIT_POLL_S)
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)  # left by a run that was killed in its save
        self._step = step
        with self.timed("save", f"step {step}"):
            await self.in_torch(lambda: self.backend.save(draft))
        self._begun = CheckpointReady(step, step, str(draft))
        if not self._background:
            await self.finish()

    async def finish(self) -> None:
        """Complete a save in progress and report it. Call it before the report of the next step."""
        ready, self._begun = self._begun, None
        if ready is None:
            return
        with self.timed("finish_save", f"step {ready.step}"):
            if self._background:
                await self.in_torch(self.backend.finish_save)
            groups = self.groups.groups  # none is settled meanwhile: the task that settles them is waiting here
            await asyncio.to_thread(write_groups, Path(ready.path), groups)
        self._kept = frozenset(slice_.group.group_id for slice_ in groups)
        self._reported = Path(ready.path)
        await self.report(ready)


def _ids(groups: HeldGroups) -> frozenset[int]:
    return frozenset(slice_.group.group_id for slice_ in groups.groups)


log = logging.getLogger("sluice.train")

FOLDER: Final = "trainer"
SHARE: Final = 0.02  # of the time, for recovery points
SHORTEST_S: Final = 60.0  # between two recovery points
STATE_FACTOR: Final = 8  # bytes of a saved state by bytes of the model: weights, fp32 master, two moments
DISK_BYTES_PER_S: Final = 1e9  # guess for the first save
ROOM_FACTOR: Final = 3  # free bytes by bytes of a state, so that checkpoints and other files have room beside it


def remove_superseded(run_dir: Path, step: int) -> None:
    """Remove the files that the committed checkpoint of `step` replaces. Their directory stays while the run goes on,
    for the trainer may be about to write the next one."""
    _remove_up_to(run_dir / FOLDER, batch=step, state=step)


class Recovery:
    """Recovery files of one run. `checkpoint`: the model's, for its size. Blocking: use it from a thread."""

    def __init__(self, run_dir: Path, checkpoint: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.home = run_dir / FOLDER
        self._clock, self._since = clock, clock()
        self._state_bytes = STATE_FACTOR * sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        self._cost_s = self._state_bytes / DISK_BYTES_PER_S  # of the newest save
        self._impossible = False  # no further recovery points
        self.metrics: dict[str, float] = {}  # of the newest save
        self._given_up = False  # no batches either

    def clear(self) -> None:
        """Forget an earlier start of the run."""
        shutil.rmtree(self.home, ignore_errors=True)

    def keep(self, step: int, groups: Sequence[RolloutSlice]) -> None:
        """Write the batch of a step, before the step is reported. Without room, give all recovery files up."""
        if self._given_up:
            return
        try:
            write_batch(self.home / f"batch-{step:08d}.msgpack", groups)
        except (CheckpointError, OSError) as error:
            log.warning(
                "the batch of step %d could not be kept (%s); from now on a lost trainer ends the run, which then "
                "resumes from its last checkpoint",
                step, error,
            )  # fmt: skip
            self._given_up = self._impossible = True
            self.clear()

    def batch(self, step: int) -> list[RolloutSlice]:
        """The groups of a step. Raises SavedBatchError."""
        path = self.home / f"batch-{step:08d}.msgpack"
        try:
            return read_file(path)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise SavedBatchError(
                f"{path} cannot be read ({error}), so the trainer cannot reach the step that it had reported; continue "
                f"from the last checkpoint with --resume {self.home.parent}"
            ) from error

    def newest_state(self, at_most: int) -> tuple[int, Path] | None:
        """Step and directory of the newest recovery point at or before step `at_most`."""
        return max(((step, path) for step, path in _entries(self.home, "state") if step <= at_most), default=None)

    def saved(self, took_s: float) -> None:
        """A checkpoint was saved: the interval to the next recovery point begins here."""
        self._since, self._cost_s, self.metrics = self._clock(), took_s, {"perf/save_time": took_s}

    def due(self) -> bool:
        """Whether a recovery point is worth its time now, and fits on the disk."""
        if self._impossible or self._clock() - self._since < max(SHORTEST_S, self._cost_s / SHARE):
            return False
        free = shutil.disk_usage(self.home).free
        if free >= ROOM_FACTOR * self._state_bytes:
            return True
        self._impossible = True
        log.warning(
            "no recovery points: %s has %d bytes free, and one may take %d; a lost trainer repeats all steps since "
            "the last checkpoint",
            self.home, free, self._state_bytes,
        )  # fmt: skip
        return False

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Write a recovery point; `write` saves the state of the backend. A failure is logged and ends no run."""
        begun, draft = self._clock(), self.home / f".state-{step:08d}.draft"
        remove(draft)
        try:
            write(draft)
        except (CheckpointError, OSError) as error:
            log.warning("no recovery points: that of step %d could not be written (%s)", step, error)
            self._impossible = True
            remove(draft)
            return
        draft.rename(self.home / f"state-{step:08d}")
        self._state_bytes = sum(file.stat().st_size for file in (self.home / f"state-{step:08d}").rglob("*"))
        _remove_up_to(self.home, batch=step, state=step - 1)
        self.saved(self._clock() - begun)


def _remove_up_to(home: Path, **newest: int) -> None:
    """Remove batches and states up to these steps."""
    for kind, last in newest.items():
        for number, path in _entries(home, kind):
            if number <= last:
                remove(path)


def _entries(home: Path, kind: str) -> Iterator[tuple[int, Path]]:
    """(step, path) of all batches or states."""
    for path in sorted(home.glob(f"{kind}-*")):
        yield int(path.name.removeprefix(f"{kind}-").removesuffix(".msgpack")), path
