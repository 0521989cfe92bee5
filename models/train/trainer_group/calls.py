"""What stage and rank 0 say to each other: typed structs as msgpack, arrays as raw bytes.

A call is encoded once, in the stage; the same bytes go over the socket, to all ranks, and into the journal.

Invariants: every call gets exactly one reply, except that an `Export` sends buckets before it, each of which is
answered by `GoOn` or `Stop`; nothing that is decoded can run code.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.train.interface import TrainSequence

# ------------------------------------------------------------------ calls, and answers to buckets


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


class Export(Struct, frozen=True, tag=True):
    """Send the current weights, bucket by bucket."""


class Save(Struct, frozen=True, tag=True):
    directory: str


class FinishSave(Struct, frozen=True, tag=True):
    """Wait until what a save writes in the background is on disk."""


class Load(Struct, frozen=True, tag=True):
    directory: str


class End(Struct, frozen=True, tag=True):
    """The run is over: finish what is being written, and end."""


class GoOn(Struct, frozen=True, tag=True):
    """A bucket's tensors have been used; its memory may be written again."""


class Stop(Struct, frozen=True, tag=True):
    """No more tensors are wanted."""


Call = Setup | LogProbs | BeginBatch | Accumulate | Flush | Step | Discard | Export | Save | FinishSave | Load | End
Answer = GoOn | Stop

CHANGE_STATE: Final = (BeginBatch, Accumulate, Flush, Step, Discard)  # what a journal has to repeat

# ------------------------------------------------------------------ replies


class Done(Struct, frozen=True, tag=True):
    complete: bool = True  # of an export: whether all tensors were sent


class Metrics(Struct, frozen=True, tag=True):
    values: dict[str, float]


class Arrays(Struct, frozen=True, tag=True):
    float32: list[npt.NDArray[np.float32]]


class Raised(Struct, frozen=True, tag=True):
    """A drawn error that all ranks raised alike."""

    name: str
    text: str


class TensorPlace(Struct, frozen=True, array_like=True):
    name: str
    dtype: str  # as torch calls it
    shape: tuple[int, ...]
    start: int  # bytes


class Bucket(Struct, frozen=True, tag=True):
    """Tensors that lie in shared memory now."""

    path: str
    nbytes: int  # of the memory
    tensors: list[TensorPlace]


Reply = Done | Metrics | Arrays | Raised
FromRank = Reply | Bucket


def _of_numpy(value: Any) -> Any:
    """An array as its dtype and bytes, a number as Python's."""
    return value.item() if isinstance(value, np.generic) else (value.dtype.str, value.tobytes())


def _as_numpy(kind: Any, value: tuple[str, bytes]) -> npt.NDArray[Any]:
    """The array as its field declares it, `npt.NDArray[np.int32]`. Writable, as it was before."""
    dtype, data = value
    _shape, declared = get_args(kind)
    return np.frombuffer(data, dtype=dtype).astype(*get_args(declared))


_encoder = msgspec.msgpack.Encoder(enc_hook=_of_numpy)
_to_rank: msgspec.msgpack.Decoder[Call | Answer] = msgspec.msgpack.Decoder(Call | Answer, dec_hook=_as_numpy)
_replies: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank, dec_hook=_as_numpy)


def encode(message: Call | Answer | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Call | Answer:
    """What a rank is sent."""
    return _to_rank.decode(data)


def decode_reply(data: bytes) -> FromRank:
    return _replies.decode(data)
