"""The stage's end of a trainer group: `TrainBackend` whose calls are made by the ranks, and made good when the ranks
are lost.

The stage process has no process group and holds what must not be lost: buffer, leases, version. When the connection
breaks, the next call waits for the trainer group's next incarnation, restores the newest save that there is, repeats
the calls since then out of the journal, repeats itself, and returns as if nothing had happened.

Precision: calls and their order are the same, so the weights after a loss are those of before: to the bit where the
kernels are deterministic (a CPU with the same number of threads), else to the rounding by which two runs differ.

Invariants:
- a call that returned is in the journal or in a save; one that raised a drawn error changed nothing and is in neither;
- a save that was interrupted is made again from the start, of the state that it was of.

One thread at a time may call it, but for `close`, which any thread may call at any time.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from models.train.interface import TrainSequence
from models.train.trainer_group.buckets import WeightReader
from models.train.trainer_group.calls import (
    CHANGE_STATE,
    Accumulate,
    Arrays,
    BeginBatch,
    Call,
    Discard,
    End,
    FinishSave,
    Flush,
    FromRank,
    Load,
    LogProbs,
    Metrics,
    Raised,
    Save,
    Setup,
    Step,
    decode_reply,
    encode,
)
from models.train.trainer_group.errors import TrainerGroupClosed
from models.train.trainer_group.faults import error_of
from models.train.trainer_group.journal import CallJournal
from models.train.trainer_group.link import Link, LinkLost
from models.train.trainer_group.rank_spec import Rendezvous
from models.train.trainer_group.restoration import POLL_S, Restoration, pause
from models.train.trainer_group.stream import WeightStream

log = logging.getLogger("sluice.train")

COMMIT_WAIT_S: Final = 120.0
T = TypeVar("T")


class TrainerGroupBackend:
    """`TrainBackend` on a trainer group.

    Args:
        meeting: says where the newest incarnation of the trainer group is met, None before the first is up. Asked in
            the thread of the caller.
        home: directory for the journal of calls; what lies there is removed.
        saves_in_background: whether `save` returns before all is on disk; `finish_save` waits for that.
        commit_wait_s: how long a restore waits for the newest save to be committed, before it takes the draft.
    """

    def __init__(
        self,
        meeting: Callable[[], Rendezvous | None],
        home: Path,
        *,
        saves_in_background: bool = False,
        commit_wait_s: float = COMMIT_WAIT_S,
    ) -> None:
        self._meeting = meeting
        self._saves_in_background = saves_in_background
        self._journal = CallJournal(home)
        self._link: Link | None = None  # to a trainer group that is where the last call left it
        self._newest: Link | None = None  # the same, or to one that is being brought there
        self._incarnation = -1  # the newest that was met
        self._is_set_up = False
        self._reader = WeightReader()
        self._stream: WeightStream | None = None
        self._calling = threading.Lock()
        self._closed = threading.Event()
        self._restoration = Restoration(self._journal, self._closed, commit_wait_s)

    # ------------------------------------------------------------------ TrainBackend

    def setup(self) -> None:
        """Waits for the trainer group, and has it load its models. Raises what `Trainer.setup` raises."""
        self._ask(Setup())
        self._is_set_up = True

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Log-probs [R] of each sequence's response tokens under the current weights, temperature applied."""
        reply = self._ask(LogProbs(list(sequences)))
        assert isinstance(reply, Arrays)
        return reply.float32

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        """As `Trainer.begin_batch`."""
        self._journal.drop_superfluous()
        self._ask(BeginBatch(rollouts, steps, version, lr_scale))

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        """As `Trainer.accumulate`."""
        self._ask(Accumulate(list(sequences)))

    def flush(self) -> None:
        """As `Trainer.flush`."""
        self._ask(Flush())

    def step(self) -> dict[str, float]:
        """As `Trainer.step`."""
        reply = self._ask(Step())
        assert isinstance(reply, Metrics)
        return reply.values

    def discard(self) -> None:
        """As `Trainer.discard`."""
        self._ask(Discard())

    def save(self, directory: Path) -> None:
        """As `Trainer.save`."""
        self._ask(Save(str(directory)), half_made=directory)
        self._restoration.unfinished = directory if self._saves_in_background else None
        self._journal.saved(directory)
        self._journal.drop_superfluous()

    def finish_save(self) -> None:
        """Wait until what `save` wrote is on disk. If the trainer group is lost meanwhile, the save is made again,
        whatever was trained since.
        """
        self._ask(FinishSave())
        self._restoration.unfinished = None

    def load(self, directory: Path) -> None:
        """As `Trainer.load`."""
        self._ask(Load(str(directory)))
        self._journal.started_from(directory)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Current weights under Hugging Face names, in a fixed order.

        Each tensor is a view of memory that is written again: use it before asking for the next. Another call ends the
        export; whoever goes on with it then is told so with `BackendMisuse`. After a loss in the middle it goes on with
        the next tensor of the trainer group that took over.
        """
        yielded = 0
        while True:
            stream = self._start_export()
            try:
                for place, (name, tensor) in enumerate(stream.tensors()):
                    if place >= yielded:
                        yielded = place + 1
                        yield name, tensor
            except LinkLost as loss:
                self._say_lost("Export", loss)
                continue
            if stream.complete:
                return
            log.warning("nobody took weights for too long while they were exported; going on after %d", yielded)

    def close(self) -> None:
        """End the trainer group if nothing is being called; unblock whoever waits for it. May be called twice."""
        self._closed.set()
        if not self._calling.acquire(timeout=POLL_S):
            if (link := self._newest) is not None:
                link.break_off()
            return
        try:
            if self._link is not None:
                self._give_up_export()
                self._link.ask(encode(End()))
        except LinkLost:
            log.info("the trainer group had ended before it was told to")
        finally:
            self._drop_link()
            self._journal.close()
            self._calling.release()

    # ------------------------------------------------------------------ one call

    def _ask(self, call: Call, *, half_made: Path | None = None) -> FromRank:
        """Make a call, again after each loss. Raises the drawn error that the ranks raised, or TrainerGroupClosed.

        `half_made`: a directory that an interrupted call leaves to be removed before it is made again.
        """
        data = encode(call)
        with self._calling:
            reply = self._made_good(type(call).__name__, lambda link: decode_reply(link.ask(data)), half_made)
            if isinstance(reply, Raised):
                raise error_of(reply)
            if isinstance(call, CHANGE_STATE):
                self._journal.append(data)
            return reply

    def _start_export(self) -> WeightStream:
        with self._calling:
            self._stream = self._made_good("Export", lambda link: WeightStream(link, self._reader, self._calling))
            return self._stream

    def _made_good(self, doing: str, attempt: Callable[[Link], T], half_made: Path | None = None) -> T:
        """Attempt it on a trainer group that is where the last call left it, again after each loss."""
        lost = False
        while True:
            try:
                link = self._joined()
                self._give_up_export()
                if lost and half_made is not None:
                    shutil.rmtree(half_made, ignore_errors=True)
                return attempt(link)
            except LinkLost as loss:
                lost = True
                self._say_lost(doing, loss)

    def _give_up_export(self) -> None:
        if self._stream is not None:
            self._stream.give_up()
            self._stream = None

    def _joined(self) -> Link:
        """The connection to a trainer group that is where the last call left it. Raises LinkLost,
        TrainerGroupClosed."""
        if self._closed.is_set():
            raise TrainerGroupClosed("the training backend was closed")
        if self._link is None:
            self._newest = link = self._join()
            if self._closed.is_set():  # before it could be broken off
                raise TrainerGroupClosed("the training backend was closed")
            if self._is_set_up:
                self._restoration.bring(link, self._incarnation)
            self._link = link
        return self._link

    def _join(self) -> Link:
        """Waits for an incarnation that was not met yet. Unblocked by it, or by `close`."""
        while True:
            rendezvous = self._meeting()
            if rendezvous is not None and rendezvous.incarnation > self._incarnation:
                self._incarnation = rendezvous.incarnation
                return Link.to(rendezvous.address)
            pause(self._closed, "while it waited for its trainer group")

    def _say_lost(self, call: str, loss: LinkLost) -> None:
        self._drop_link()
        if not self._closed.is_set():
            log.warning("%s: the trainer group was lost: %s; waiting for its next incarnation", call, loss)

    def _drop_link(self) -> None:
        if self._stream is not None:
            self._stream.forget()
        for link in (self._link, self._newest):
            if link is not None:
                link.close()
        self._link = self._newest = self._stream = None
        self._reader.close()
