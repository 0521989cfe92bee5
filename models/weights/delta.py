"""One version as the difference to another: xor, bytes of equal significance together, zstd. No torch.

A file is: the compressed chunks end to end, their table (msgpack `DeltaHeader`), 8 bytes little-endian length of that
table, 8 bytes magic: it is written in one pass, and its end shows whether the file was cut short.

Weights that hardly move share sign, exponent and leading mantissa bits with the version before, so the xor of their
upper bytes is mostly zero; set apart from the lower bytes they nearly vanish.

Invariants:
- base xor difference is exactly the result, for any bytes: nothing is rounded;
- a tensor that did not change costs no chunk;
- the digest of the whole result is checked before any engine loads it (`delta_mirror`).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.disk import open_file, remove
from models.errors import DeltaError, WeightsError
from models.weights.layout import ELEMENT_BYTES, TensorSpec
from models.weights.shared_memory_reader import SlotManifest, SlotReader

Bytes = npt.NDArray[np.uint8]

MAGIC: Final = b"sluice\x00\x01"  # the last byte is the version of the format
CHUNK_BYTES: Final = 16 << 20  # of a tensor, compressed at once; a multiple of every element size
LEVEL: Final = 1  # zstd: above it the files get hardly smaller, for several times the work
WORKERS: Final = 4
_TAIL: Final = 16  # bytes: length of the table, magic


class TensorDelta(Struct, frozen=True, array_like=True):
    """One tensor: compressed bytes of each of its chunks, none if it did not change."""

    name: str
    dtype: str
    nbytes: int
    chunks: tuple[int, ...]


class DeltaHeader(Struct, frozen=True):
    """What a difference leads from and to. Labels are `run_generation.version`, digests those of the slots."""

    base: str
    base_digest: str
    label: str
    digest: str
    nbytes: int  # of all tensors of one version
    tensors: tuple[TensorDelta, ...]


# Made here: engines read headers in several threads, and msgspec crashes where two of them learn a type at once.
_decode_header: Final = msgspec.msgpack.Decoder(DeltaHeader).decode


class TensorSource(Protocol):
    """An open slot: `SlotReader`."""

    def tensors(self) -> Iterator[tuple[TensorSpec, Bytes]]: ...


class Published(Struct, frozen=True):
    """What was written for one version. `ratio`: bytes of the weights by bytes that a follower reads."""

    path: str
    ratio: float


def compress(base: Bytes, new: Bytes, element: int) -> list[bytes]:
    """Chunks of the difference of two tensors' bytes; none if they are equal. `element` in bytes."""
    import pyarrow  # loads in a tenth of a second, which only this route pays

    codec = pyarrow.Codec("zstd", compression_level=LEVEL)
    chunks: list[bytes] = []
    changed = False
    for start in range(0, len(new), CHUNK_BYTES):
        part = np.bitwise_xor(base[start : start + CHUNK_BYTES], new[start : start + CHUNK_BYTES])
        changed = changed or bool(part.any())
        planes = np.ascontiguousarray(part.reshape(-1, element).T)
        chunks.append(codec.compress(planes.data, asbytes=True))
    return chunks if changed else []


def restore(base: Bytes, chunks: list[bytes], element: int) -> Bytes:
    """The tensor's new bytes from its old ones. Raises DeltaError if a chunk does not decompress."""
    import pyarrow

    codec = pyarrow.Codec("zstd")
    if len(chunks) != -(-len(base) // CHUNK_BYTES):
        raise DeltaError(f"{len(chunks)} chunks do not make a tensor of {len(base)} bytes; take the full weights")
    result = base.copy()
    for number, chunk in enumerate(chunks):
        part = result[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        try:
            planes = np.frombuffer(codec.decompress(chunk, decompressed_size=len(part)), dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise DeltaError(
                f"a chunk of the difference does not decompress ({error}); take the full weights"
            ) from error
        by_element = part.reshape(-1, element)
        for place, plane in enumerate(planes.reshape(element, -1)):
            by_element[:, place] ^= plane
    return result


def write_delta(
    path: Path, base: TensorSource, new: TensorSource, *, labels: tuple[str, str], digests: tuple[str, str]
) -> Published:
    """Write the difference of two open slots of the same layout; `labels` and `digests` are (base's, new's).

    The file appears whole (written beside, then renamed). It is not synced: after a crash of the machine the run begins
    again with full weights, and a reader trusts no file without its digest. Raises DeltaError if the tensors are not
    the same ones.
    """

    def work(pair: tuple[tuple[TensorSpec, Bytes], tuple[TensorSpec, Bytes]]) -> tuple[TensorSpec, list[bytes]]:
        (before, old), (spec, data) = pair
        if before != spec:
            raise DeltaError(f"tensor {spec.name!r} differs in shape or type from the base; publish the full weights")
        return spec, compress(old, data, ELEMENT_BYTES[spec.dtype])

    tensors: list[TensorDelta] = []
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file, ThreadPoolExecutor(WORKERS) as workers:
            for spec, chunks in workers.map(work, zip(base.tensors(), new.tensors(), strict=True)):
                tensors.append(TensorDelta(spec.name, spec.dtype, spec.nbytes, tuple(map(len, chunks))))
                file.writelines(chunks)
            nbytes = sum(item.nbytes for item in tensors)
            header = DeltaHeader(labels[0], digests[0], labels[1], digests[1], nbytes, tuple(tensors))
            table = msgspec.msgpack.encode(header)
            file.write(table + len(table).to_bytes(8, "little") + MAGIC)
        draft.rename(path)
    except ValueError as error:
        raise DeltaError(f"{path}: base and result do not hold the same tensors; publish the full weights") from error
    finally:
        draft.unlink(missing_ok=True)
    return Published(str(path), nbytes / max(1, path.stat().st_size))


def read_header(path: Path) -> DeltaHeader:
    """What a difference leads from and to. Raises DeltaError, also if the file is gone or cut short."""
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            tail = file.read(_TAIL)
            length = int.from_bytes(tail[:8], "little")
            if len(tail) < _TAIL or tail[8:] != MAGIC or length > size - _TAIL:
                raise DeltaError(f"{path} is no whole difference of weights; take the full weights")
            file.seek(size - _TAIL - length)
            return _decode_header(file.read(length))
    except OSError as error:
        raise DeltaError(f"{path} cannot be read ({error.strerror}); take the full weights") from error
    except msgspec.MsgspecError as error:
        raise DeltaError(f"{path}: the table does not decode ({error}); take the full weights") from error


def apply_delta(path: Path, base: TensorSource) -> Iterator[tuple[TensorSpec, Bytes]]:
    """Tensors of the new version, one after the other, from an open base. Raises DeltaError."""
    header = read_header(path)
    try:
        with open_file(path) as file:
            for entry, (spec, data) in zip(header.tensors, base.tensors(), strict=True):
                if (entry.name, entry.dtype, entry.nbytes) != (spec.name, spec.dtype, spec.nbytes):
                    raise DeltaError(f"{path} is of another model: tensor {entry.name!r}; take the full weights")
                chunks = [file.read(size) for size in entry.chunks]
                yield spec, restore(data, chunks, ELEMENT_BYTES[spec.dtype]) if chunks else data
    except OSError as error:
        raise DeltaError(f"{path} cannot be read ({error.strerror}); take the full weights") from error
    except ValueError as error:
        raise DeltaError(f"{path} has other tensors than its base; take the full weights") from error


# --------------------------------------------------------------------------------------------------
# Writing end of the delta route: a directory of differences, with the full weights now and then.
#
# What lies there, by label `run_generation.version`:
#     full-0.8/          a Hugging Face checkpoint: where a reader without a base begins
#     0.9-from-0.8.delta the difference of 0.9 to the version published before it
#
# Invariants:
# - everything appears whole, by renaming;
# - from every full version on, each later one is reached by the differences that lie there, and who has the version
#   before the newest needs one difference only; the two newest full versions and what leads on from them are kept, all
#   else is removed, so the directory is bounded: two full versions and 2 * `full_every` differences;
# - only entries of these names are ever removed; a directory serves one run.


log = logging.getLogger("sluice.weights")

FULL_EVERY: Final = 8  # publications from one full version to the next
_FULL: Final = re.compile(r"full-(\d+)\.(\d+)$")
_DELTA: Final = re.compile(r"(\d+)\.(\d+)-from-(\d+)\.(\d+)\.delta$")
_STATE_FILES: Final = ("slot.state", "owner.pid")

Label = tuple[int, int]  # run generation, version


def text_of(label: Label) -> str:
    return f"{label[0]}.{label[1]}"


def full_versions(directory: Path) -> dict[Label, Path]:
    """The complete checkpoints in a delta directory."""
    found = ((_FULL.match(path.name), path) for path in _entries(directory))
    return {(int(match[1]), int(match[2])): path for match, path in found if match}


def differences(directory: Path) -> dict[Label, tuple[Label, Path]]:
    """By label of the result: the label of the base, and the file."""
    found = ((_DELTA.match(path.name), path) for path in _entries(directory))
    return {(int(match[1]), int(match[2])): ((int(match[3]), int(match[4])), path) for match, path in found if match}


class DeltaStore:
    """Publishes versions that already lie in a slot. Use from one thread."""

    def __init__(self, directory: Path, *, full_every: int = FULL_EVERY) -> None:
        """Take a directory over; what an earlier process of the run left goes with the next full version."""
        self.directory, self.full_every = directory, full_every
        directory.mkdir(parents=True, exist_ok=True)
        for draft in directory.glob(".*"):
            name = draft.name.lstrip(".")
            if _FULL.match(name) or re.match(r"\d+\.\d+-from-\d+\.\d+\.delta", name):
                remove(draft)
        self._last: SlotManifest | None = None
        self._since_full = 0

    def publish(self, manifest: SlotManifest) -> Published:
        """Write the version in this slot: as a difference to the one published before, which must still lie in its
        slot, else in full. Raises OSError if the directory has no room."""
        written = None if self._last is None else self._difference(self._last, manifest)
        if written is None or self._since_full >= self.full_every or not full_versions(self.directory):
            full = self._full(manifest)
            self._since_full = 0
        self._since_full += 1
        self._last = manifest
        self._retain()
        return written or Published(str(full), 1.0)

    def _difference(self, base: SlotManifest, new: SlotManifest) -> Published | None:
        labels = base.label, new.label
        path = self.directory / f"{labels[1]}-from-{labels[0]}.delta"
        try:
            digests = base.digest, new.digest
            written = write_delta(path, SlotReader(base), SlotReader(new), labels=labels, digests=digests)
        except WeightsError as error:
            log.warning("no difference from %s to %s, the full weights are written: %s", *labels, error)
            return None
        if written.ratio <= 1.0:  # nothing in common: the full weights cost less to read
            path.unlink()
            return None
        return written

    def _full(self, manifest: SlotManifest) -> Path:
        path = self.directory / f"full-{manifest.label}"
        draft = path.with_name(f".{path.name}")
        remove(draft)
        remove(path)
        shutil.copytree(manifest.path, draft, ignore=shutil.ignore_patterns(*_STATE_FILES))
        draft.rename(path)
        return path

    def _retain(self) -> None:
        """Readers that have a removed file open keep what they read; others find the newer full version."""
        full, links = full_versions(self.directory), differences(self.directory)
        oldest = sorted(full)[-2:][0]
        outdated = [path for label, path in full.items() if label < oldest]
        outdated += [path for label, (_, path) in links.items() if label <= oldest]
        for path in outdated:
            remove(path)


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
