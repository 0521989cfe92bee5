"""Calls of the stage to rank 0 and their replies: typed structs as msgpack over a socket, arrays as raw bytes.

A call is encoded once, in the stage; rank 0 sends the same bytes to all ranks.

Invariants: every call gets exactly one reply; nothing that is decoded can run code; errors of the drawn trees cross as
themselves, by class name and text; whatever breaks the connection shows as `LinkLost`, and then the link stays lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.errors import AlgorithmError, TrainError, WeightsError
from models.train.interface import TrainSequence
from models.weights.shared_memory_reader import SlotManifest

DRAWN: Final = (TrainError, AlgorithmError)  # errors after which the ranks still agree, if all raise them

# ------------------------------------------------------------------ calls


class Setup(Struct, frozen=True, tag=True):
    """Build the trainer, and load its models."""


class LogProbs(Struct, frozen=True, tag=True):
    sequences: list[TrainSequence]


class BeginBatch(Struct, frozen=True, tag=True):
    rollouts: int
    steps: int
    version: int
    lr_scale: float = 1.0


class Accumulate(Struct, frozen=True, tag=True):
    sequences: list[TrainSequence]


class Flush(Struct, frozen=True, tag=True):
    """As `Trainer.flush`."""


class Step(Struct, frozen=True, tag=True):
    """As `Trainer.step`; replied to with `Metrics`."""


class Discard(Struct, frozen=True, tag=True):
    """As `Trainer.discard`."""


class WriteSlot(Struct, frozen=True, tag=True):
    """Rank 0: write the current weights into the next slot of `directory`, which is laid out as `source`."""

    directory: str
    source: str
    version: int
    run_generation: int


class Save(Struct, frozen=True, tag=True):
    directory: str


class FinishSave(Struct, frozen=True, tag=True):
    """Wait until what a save writes in the background is on disk."""


class Load(Struct, frozen=True, tag=True):
    directory: str


class End(Struct, frozen=True, tag=True):
    """The run is over: finish what is being written, and end."""


Call = Setup | LogProbs | BeginBatch | Accumulate | Flush | Step | Discard | WriteSlot | Save | FinishSave | Load | End

# ------------------------------------------------------------------ replies


class Done(Struct, frozen=True, tag=True):
    """The call returned nothing."""


class Written(Struct, frozen=True, tag=True):
    manifest: SlotManifest


class Metrics(Struct, frozen=True, tag=True):
    values: dict[str, float]


class Arrays(Struct, frozen=True, tag=True):
    float32: list[npt.NDArray[np.float32]]


class Raised(Struct, frozen=True, tag=True):
    """An error that leaves the ranks as they were."""

    name: str
    text: str


Reply = Done | Written | Metrics | Arrays | Raised


def _family(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def _by_name() -> Mapping[str, type[Exception]]:
    return {kind.__name__: kind for root in (*DRAWN, WeightsError) for kind in _family(root)}


def raised(error: Exception) -> Raised:
    return Raised(type(error).__name__, str(error))


def error_of(reply: Raised) -> Exception:
    """The error itself; an error of an unknown class becomes a `TrainError`."""
    kind = _by_name().get(reply.name)
    return TrainError(f"{reply.name}: {reply.text}") if kind is None else kind(reply.text)


# ------------------------------------------------------------------ bytes


def _of_numpy(value: Any) -> Any:
    """An array as its dtype and bytes, a number as Python's."""
    return value.item() if isinstance(value, np.generic) else (value.dtype.str, value.tobytes())


def _as_numpy(kind: Any, value: tuple[str, bytes]) -> npt.NDArray[Any]:
    """The array as its field declares it, `npt.NDArray[np.int32]`. Writable, as it was before."""
    dtype, data = value
    _shape, declared = get_args(kind)
    return np.frombuffer(data, dtype=dtype).astype(*get_args(declared))


_encoder = msgspec.msgpack.Encoder(enc_hook=_of_numpy)
_calls: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call, dec_hook=_as_numpy)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply, dec_hook=_as_numpy)


def encode(message: Call | Reply) -> bytes:
    return _encoder.encode(message)


def decode_call(data: bytes) -> Call:
    return _calls.decode(data)


def decode_reply(data: bytes) -> Reply:
    return _replies.decode(data)


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
