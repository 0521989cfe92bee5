"""Slots of weights: their safetensors layout, their cut into buckets, and their directory. No torch.

A safetensors file is: 8 bytes little-endian header length, the header (JSON, padded with spaces), the tensors' bytes.

Invariants:
- tensors lie in order of falling element size, then in the given order, without gaps: each is aligned to its element,
  and the file satisfies the format's rule that the ranges cover the data exactly;
- the data begin at a multiple of 64 bytes;
- the same tensors give the same header, so every later version overwrites the file in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from models.errors import SlotDirectoryError, SourceError

WEIGHTS_FILE: Final = "model.safetensors"
ALIGNMENT: Final = 64
_MAX_HEADER: Final = 100_000_000  # the format's own limit

ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


class TensorSpec(Struct, frozen=True):
    """What a tensor is, without its values. `dtype` is a name of the safetensors format: F32, BF16, ..."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ELEMENT_BYTES[self.dtype] * math.prod(self.shape)


class TensorRange(Struct, frozen=True):
    """A tensor and where its bytes lie: [start, end) counted from the begin of the file."""

    spec: TensorSpec
    start: int
    end: int


class Layout(Struct, frozen=True):
    """A whole file: its first bytes and the range of each tensor, in file order."""

    header: bytes  # length prefix and padding included
    tensors: tuple[TensorRange, ...]
    file_bytes: int

    @property
    def data_start(self) -> int:
        return len(self.header)

    @property
    def data_bytes(self) -> int:
        return self.file_bytes - len(self.header)


class StoredTensor(Struct, frozen=True):
    """A tensor as its bytes: for what passes tensors on and computes nothing, and so needs no torch."""

    spec: TensorSpec
    data: bytes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape


class _HeaderEntry(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def lay_out(specs: Iterable[TensorSpec]) -> Layout:
    """Place tensors in one file. Raises SourceError for no tensor, or a name given twice."""
    wanted = list(specs)
    names = [spec.name for spec in wanted]
    if not names:
        raise SourceError("no tensor to lay out: a slot needs at least one; check the source checkpoint")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"tensor {twice!r} is listed twice; names in a file must differ")
    wanted.sort(key=lambda spec: -ELEMENT_BYTES[spec.dtype])  # stable: the order given decides among equals
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: list[tuple[int, int]] = []
    end = 0
    for spec in wanted:
        offsets.append((end, end + spec.nbytes))
        end += spec.nbytes
        entries[spec.name] = _HeaderEntry(spec.dtype, spec.shape, offsets[-1])
    text = msgspec.json.encode(entries)
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    ranges = tuple(TensorRange(spec, base + a, base + b) for spec, (a, b) in zip(wanted, offsets, strict=True))
    return Layout(header=header, tensors=ranges, file_bytes=base + end)


def read_layout(path: Path) -> Layout:
    """Read the layout of an existing safetensors file. Raises SourceError if it is not one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
            raise SourceError(f"{path} is no safetensors file: its header claims {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(raw, type=_HeaderEntry) for name, raw in fields.items() if name != "__metadata__"
        }
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is no safetensors file: its header does not decode ({error})") from error
    base = 8 + length
    ranges = tuple(
        TensorRange(
            TensorSpec(name, entry.dtype, entry.shape), base + entry.data_offsets[0], base + entry.data_offsets[1]
        )
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets)
    )
    for item in ranges:
        if item.spec.dtype not in ELEMENT_BYTES or item.end - item.start != item.spec.nbytes or item.end > size:
            raise SourceError(f"{path}: the header's entry for {item.spec.name!r} does not fit the file; copy it again")
    return Layout(header=prefix + text, tensors=ranges, file_bytes=size)


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file, in file order. Raises SourceError if it is not one."""
    with path.open("rb") as file:
        for item in read_layout(path).tensors:
            file.seek(item.start)
            yield StoredTensor(item.spec, file.read(item.spec.nbytes))


# --------------------------------------------------------------------------------------------------
# A slot cut into buckets: consecutive tensors whose bytes lie end to end. No torch.
#
# Invariants:
# - every tensor is in exactly one bucket, buckets follow each other in file order, and together they are the file's
#   data;
# - a bucket holds at most `limit` bytes, unless one tensor alone is larger;
# - inside a bucket every tensor is aligned to its element size, so a receiver may view the bytes as they are.


# safetensors' names of the element types that slots hold, and torch's
TORCH_NAMES: Final[Mapping[str, str]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Bucket(Struct, frozen=True):
    """Tensors whose bytes are [start, end) of the file."""

    tensors: tuple[TensorRange, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def names(self) -> list[str]:
        return [item.spec.name for item in self.tensors]

    @property
    def dtypes(self) -> list[str]:
        """Element types as torch calls them."""
        return [TORCH_NAMES[item.spec.dtype] for item in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(item.spec.shape) for item in self.tensors]


def plan_buckets(layout: Layout, limit: int) -> list[Bucket]:
    """Cut a slot's layout into buckets of at most `limit` bytes."""
    buckets: list[Bucket] = []
    held: list[TensorRange] = []
    for item in layout.tensors:
        if held and item.end - held[0].start > limit:
            buckets.append(Bucket(tuple(held), held[0].start, held[-1].end))
            held = []
        held.append(item)
    buckets.append(Bucket(tuple(held), held[0].start, held[-1].end))
    return buckets


# --------------------------------------------------------------------------------------------------
# Where the slots lie: a private directory in shared memory that lives as long as its run.
#
# Invariants:
# - the directory is 0700 and appears with its owner's lock already held;
# - only its owner removes a directory, or any process once the owner is dead: the lock on `owner.pid` is the proof (the
#   kernel releases it with the process, however it ends), the number inside is for people;
# - `left_behind` lists files elsewhere in shared memory that the run's processes would leave; they go with the
#   directory of a dead owner;
# - nothing that another user owns is touched.


PREFIX: Final = "sluice-"
OWNER_FILE: Final = "owner.pid"
LEFT_BEHIND_FILE: Final = "left_behind"
DRAFT_S: Final = 60.0  # a younger draft may be about to be locked
SHARED_MEMORY: Final = Path("/dev/shm")


def choose_directory(name: str, fallback: Path, nbytes: int, *, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Where to put two slots of `nbytes` each: shared memory if it has the room, else `fallback` (the run directory).

    Room means two slots plus a tenth. Nothing is created yet.
    """
    needed = int(2 * nbytes * 1.1)
    if os.access(shared_memory, os.W_OK) and shutil.disk_usage(shared_memory).free >= needed:
        return shared_memory / f"{PREFIX}{name}"
    return fallback / f"{PREFIX}{name}"


def slots_directory(run_id: str, run_dir: Path, checkpoint: str) -> Path:
    """Where the weights are published: shared memory if it has room for two versions, else the run directory."""
    nbytes = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))
    return choose_directory(run_id, run_dir, 2 * nbytes)  # twice: the trainer may publish fp32 of a bf16 checkpoint


class DirectoryLease:
    """Ownership of a slot directory, from construction to `release`."""

    def __init__(self, directory: Path) -> None:
        """Create `directory` (0700) and hold its lock. Removes a dead run's leftover of the same name.

        Raises SlotDirectoryError if a live process owns it or if something else is in the way.
        """
        self.directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        if directory.exists() and not remove_if_stale(directory):
            raise SlotDirectoryError(
                f"{directory} is in use by {_owner(directory)}; two runs cannot share weight slots: end the other run "
                "or give this one another name"
            )
        draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))  # mkdtemp makes it 0700
        self._lock = os.open(draft / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, f"{os.getpid()}\n".encode())
            draft.rename(directory)
        except OSError as error:
            os.close(self._lock)
            shutil.rmtree(draft, ignore_errors=True)
            raise SlotDirectoryError(
                f"{directory} cannot be made ({error.strerror}); choose a directory that this user may write"
            ) from error

    def release(self) -> None:
        """Remove the directory and give up the lock. May be called twice."""
        if self._lock < 0:
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def remove_if_stale(directory: Path) -> bool:
    """Remove a slot directory whose owner is dead. False if it is alive, foreign or no slot directory."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return False
        lock = os.open(directory / OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False  # not a slot directory, or removed by another process just now
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_listed(directory)
        shutil.rmtree(directory, ignore_errors=True)
        return not directory.exists()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def remove_stale(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the slot directories that dead runs left in `root`; return the removed ones."""
    if not root.is_dir():
        return []
    found = sorted([*root.glob(f"{PREFIX}*"), *_abandoned_drafts(root)])
    return [directory for directory in found if remove_if_stale(directory)]


def list_left_behind(directory: Path, files: Iterable[Path]) -> None:
    """Add files of shared memory that are to go with the directory, if its owner is killed."""
    with (directory / LEFT_BEHIND_FILE).open("a") as file:
        file.writelines(f"{path}\n" for path in files)


def remove_listed(directory: Path) -> None:
    """Remove the files of shared memory that were listed in a directory: their processes have ended."""
    with contextlib.suppress(OSError):  # none was listed
        for path in map(Path, (directory / LEFT_BEHIND_FILE).read_text().splitlines()):
            if path.parent == SHARED_MEMORY:
                with contextlib.suppress(OSError):  # it is gone already
                    path.unlink()


def _abandoned_drafts(root: Path) -> list[Path]:
    """Drafts of directories whose maker was killed. An empty one was never locked: it is removed here."""
    found = []
    for draft in root.glob(f".{PREFIX}*"):
        with contextlib.suppress(OSError):  # renamed just now, or another user's
            if time.time() - draft.stat().st_mtime > DRAFT_S:
                found.append(draft)
                draft.rmdir()
    return found


def _owner(directory: Path) -> str:
    with contextlib.suppress(OSError):  # the number is only for the message
        return f"process {(directory / OWNER_FILE).read_text().strip()}"
    return "another program"
