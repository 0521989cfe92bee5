"""The trainer's part of a checkpoint: the state of the backend and the groups in care, in one draft, then reported.

Invariants: a checkpoint is reported once all of it is on disk, and before the report of any later step, so that the
ledger that is committed with it is the one after its own step; the groups are written last, because a trainer group
that is lost while it saves begins its directory anew.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from models.checkpoint import draft_path
from stages.engines.colocation import InTorch
from stages.messages import CheckpointReady
from stages.train.held_groups import HeldGroups
from stages.train.saved_groups import write_groups

if TYPE_CHECKING:
    from models.train.interface import TrainBackend

COMMIT_POLL_S = 0.05


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
        self._reported: Path | None = None  # the newest draft that the controller was told of

    def lacks(self, step: int, *, groups: bool) -> bool:
        """Whether the newest save knows less than what stands: an earlier step or, if asked, groups that came since."""
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
        """Complete what was begun, and report it. Call it before the report of the next step."""
        ready, self._begun = self._begun, None
        if ready is None:
            return
        with self._timed("finish_save", f"step {ready.step}"):
            if self._background:
                await self._in_torch(self._backend.finish_save)
            groups = self._groups.groups  # none ends meanwhile: whoever settles them is waiting here
            await asyncio.to_thread(write_groups, Path(ready.path), groups)
        self._kept = frozenset(slice_.group.group_id for slice_ in groups)
        self._reported = Path(ready.path)
        await self._report(ready)


def _ids(groups: HeldGroups) -> frozenset[int]:
    return frozenset(slice_.group.group_id for slice_ in groups.groups)
