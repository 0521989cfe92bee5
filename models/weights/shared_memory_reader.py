"""Reading end of the weight slots: verify an announcement, read its tensors. No torch.

Invariants:
- a `SlotReader` exists only if the slot held exactly the announced bytes and was not touched meanwhile;
- the digest is a fold of the digests of pieces of `PIECE_BYTES`, so that pieces are digested beside each other, and
  while what was copied is in the cache; a process may share one verification among its engines (`anew=False`);
- a copy of its tensors may be used only after its `check()`: the counter shows whether a writer was active between the
  verification and the end of the copy;
- who copies all of it anyway has it copied during the verification (`into`), while the bytes are in the cache.

Slots are memory that changes later: an engine must copy the tensors out. A loader that maps the file (safetensors on
a CPU does) and keeps the mapping would see the next version appear inside the current one.

The counter detects (Python has no memory fences), the digest judges. For an engine that loads the directory by itself,
make a `SlotReader` before the load, and call its `check` after it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from models.disk import open_file
from models.errors import DigestMismatch, LayoutMismatch, TornWeights
from models.weights.layout import WEIGHTS_FILE, TensorSpec, read_layout
from models.weights.slot_directory import DirectoryLease

STATE_FILE: Final = "slot.state"  # the generation, one uint64
SLOT, COPY = "slot-", "copy-"  # begin the names of directories that hold one version after the other
PIECE_BYTES: Final = 4 << 20  # of the tensor bytes; part of the definition of the digest
THREADS: Final = min(4, os.cpu_count() or 1)  # that copy and digest a version
T = TypeVar("T")
Mapped = dict[Path, tuple[tuple[int, ...], T]]  # files of slots and their identity, in the order of their use

_verifying: Final = threading.Lock()
_verified: Final[dict[str, tuple[object, ...]]] = {}  # by path: the version last verified there, and the file
_mapped: Final[Mapped[mmap.mmap]] = {}


class SlotManifest(Struct, frozen=True):
    """One published version: its directory, and the proof that it still holds this version."""

    run_generation: int  # of this start of the run: 0, and one more at each resume
    version: int  # rollout batches trained
    path: str  # Hugging Face directory in shared memory
    digest: str  # `fold_digests` of the pieces of the tensor bytes in file order
    generation: int  # even counter of the slot
    element_bytes: int = 0  # of the coarsest tensor, as it was offered and as it is stored; 0: not known

    @property
    def label(self) -> str:
        """The label of these weights on engines; never used twice with other content."""
        return f"{self.run_generation}.{self.version}"


class SlotReader:
    """A verified slot, open for copying.

    slot = SlotReader(claim)             # reads all bytes; raises TornWeights or DigestMismatch
    for spec, data in slot.tensors():    # views: copy them
        ...
    slot.check()                         # raises TornWeights: discard the copy
    """

    def __init__(
        self, claim: SlotManifest, *, anew: bool = True, into: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        """
        Args:
            anew: if not, what this process has verified already is not read again. Of several that ask at once, one
                reads and the others wait for it.
            into: memory that gets the tensors of these names meanwhile, as address and bytes. It holds this version
                only once this has returned.

        Raises TornWeights, DigestMismatch and LayoutMismatch, the last with no memory touched.
        """
        self._claim = claim
        self._directory = Path(claim.path)
        try:
            self._state = _map(self._directory / STATE_FILE)[0].view(np.uint64)
            self.layout = read_layout(self._directory / WEIGHTS_FILE)
            self._data, file = _map(self._directory / WEIGHTS_FILE)
        except FileNotFoundError as error:
            raise TornWeights(
                f"{self._directory}: {error.filename} is gone, the run that published version {claim.version} "
                "has ended or cleaned up; wait for its next announcement"
            ) from error
        self.check()
        with _verifying:
            version = (claim.label, claim.digest, claim.generation, file)
            if anew or into or _verified.get(claim.path) != version:
                self._check_digest(into or {})
                self.check()
                _verified[claim.path] = version

    def tensors(self) -> Iterator[tuple[TensorSpec, npt.NDArray[np.uint8]]]:
        """Every tensor in file order with its raw little-endian bytes, a read-only view of the mapping."""
        for item in self.layout.tensors:
            yield item.spec, self.between(item.start, item.end)

    def between(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """The file's bytes [start, end), a read-only view of the mapping: copy them, then `check`."""
        return self._data[start:end]

    def check(self) -> None:
        """Raise TornWeights unless the slot still holds the claimed generation, complete."""
        found = int(self._state[0])
        if found == self._claim.generation and found % 2 == 0:
            return
        state = "is being written" if found % 2 else f"holds generation {found}"
        raise TornWeights(
            f"{self._directory}: version {self._claim.version} was published as generation {self._claim.generation}, "
            f"the slot {state}; discard the tensors read and fetch the newest announcement"
        )

    def _check_digest(self, into: Mapping[str, tuple[int, int]]) -> None:
        before, data = self.layout.data_start, self._data[self.layout.data_start :]
        copies = [list[tuple[int, int, int]]() for _ in range(0, len(data), PIECE_BYTES)]  # target, source, bytes
        for item in self.layout.tensors:
            target, nbytes = into.get(item.spec.name, (0, 0))
            if target and nbytes != item.end - item.start:
                raise LayoutMismatch(f"{self._directory}: {item.spec} does not fit into {nbytes} bytes")
            for number, start, end in in_pieces(item.start - before, item.end - before) if target else ():
                copies[number].append((target + start + before - item.start, data.ctypes.data + start, end - start))

        def take(number: int) -> bytes:
            digest = digest_of(data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
            for copy in copies[number]:
                ctypes.memmove(*copy)
            return digest

        with ThreadPoolExecutor(THREADS, "verify") as pool:
            found = fold_digests(pool.map(take, range(len(copies))))
        if found != self._claim.digest:
            self.check()  # a writer at work explains the difference; that is no corruption
            raise DigestMismatch(
                f"{self._directory}: the bytes of version {self._claim.version} have digest {found}, announced was "
                f"{self._claim.digest}; keep the weights in use and fetch again"
            )


def digest_of(piece: npt.NDArray[np.uint8]) -> bytes:
    """xxh3_128 of raw bytes. Other threads run meanwhile."""
    return xxhash.xxh3_128_digest(piece.data)


def in_pieces(start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The pieces that the tensor bytes [start, end) lie in: number, and the part [start, end) that lies in it."""
    for number in range(start // PIECE_BYTES, -(-end // PIECE_BYTES)):
        yield number, max(start, number * PIECE_BYTES), min(end, (number + 1) * PIECE_BYTES)


def fold_digests(digests: Iterable[bytes]) -> str:
    """One digest of consecutive pieces, in their order: xxh3_128 of their digests, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def keep_mapped(known: Mapped[T], most: int, path: Path, status: os.stat_result, make: Callable[[], T]) -> T:
    """What `make` maps of a slot's file, once for all its versions, and kept for the `most` files that were used last,
    which are those of two slots.

    To make the pages of a mapping, and to take them apart, takes longer than to copy what is in them.
    """
    identity = status.st_dev, status.st_ino, status.st_size  # no other file has it while this one is mapped
    same, mapped = known.pop(path, (None, None))
    if mapped is None or same != identity:
        mapped = make()
    if path.parent.name.startswith((SLOT, COPY)):
        known[path] = identity, mapped
        for oldest in [*known][:-most]:
            known.pop(oldest, None)
    return mapped


def _map(path: Path) -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
    """A file's bytes, and an identity that a later file of the same name does not have."""
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        # Not populated: a version that is verified already is not read, and the threads that verify share the faults.
        mapped = keep_mapped(
            _mapped, 4, path, status, lambda: mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        )
        return np.frombuffer(mapped, dtype=np.uint8), (status.st_dev, status.st_ino, status.st_ctime_ns)


# --------------------------------------------------------------------------------------------------
# Slots of another host, copied to this one: two directories that engines load like the trainer's own.
#
# Invariants:
# - a copy bears the generation and the digest of the slot that it was made of, and only once all its bytes are
#   verified; so `SlotReader` treats it like the original, and finds out as well when it was overwritten meanwhile;
# - the newest complete copy is never the one that is overwritten.
#
# The files are brought by the caller: into `begin`'s directory, followed by `finish`.


COPIES = 2
BEING_WRITTEN = 1  # as any odd generation


class LocalCopies:
    """Owner of a directory of copies. Created on construction, removed by `close`."""

    def __init__(self, directory: Path) -> None:
        """Raises SlotDirectoryError."""
        self._lease = DirectoryLease(directory, kept=COPY)
        self._held: list[SlotManifest | None] = [None] * COPIES
        self._next = 0

    def find(self, original: SlotManifest) -> SlotManifest | None:
        """The copy of a slot as it was announced, if there is one."""
        wanted, held = (original.label, original.digest, original.generation), filter(None, self._held)
        return next((copy for copy in held if (copy.label, copy.digest, copy.generation) == wanted), None)

    def begin(self) -> Path:
        """The directory to fill, which holds nothing valid until `finish`."""
        self._held[self._next] = None
        directory = self._lease.directory / f"{COPY}{self._next}"
        directory.mkdir(mode=0o700, exist_ok=True)
        _mark(directory, BEING_WRITTEN)
        return directory

    def finish(self, original: SlotManifest) -> SlotManifest:
        """Declare the directory filled last a copy of this slot. Reads all bytes. Raises DigestMismatch, TornWeights,
        and leaves it invalid: the original was overwritten while it was fetched, or the bytes are others."""
        directory = self._lease.directory / f"{COPY}{self._next}"
        copy = msgspec.structs.replace(original, path=str(directory))
        _mark(directory, original.generation)
        try:
            SlotReader(copy)
        except BaseException:
            _mark(directory, BEING_WRITTEN)
            raise
        self._held[self._next], self._next = copy, (self._next + 1) % COPIES
        return copy

    def close(self) -> None:
        self._lease.release()


def _mark(directory: Path, generation: int) -> None:
    place = directory / STATE_FILE
    with place.open("r+b" if place.exists() else "wb") as file:  # in place: readers have it mapped
        file.write(np.uint64(generation).tobytes())
