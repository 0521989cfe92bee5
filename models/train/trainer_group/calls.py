"""Calls of the stage to rank 0 and their replies: typed structs as msgpack over a socket, arrays as raw bytes.

A call is encoded once, in the stage; rank 0 sends the same bytes to all ranks. `TrainerGroupBackend` is the stage's
end. The stage process has no process group. When the connection breaks, a rank was lost: the call raises `PeerGone`,
the stage ends with it, and the supervisor starts the whole unit again.

Invariants: every call gets exactly one reply; nothing that is decoded can run code; errors of the drawn trees cross as
themselves, by class name and text; whatever breaks the connection shows as `LinkLost`, and then the link stays lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models import errors
from models.errors import AlgorithmError, TrainError, WeightsError
from models.train.interface import TrainSequence
from models.train.trainer_group.rank_spec import PeerGone, Rendezvous, TrainerGroupClosed
from models.weights.shared_memory_reader import SlotManifest

log = logging.getLogger("sluice.train")

POLL_S: Final = 0.05
DRAWN: Final = (TrainError, AlgorithmError)  # errors after which the ranks still agree, if all raise them

# ------------------------------------------------------------------ calls


class Plain(Struct, frozen=True, tag=True):
    """A method of `Trainer` without arguments. Setup: build the trainer, and load its models. End: the run is over:
    finish what is being written, and end."""

    name: Literal["Setup", "Flush", "Step", "Discard", "FinishSave", "Offload", "Onload", "End"]


class WithSequences(Struct, frozen=True, tag=True):
    name: Literal["LogProbs", "Accumulate"]
    sequences: list[TrainSequence]


class WithDirectory(Struct, frozen=True, tag=True):
    name: Literal["Save", "Load"]
    directory: str


class BeginBatch(Struct, frozen=True, tag=True):
    rollouts: int
    steps: int
    version: int
    lr_scale: float
    name: Literal["BeginBatch"] = "BeginBatch"


class WriteSlot(Struct, frozen=True, tag=True):
    """Rank 0: write the current weights into the next slot of `directory`, which is laid out as `source`."""

    directory: str
    source: str
    version: int
    run_generation: int
    name: Literal["WriteSlot"] = "WriteSlot"


Call = Plain | WithSequences | WithDirectory | BeginBatch | WriteSlot
END: Final = Plain("End")

# ------------------------------------------------------------------ replies


class Raised(Struct, frozen=True):
    """An error that leaves the ranks as they were."""

    name: str
    text: str


class Reply(Struct, frozen=True, tag=True, omit_defaults=True):
    """What a call returned: one of these, or nothing."""

    manifest: SlotManifest | None = None  # WriteSlot
    metrics: dict[str, float] = {}  # Step
    arrays: list[npt.NDArray[np.float32]] = []  # LogProbs
    raised: Raised | None = None


def raised(error: Exception) -> Reply:
    return Reply(raised=Raised(type(error).__name__, str(error)))


def error_of(raised: Raised) -> Exception:
    """The error itself; an error of an unknown class becomes a `TrainError`."""
    kind = getattr(errors, raised.name, None)
    if isinstance(kind, type) and issubclass(kind, (*DRAWN, WeightsError)):
        return kind(raised.text)
    return TrainError(f"{raised.name}: {raised.text}")


# ------------------------------------------------------------------ bytes


def _of_numpy(value: Any) -> Any:
    """An array as its dtype and bytes, a number as Python's."""
    return value.item() if isinstance(value, np.generic) else (value.dtype.str, value.tobytes())


def _as_numpy(kind: Any, value: tuple[str, bytes]) -> npt.NDArray[Any]:
    """The array as its field declares it, `npt.NDArray[np.int32]`. Writable, as it was before."""
    dtype, data = value
    _shape, declared = get_args(kind)
    return np.frombuffer(data, dtype=dtype).astype(*get_args(declared))


encode: Final = msgspec.msgpack.Encoder(enc_hook=_of_numpy).encode
decode_call: Final[Callable[[bytes], Call]] = msgspec.msgpack.Decoder(Call, dec_hook=_as_numpy).decode
decode_reply: Final[Callable[[bytes], Reply]] = msgspec.msgpack.Decoder(Reply, dec_hook=_as_numpy).decode


class LinkLost(ConnectionError):
    """The peer closed the connection, or the connection broke."""


class Link:
    """One end of a connection, for one reader at a time. Only bytes are sent: `Connection` would also unpickle."""

    def __init__(self, connected: socket.socket) -> None:
        """Takes over a blocking socket."""
        self._connection = Connection(connected.detach())

    @classmethod
    def to(cls, address: str) -> Link:
        """Connect to a listening socket. Raises LinkLost."""
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connecting.connect(address)
        except OSError as error:
            connecting.close()
            raise LinkLost(f"no process listens at {address} ({error})") from error
        return cls(connecting)

    def send(self, data: bytes) -> None:
        """Waits until the system has taken the message over. Raises LinkLost."""
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise LinkLost(f"the connection broke ({error})") from error

    def receive(self) -> bytes:
        """Waits for a message. Raises LinkLost."""
        try:
            return self._connection.recv_bytes()
        except EOFError as error:
            raise LinkLost("the peer closed the connection") from error
        except OSError as error:
            raise LinkLost(f"the connection broke ({error})") from error

    def request(self, data: bytes) -> bytes:
        """Send, and wait for the reply. Raises LinkLost."""
        self.send(data)
        return self.receive()

    def readable(self, timeout_s: float) -> bool:
        """Whether a message, or the end, has come within that time."""
        return self._connection.poll(timeout_s)

    def break_off(self) -> None:
        """End the connection; every thread that waits here gets LinkLost."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)  # has no effect if it has ended already

    def close(self) -> None:
        self.break_off()
        self._connection.close()


# ------------------------------------------------------------------ the stage's end


class TrainerGroupBackend:
    """`TrainBackend` on the trainer group of this incarnation.

    One thread at a time may call it, but for `close`, which any thread may call at any time.

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
        self._request(Plain("Setup"))

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        """Log-probs [R] of each sequence's response tokens under the current weights, temperature applied."""
        return self._request(WithSequences("LogProbs", list(sequences))).arrays

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        """As `Trainer.begin_batch`."""
        self._request(BeginBatch(rollouts, steps, version, lr_scale))

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        """As `Trainer.accumulate`."""
        self._request(WithSequences("Accumulate", list(sequences)))

    def flush(self) -> None:
        """As `Trainer.flush`."""
        self._request(Plain("Flush"))

    def step(self) -> dict[str, float]:
        """As `Trainer.step`."""
        return self._request(Plain("Step")).metrics

    def discard(self) -> None:
        """As `Trainer.discard`."""
        self._request(Plain("Discard"))

    def write_slot(self, directory: Path, source: Path, version: int, run_generation: int) -> SlotManifest:
        """Rank 0 writes the current weights into the next slot; see `TrainBackend`. Raises WeightsError."""
        manifest = self._request(WriteSlot(str(directory), str(source), version, run_generation)).manifest
        assert manifest is not None
        return manifest

    def save(self, directory: Path) -> None:
        """As `Trainer.save`."""
        self._request(WithDirectory("Save", str(directory)))

    def finish_save(self) -> None:
        """As `Trainer.finish_save`."""
        self._request(Plain("FinishSave"))

    def load(self, directory: Path) -> None:
        """As `Trainer.load`."""
        self._request(WithDirectory("Load", str(directory)))

    def offload(self) -> None:
        """As `Trainer.offload`, in all ranks."""
        self._request(Plain("Offload"))

    def onload(self) -> None:
        """As `Trainer.onload`, in all ranks."""
        self._request(Plain("Onload"))

    def close(self) -> None:
        """End the trainer group if no call is under way; else break the call off. May be called twice."""
        self._closed.set()
        if not self._calling.acquire(timeout=POLL_S):
            if (link := self._link) is not None:
                link.break_off()
            return
        link, self._link = self._link, None
        try:
            if link is not None:
                with contextlib.closing(link):
                    link.request(encode(END))
        except LinkLost:
            log.info("the trainer group had ended before the stage ended it")
        finally:
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
                raise PeerGone(f"{call.name}: the trainer group was lost: {error}") from error
        if reply.raised is not None:
            raise error_of(reply.raised)
        return reply

    def _join(self) -> Link:
        """Waits until the ranks are up; unblocked by that, or by `close`. Raises LinkLost, TrainerGroupClosed."""
        while not self._closed.is_set():
            rendezvous = self._meeting()
            if rendezvous is not None and rendezvous.incarnation == self._incarnation:
                return Link.to(rendezvous.address)
            self._closed.wait(POLL_S)
        raise TrainerGroupClosed("the training backend was closed while it waited for its trainer group")
