"""The trainer's part of a checkpoint: the state of the backend and the groups in care, in one draft, then reported.

Invariants: a checkpoint is reported once all of it is on disk, and before the report of any later step, so that the
ledger that is committed with it is the ledger after its own step; it holds the groups of the moment of its report.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from models.checkpoint import draft_path
from stages.engines.colocation import InTorch
from stages.messages import CheckpointReady
from stages.ports import Readable
from stages.train.held_groups import HeldGroups
from stages.train.saved_groups import write_groups

if TYPE_CHECKING:
    from models.train.interface import TrainBackend

COMMIT_POLL_S = 0.05
SAVE: Final = "save"  # on the topic: the number of the newest checkpoint that the user requested

Timed = Callable[[str, str], AbstractContextManager[None]]  # counts a block as work, under a name in the trace


class Checkpoints:
    """Writes drafts under `root`. `background`: the backend writes on while the next batch trains."""

    def __init__(
        self,
        root: Path,
        backend: TrainBackend,
        groups: HeldGroups,
        *,
        step: int,
        background: bool,
        in_torch: InTorch,
        timed: Timed,
        report: Callable[[CheckpointReady], Awaitable[None]],
    ) -> None:
        self._root, self._backend, self._groups, self._background = root, backend, groups, background
        self._in_torch, self._timed, self._report = in_torch, timed, report
        self._step = step  # of the newest save, or where this run began
        self._kept: frozenset[int] = frozenset(_ids(groups))  # groups that are in it
        self._begun: CheckpointReady | None = None  # begun, not reported
        self._reported: Path | None = None  # the newest draft that was reported to the controller
        self._request: bytes | None = None  # the newest value of `SAVE`

    def requested(self, topic: Readable) -> bool:
        """Whether the user requested a checkpoint since the last call; each request counts once."""
        newest = topic.get(SAVE)
        requested, self._request = newest != self._request, newest
        return requested

    def lacks(self, step: int, *, groups: bool) -> bool:
        """Whether the newest save is behind: of an earlier step or, with `groups`, without groups that came since."""
        return step > self._step or (groups and not self._kept.issuperset(_ids(self._groups)))

    async def save(self, step: int) -> None:
        """Write the state after `step` batches, or begin to.

        A step may be saved twice, the second time with more groups. Waits until the first draft is committed then, that
        is renamed by the controller, which reads it; bounded by the drain's deadline.
        """
        await self.finish()
        draft = draft_path(self._root, step)
        while draft == self._reported and draft.exists():  # noqa: ASYNC110  (a rename announces nothing)
            await asyncio.sleep(COMMIT_POLL_S)
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)  # left by a run that was killed in its save
        self._step = step
        with self._timed("save", f"step {step}"):
            await self._in_torch(lambda: self._backend.save(draft))
        self._begun = CheckpointReady(step, step, str(draft))
        if not self._background:
            await self.finish()

    async def finish(self) -> None:
        """Complete a save in progress and report it. Call it before the report of the next step."""
        ready, self._begun = self._begun, None
        if ready is None:
            return
        with self._timed("finish_save", f"step {ready.step}"):
            if self._background:
                await self._in_torch(self._backend.finish_save)
            groups = self._groups.groups  # none is settled meanwhile: the task that settles them is waiting here
            await asyncio.to_thread(write_groups, Path(ready.path), groups)
        self._kept = frozenset(slice_.group.group_id for slice_ in groups)
        self._reported = Path(ready.path)
        await self._report(ready)


def _ids(groups: HeldGroups) -> frozenset[int]:
    return frozenset(slice_.group.group_id for slice_ in groups.groups)
