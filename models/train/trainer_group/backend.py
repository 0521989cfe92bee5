"""The stage's end of a trainer group: `TrainBackend` whose calls are made by the ranks.

The stage process has no process group. When the connection breaks, a rank was lost: the call raises `PeerGone`, the
stage ends with it, and the supervisor starts the whole unit again (pipeline/supervise).

One thread at a time may call it, but for `close`, which any thread may call at any time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from models.train.interface import TrainSequence
from models.train.trainer_group.calls import (
    Accumulate,
    Arrays,
    BeginBatch,
    Call,
    Discard,
    End,
    FinishSave,
    Flush,
    Link,
    LinkLost,
    Load,
    LogProbs,
    Metrics,
    Raised,
    Reply,
    Save,
    Setup,
    Step,
    WriteSlot,
    Written,
    decode_reply,
    encode,
    error_of,
)
from models.train.trainer_group.rank_spec import PeerGone, Rendezvous, TrainerGroupClosed
from models.weights.shared_memory_reader import SlotManifest

log = logging.getLogger("sluice.train")

POLL_S: Final = 0.05


class TrainerGroupBackend:
    """`TrainBackend` on the trainer group of this incarnation.

    Args:
        meeting: returns where rank 0 is met, None before the ranks are up. Called in the thread of the caller.
        incarnation: of the unit that the stage is part of; ranks of another incarnation are passed over.
    """

    def __init__(self, meeting: Callable[[], Rendezvous | None], incarnation: int = 0) -> None:
        self._meeting, self._incarnation = meeting, incarnation
        self._link: Link | None = None
        self._calling = threading.Lock()
        self._closed = threading.Event()

    def setup(self) -> None:
        """Waits for the trainer group, and has it load its models. Raises what `Trainer.setup` raises."""
        self._request(Setup())

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Log-probs [R] of each sequence's response tokens under the current weights, temperature applied."""
        reply = self._request(LogProbs(list(sequences)))
        assert isinstance(reply, Arrays)
        return reply.float32

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        """As `Trainer.begin_batch`."""
        self._request(BeginBatch(rollouts, steps, version, lr_scale))

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        """As `Trainer.accumulate`."""
        self._request(Accumulate(list(sequences)))

    def flush(self) -> None:
        """As `Trainer.flush`."""
        self._request(Flush())

    def step(self) -> dict[str, float]:
        """As `Trainer.step`."""
        reply = self._request(Step())
        assert isinstance(reply, Metrics)
        return reply.values

    def discard(self) -> None:
        """As `Trainer.discard`."""
        self._request(Discard())

    def write_slot(self, directory: Path, source: Path, version: int, run_generation: int) -> SlotManifest:
        """Rank 0 writes the current weights into the next slot; see `TrainBackend`. Raises WeightsError."""
        reply = self._request(WriteSlot(str(directory), str(source), version, run_generation))
        assert isinstance(reply, Written)
        return reply.manifest

    def save(self, directory: Path) -> None:
        """As `Trainer.save`."""
        self._request(Save(str(directory)))

    def finish_save(self) -> None:
        """As `Trainer.finish_save`."""
        self._request(FinishSave())

    def load(self, directory: Path) -> None:
        """As `Trainer.load`."""
        self._request(Load(str(directory)))

    def close(self) -> None:
        """End the trainer group if no call is under way; else break the call off. May be called twice."""
        self._closed.set()
        if not self._calling.acquire(timeout=POLL_S):
            if (link := self._link) is not None:
                link.break_off()
            return
        try:
            if self._link is not None:
                self._link.request(encode(End()))
        except LinkLost:
            log.info("the trainer group had ended before the stage ended it")
        finally:
            if self._link is not None:
                self._link.close()
            self._link = None
            self._calling.release()

    def _request(self, call: Call) -> Reply:
        """Make a call. Raises the drawn error that the ranks raised, PeerGone, or TrainerGroupClosed."""
        with self._calling:
            try:
                if self._link is None:
                    self._link = self._join()
                reply = decode_reply(self._link.request(encode(call)))
            except LinkLost as error:
                if self._closed.is_set():
                    raise TrainerGroupClosed("the training backend was closed during a call") from error
                raise PeerGone(f"{type(call).__name__}: the trainer group was lost: {error}") from error
        if isinstance(reply, Raised):
            raise error_of(reply)
        return reply

    def _join(self) -> Link:
        """Waits until the ranks are up; unblocked by that, or by `close`. Raises LinkLost, TrainerGroupClosed."""
        while not self._closed.is_set():
            rendezvous = self._meeting()
            if rendezvous is not None and rendezvous.incarnation == self._incarnation:
                return Link.to(rendezvous.address)
            self._closed.wait(POLL_S)
        raise TrainerGroupClosed("the training backend was closed while it waited for its trainer group")
