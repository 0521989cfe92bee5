"""The trainer's groups in a checkpoint: `buffer.msgpack`, so that what was generated is not generated again.

The file is the fingerprint of the message format, then one record per group: its id, how many rollouts were wanted,
the length, and the msgpack of its `RolloutSlice`. It is written and read group by group.

Invariants: a group is restored by exactly one of two: the trainer, which finds it here, or the prompt stage, which asks
its prompt again; the controller decides which (`restorable`), and says it to both. What was written by a program with
other messages, or for another number of rollouts, is asked again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct as Layout
from struct import error as LayoutError
from typing import Any, BinaryIO, Final, TypeVar, get_args

import msgspec
import numpy as np
import xxhash

from models.checkpoint import CheckpointError, explain_disk_errors
from stages.messages import Extra, RolloutSlice, WireArray

BUFFER_FILE: Final = "buffer.msgpack"
Message = TypeVar("Message", bound=msgspec.Struct)
_RECORD: Final = Layout("<qqQ")  # group id, rollouts wanted, bytes of the message


def _fields(kind: object) -> Iterator[str]:
    """Names and types of a message's fields, nested ones included: what writer and reader must agree on."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield f"{kind.__name__}.{field.name}: {field.type}"
            yield from _fields(field.type)
    for part in get_args(kind):
        yield from _fields(part)


def fingerprint(kind: type[msgspec.Struct]) -> bytes:
    """16 bytes that are equal for equal messages."""
    return xxhash.xxh3_128("\n".join(_fields(kind)).encode()).digest()


_FORMAT: Final = fingerprint(RolloutSlice)


def _encode_array(array: WireArray | Extra) -> Any:
    return array.tobytes() if isinstance(array, WireArray) else (array.dtype.str, array.shape, array.tobytes())


def _decode_array(kind: type[WireArray | Extra], value: Any) -> Any:
    if issubclass(kind, WireArray):
        return np.frombuffer(value, dtype=kind.wire_dtype).view(kind)
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape).view(kind)


def message_encoder() -> msgspec.msgpack.Encoder:
    """Of messages in files: arrays are part of the bytes."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_array)


def message_decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Message]:
    """The other way."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


_encoder, _decoder = message_encoder(), message_decoder(RolloutSlice)


@dataclass(frozen=True)
class RestoredLease:
    """A group from a checkpoint. Its hub ended with the run before: it is released by its settlement alone."""

    message: RolloutSlice
    key: str = ""
    attempt: int = 1

    def done(self) -> None:
        """Nothing to release."""

    def poison(self, reason: str) -> None:
        """Nobody keeps it."""


def write_groups(directory: Path, groups: Iterable[RolloutSlice]) -> None:
    """Add the groups to a checkpoint's draft. Raises CheckpointError."""
    with explain_disk_errors(directory, remove=directory):
        write_file(directory / BUFFER_FILE, groups)


def write_file(path: Path, groups: Iterable[RolloutSlice]) -> None:
    """One file of groups."""
    with path.open("wb") as file:
        file.write(_FORMAT)
        for slice_ in groups:
            body = _encoder.encode(slice_)
            file.write(_RECORD.pack(slice_.group.group_id, slice_.group.n_samples, len(body)))
            file.write(body)


def restorable(checkpoint: Path, n_samples: int) -> frozenset[int]:
    """Ids of the groups that can go on where they were; none in a checkpoint of a program that did not keep them."""
    path = checkpoint / BUFFER_FILE
    if not path.exists():
        return frozenset()
    with path.open("rb") as file:
        if file.read(len(_FORMAT)) != _FORMAT:
            return frozenset()
        return frozenset(group_id for group_id, wanted, _ in _records(file) if wanted == n_samples)


def read_groups(checkpoint: Path, wanted: Collection[int]) -> list[RestoredLease]:
    """The groups with these ids. Raises CheckpointError if one is missing or cannot be read."""
    found = []
    path = checkpoint / BUFFER_FILE
    try:
        with path.open("rb") as file:
            file.seek(len(_FORMAT))
            for group_id, _, size in _records(file):
                if group_id in wanted:
                    found.append(RestoredLease(_decoder.decode(file.read(size))))
    except (OSError, ValueError, LayoutError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint of this run") from error
    if len(found) != len(wanted):
        raise CheckpointError(
            f"{path} holds {len(found)} of the {len(wanted)} groups that are to be restored; use another checkpoint"
        )
    return found


def read_file(path: Path) -> list[RolloutSlice]:
    """All groups of a file. Raises ValueError, OSError or MsgspecError for one that cannot be read."""
    with path.open("rb") as file:
        if file.read(len(_FORMAT)) != _FORMAT:
            raise ValueError("its messages are others")
        try:
            return [_decoder.decode(file.read(size)) for _, _, size in _records(file)]
        except LayoutError as error:
            raise ValueError("it is cut short") from error


def _records(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """(group id, rollouts wanted, bytes) of each record, the file standing before the message."""
    while head := file.read(_RECORD.size):
        group_id, n_samples, size = _RECORD.unpack(head)
        end = file.tell() + size
        yield group_id, n_samples, size
        file.seek(end)
