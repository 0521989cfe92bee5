"""What stage and rank 0 say to each other: typed structs as msgpack, arrays as raw bytes.

A call is encoded once, in the stage; the same bytes go over the socket, to all ranks, and into the journal.

Invariants: every call gets exactly one reply, except that an `Export` sends buckets before it, each of which is
answered by `GoOn` or `Stop`; nothing that is decoded can run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.train.interface import TrainSequence

Float32Array = npt.NDArray[np.float32]


class SequenceBytes(Struct, frozen=True, array_like=True):
    """A `TrainSequence` on its way. Arrays are writable after decoding, as they were before."""

    group_id: int
    rollout_id: int
    tokens: bytearray  # int32
    prompt_length: int
    loss_mask: bytearray  # uint8
    rollout_log_probs: bytearray  # float32
    advantages: bytearray  # float32
    versions: bytearray  # int32
    reward: float
    truncated: bool
    teacher_log_probs: bytearray | None  # float32
    prefix: tuple[int, int] | None
    token_rewards: bytearray | None  # float32
    turn_total: float


# ------------------------------------------------------------------ calls, and answers to buckets


class Setup(Struct, frozen=True, tag=True):
    pass


class LogProbs(Struct, frozen=True, tag=True):
    sequences: list[SequenceBytes]


class BeginBatch(Struct, frozen=True, tag=True):
    rollouts: int
    steps: int
    version: int


class Accumulate(Struct, frozen=True, tag=True):
    sequences: list[SequenceBytes]


class Flush(Struct, frozen=True, tag=True):
    pass


class Step(Struct, frozen=True, tag=True):
    pass


class Discard(Struct, frozen=True, tag=True):
    pass


class Export(Struct, frozen=True, tag=True):
    pass


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
    float32: list[bytes]


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

_to_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Call | Answer)
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromRank)


def encode(message: Call | Answer | FromRank) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes) -> Call | Answer:
    """What a rank is sent."""
    message: Call | Answer = _to_rank.decode(data)
    return message


def decode_reply(data: bytes) -> FromRank:
    reply: FromRank = _replies.decode(data)
    return reply


# ------------------------------------------------------------------ sequences


def pack_sequences(sequences: Sequence[TrainSequence]) -> list[SequenceBytes]:
    return [
        SequenceBytes(
            s.group_id,
            s.rollout_id,
            _bytes(s.tokens, np.int32),
            s.prompt_length,
            _bytes(s.loss_mask, np.uint8),
            _bytes(s.rollout_log_probs, np.float32),
            _bytes(s.advantages, np.float32),
            _bytes(s.versions, np.int32),
            float(s.reward),
            bool(s.truncated),
            None if s.teacher_log_probs is None else _bytes(s.teacher_log_probs, np.float32),
            s.prefix,
            None if s.token_rewards is None else _bytes(s.token_rewards, np.float32),
            float(s.turn_total),
        )
        for s in sequences
    ]


def unpack_sequences(packed: Sequence[SequenceBytes]) -> list[TrainSequence]:
    return [
        TrainSequence(
            group_id=s.group_id,
            rollout_id=s.rollout_id,
            tokens=np.frombuffer(s.tokens, dtype=np.int32),
            prompt_length=s.prompt_length,
            loss_mask=np.frombuffer(s.loss_mask, dtype=np.uint8),
            rollout_log_probs=np.frombuffer(s.rollout_log_probs, dtype=np.float32),
            advantages=np.frombuffer(s.advantages, dtype=np.float32),
            versions=np.frombuffer(s.versions, dtype=np.int32),
            reward=s.reward,
            truncated=s.truncated,
            teacher_log_probs=_optional(s.teacher_log_probs),
            prefix=s.prefix,
            token_rewards=_optional(s.token_rewards),
            turn_total=s.turn_total,
        )
        for s in packed
    ]


def _bytes(array: npt.NDArray[Any], dtype: type[np.generic]) -> bytearray:
    return bytearray(np.ascontiguousarray(array, dtype=dtype).data)


def _optional(data: bytearray | None) -> Float32Array | None:
    return None if data is None else np.frombuffer(data, dtype=np.float32)
