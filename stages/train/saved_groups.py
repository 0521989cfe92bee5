"""Complete groups in files: those that wait at a checkpoint (`buffer.msgpack`), and whole rollout batches.

A file is the fingerprint of the message format, then one record per group: its id, how many rollouts were wanted,
the length, and the msgpack of its `RolloutSlice`; then the xxh3_128 of all that. It is written and read group by group.
Files of earlier versions end without a checksum. Batches are those of
`--save-debug-rollout-data` and `--load-debug-rollout-data`, and those that a restarted trainer trains again
(stages/train/checkpoints.py).

Invariants:
- a group of a checkpoint is restored by exactly one of two: the trainer, which finds it here, or the prompt stage,
  which submits its prompt again; the controller decides which (`restorable`) and passes it to both. A file of other
  messages, or for another number of rollouts, restores none;
- a batch file is there whole or not at all, and loads only with the bytes that were written;
- a run that loads trains batch t on exactly the groups of file t, in their order; its group ids are dense, so those of
  a run that dropped groups are numbered anew; no token is trained that the bound of staleness forbids.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct as Layout
from struct import error as LayoutError
from threading import Lock
from typing import Any, BinaryIO, Final, TypeVar, get_args

import msgspec
import numpy as np
import xxhash

from configs.schema import Config
from configs.schema.run import batch_file
from models.checkpoint import CheckpointError, explain_disk_errors
from models.disk import open_file
from models.train.interface import TrainSequence
from stages.errors import SavedBatchError
from stages.messages import Extra, RolloutSlice, WireArray
from stages.rollouts import oldest_version
from stages.staleness_gate import StalenessGate

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


_UNSEALED: Final = fingerprint(RolloutSlice)  # begins a file without a checksum
_FORMAT: Final = xxhash.xxh3_128_digest(_UNSEALED + b"sealed")
_SEAL_BYTES: Final = 16
log = logging.getLogger("sluice.train")


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
        """No copy is kept."""


def write_groups(directory: Path, groups: Iterable[RolloutSlice]) -> None:
    """Add the groups to a checkpoint's draft. Raises CheckpointError."""
    with explain_disk_errors(directory, remove=directory):
        write_file(directory / BUFFER_FILE, groups)


def write_file(path: Path, groups: Iterable[RolloutSlice]) -> None:
    """One file of groups."""
    seal = xxhash.xxh3_128(_FORMAT)
    with path.open("wb") as file:
        file.write(_FORMAT)
        for slice_ in groups:
            body = _encoder.encode(slice_)
            for part in (_RECORD.pack(slice_.group.group_id, slice_.group.n_samples, len(body)), body):
                seal.update(part)
                file.write(part)
        file.write(seal.digest())


def restorable(checkpoint: Path, n_samples: int) -> frozenset[int]:
    """Ids of the groups that can continue where they were; none in a checkpoint without them."""
    path = checkpoint / BUFFER_FILE
    if not path.exists():
        return frozenset()
    with open_file(path) as file:
        try:
            end = _begin(file)
        except ValueError:
            return frozenset()
        return frozenset(group_id for group_id, wanted, _ in _records(file, end) if wanted == n_samples)


def read_groups(checkpoint: Path, wanted: Collection[int]) -> list[RestoredLease]:
    """The groups with these ids. Raises CheckpointError if one is missing or cannot be read."""
    found = []
    path = checkpoint / BUFFER_FILE
    try:
        with open_file(path) as file:
            for group_id, _, size in _records(file, _begin(file)):
                if group_id in wanted:
                    found.append(RestoredLease(_decoder.decode(file.read(size))))
    except (OSError, ValueError, LayoutError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint of this run") from error
    if len(found) != len(wanted):
        raise CheckpointError(f"{path} holds {len(found)} of {len(wanted)} groups to restore; use another checkpoint")
    return found


def read_file(path: Path) -> list[RolloutSlice]:
    """All groups of a file. Raises ValueError, OSError or MsgspecError for one that cannot be read."""
    with open_file(path) as file:
        end = _begin(file)
        if end < os.fstat(file.fileno()).st_size:
            _check_seal(file, end)
        else:
            log.warning("%s has no checksum, since an earlier version wrote it: damage would not be seen", path)
        try:
            return [_decoder.decode(file.read(size)) for _, _, size in _records(file, end)]
        except LayoutError as error:
            raise ValueError("it is cut short") from error


def _begin(file: BinaryIO) -> int:
    """Go to the first record; where the last one ends. Raises ValueError for a file of other messages."""
    form, size = file.read(len(_FORMAT)), os.fstat(file.fileno()).st_size
    if form not in (_FORMAT, _UNSEALED):
        raise ValueError("its messages are others")
    return size - _SEAL_BYTES if form == _FORMAT else size


def _check_seal(file: BinaryIO, end: int) -> None:
    """Compare the checksum of all records, and go back to the first one. Raises ValueError."""
    seal, left = xxhash.xxh3_128(_FORMAT), end - len(_FORMAT)
    while left > 0 and (part := file.read(min(left, 1 << 20))):
        seal.update(part)
        left -= len(part)
    if file.read() != seal.digest():
        raise ValueError("its checksum differs from its content: it is damaged")
    file.seek(len(_FORMAT))


def _records(file: BinaryIO, end: int) -> Iterator[tuple[int, int, int]]:
    """(group id, rollouts wanted, bytes) of each record up to `end`, the file standing before the message."""
    while file.tell() < end:
        group_id, n_samples, size = _RECORD.unpack(file.read(_RECORD.size))
        behind = file.tell() + size
        yield group_id, n_samples, size
        file.seek(behind)


def write_batch(path: Path, groups: Iterable[RolloutSlice]) -> None:
    """Write one batch in the order given. Raises CheckpointError where there is no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with explain_disk_errors(path):
        write_file(draft, groups)
        draft.replace(path)


def save_batch(template: str, rollout_id: int, groups: Sequence[RolloutSlice]) -> None:
    """Write one batch (0 = the first) in the order of its ids. Raises CheckpointError where there is no room."""
    write_batch(Path(batch_file(template, rollout_id)), sorted(groups, key=lambda slice_: slice_.group.group_id))


def save_train_data(template: str, rollout_id: int, sequences: Sequence[TrainSequence]) -> None:
    """Write what the trainer was given of one batch (0 = the first) as Parquet, a row for each sequence in the order of
    its rollouts; columns are the fields of `TrainSequence` that any of them has. Raises CheckpointError."""
    import pyarrow
    import pyarrow.parquet

    path = Path(batch_file(template, rollout_id))
    ordered = sorted(sequences, key=lambda sequence: sequence.rollout_id)
    columns = {field.name: [getattr(one, field.name) for one in ordered] for field in dataclasses.fields(TrainSequence)}
    given = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    draft = path.with_name(f".{path.name}.draft")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(given), draft)
        draft.replace(path)


def load_batch(template: str, rollout_id: int) -> list[RolloutSlice]:
    """The groups of a batch as they were saved. Raises SavedBatchError."""
    path = Path(batch_file(template, rollout_id))
    try:
        return read_file(path)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise SavedBatchError(
            f"--load-debug-rollout-data: {path} cannot be read as a batch of this version of Sluice ({error}); save it "
            "again"
        ) from error


class SavedBatches:
    """Groups of saved batches by the id that this run gives them. Safe to use from several threads."""

    def __init__(self, config: Config) -> None:
        self._template = config.debug.load_debug_rollout_data or ""
        self._size, self._members = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
        self._gate = StalenessGate.of(config)
        self._lock = Lock()
        self._newest: tuple[int, list[RolloutSlice]] = (-1, [])

    def group(self, group_id: int) -> RolloutSlice:
        """Raises SavedBatchError for a batch that this configuration cannot train."""
        step, place = divmod(group_id, self._size)
        with self._lock:
            if self._newest[0] != step:
                self._newest = (step, self._checked(step))
            slice_ = self._newest[1][place]
        return msgspec.structs.replace(slice_, group=msgspec.structs.replace(slice_.group, group_id=group_id))

    def _checked(self, step: int) -> list[RolloutSlice]:
        groups = load_batch(self._template, step)
        file = batch_file(self._template, step)
        if len(groups) != self._size:
            raise SavedBatchError(
                f"{file} holds {len(groups)} groups, but --rollout-batch-size is {self._size}; set it to {len(groups)}"
            )
        for slice_ in groups:
            wanted, oldest = slice_.group.n_samples, oldest_version(slice_.samples)
            if wanted != self._members:
                raise SavedBatchError(
                    f"{file} holds groups of {wanted} rollouts, but --n-samples-per-prompt is {self._members}; set it "
                    f"to {wanted}"
                )
            if not self._gate.fresh(step=step, version=oldest):
                raise SavedBatchError(
                    f"{file} holds a token of version {oldest}, and batch {step} may be trained with a staleness of "
                    f"{self._gate.max_staleness}; set --max-staleness to at least {step - (oldest or 0)}"
                )
        return groups
