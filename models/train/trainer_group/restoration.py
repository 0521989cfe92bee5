"""After a loss: a new trainer group is brought to where the last call left the old one.

It loads the newest save that there is and repeats the calls since then, out of the journal. A save that was interrupted
is made again from the start, of the state that it was of.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Final

from models.checkpoint import MANIFEST_FILE, CheckpointError, read_manifest, verify_files
from models.errors import TrainStateUnreadable
from models.train.trainer_group.calls import FinishSave, Load, Raised, Save, Setup, decode_reply, encode
from models.train.trainer_group.errors import TrainerGroupClosed, TrainerGroupDiverged
from models.train.trainer_group.faults import error_of
from models.train.trainer_group.journal import CallJournal, Point, committed
from models.train.trainer_group.link import Link

log = logging.getLogger("sluice.train")

POLL_S: Final = 0.05


def pause(closed: threading.Event, doing: str) -> None:
    """Between two looks. Raises TrainerGroupClosed."""
    if closed.wait(POLL_S):
        raise TrainerGroupClosed(f"the training backend was closed {doing}")


class Restoration:
    """`closed`: set when the backend is closed; `commit_wait_s`: how long the newest save may take to be committed,
    before its draft is taken."""

    def __init__(self, journal: CallJournal, closed: threading.Event, commit_wait_s: float) -> None:
        self._journal, self._closed, self._commit_wait_s = journal, closed, commit_wait_s
        self.unfinished: Path | None = None  # a save that is being written, and that nobody can have committed

    def bring(self, link: Link, incarnation: int) -> None:
        """To where the last call left the old one. Raises LinkLost, TrainStateUnreadable, TrainerGroupClosed."""
        started, repeated = time.monotonic(), 0
        self._succeed(link, encode(Setup()))
        point, directory = self._load_newest(link)
        for item in self._journal.calls_after(point):
            if isinstance(item, Point):
                self._save_again(link, item)
            else:
                self._succeed(link, item)
                repeated += 1
        log.info(
            "incarnation %d of the trainer group restored %s and repeated %d calls in %.1f s",
            incarnation,
            directory or "the initial weights",
            repeated,
            time.monotonic() - started,
        )

    def _save_again(self, link: Link, point: Point) -> None:
        """Make a save again that could not be restored, at the moment when it was made first. Raises LinkLost."""
        directory = point.directory
        if directory is not None and committed(directory) is None:
            shutil.rmtree(directory, ignore_errors=True)
            self._succeed(link, encode(Save(str(directory))))
            self._succeed(link, encode(FinishSave()))

    def _load_newest(self, link: Link) -> tuple[Point, Path | None]:
        """Load the newest save that can be read; from where calls are to be repeated, and what was loaded."""
        points, refused = self._journal.points, "none is there"
        for point in reversed(points):
            if point.directory is None:
                return point, None
            newest = point is points[-1] and point.directory != self.unfinished
            directory = self._place_of(point.directory, wait=newest)
            try:
                if directory.is_dir():
                    if committed(directory) is not None and (directory / MANIFEST_FILE).exists():
                        verify_files(directory, read_manifest(directory))
                    self._succeed(link, encode(Load(str(directory))))
                    return point, directory
            except (CheckpointError, TrainStateUnreadable) as error:
                log.warning("an older save has to be restored: %s", error)
                refused = str(error)
        raise TrainStateUnreadable(
            f"the trainer group was lost and no save of this life of the run can be restored ({refused}); continue "
            "from the last checkpoint with --resume"
        )

    def _place_of(self, directory: Path, *, wait: bool) -> Path:
        """Where a save lies. Waits for a draft to be committed, so that it is not renamed while ranks read it."""
        deadline = time.monotonic() + (self._commit_wait_s if wait else 0.0)
        while True:
            there = directory.is_dir()  # before the look for its final name, which it may get in between
            if (final := committed(directory)) is not None or not there or time.monotonic() >= deadline:
                return final or directory
            pause(self._closed, "while it restored its trainer group")

    def _succeed(self, link: Link, data: bytes) -> None:
        """Make a call that succeeded before. Raises TrainStateUnreadable of a load, else TrainerGroupDiverged."""
        if self._closed.is_set():
            raise TrainerGroupClosed("the training backend was closed while it restored its trainer group")
        reply = decode_reply(link.ask(data))
        if not isinstance(reply, Raised):
            return
        error = error_of(reply)
        if isinstance(error, TrainStateUnreadable):
            raise error
        raise TrainerGroupDiverged(
            f"a call that succeeded before the trainer group was lost now raises {reply.name}: {reply.text}"
        )
