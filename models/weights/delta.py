"""One version as the difference to another: xor, bytes of equal significance together, zstd. No torch.

A file is: the compressed chunks end to end, their table (msgpack `DeltaHeader`), 8 bytes little-endian length of that
table, 8 bytes magic: it is written in one go, and a file cut short is told by its end.

Weights that hardly move share sign, exponent and leading mantissa bits with the version before, so the xor of their
upper bytes is mostly zero; set apart from the lower bytes they nearly vanish.

Invariants:
- base xor difference is exactly the result, for any bytes: nothing is rounded;
- a tensor that did not change costs no chunk;
- what is applied is checked against the digest of the whole result before anybody loads it (`delta_mirror`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.errors import DeltaError
from models.weights.layout import ELEMENT_BYTES, TensorSpec

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
    anew with full weights, and a reader trusts no file without its digest. Raises DeltaError if the tensors are not the
    same ones.
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
            table = msgspec.msgpack.encode(
                DeltaHeader(labels[0], digests[0], labels[1], digests[1], nbytes, tuple(tensors))
            )
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
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            tail = file.read(_TAIL)
            length = int.from_bytes(tail[:8], "little")
            if len(tail) < _TAIL or tail[8:] != MAGIC or length > size - _TAIL:
                raise DeltaError(f"{path} is no whole difference of weights; take the full weights")
            file.seek(size - _TAIL - length)
            return msgspec.msgpack.decode(file.read(length), type=DeltaHeader)
    except OSError as error:
        raise DeltaError(f"{path} cannot be read ({error.strerror}); take the full weights") from error
    except msgspec.MsgspecError as error:
        raise DeltaError(f"{path}: the table does not decode ({error}); take the full weights") from error


def apply_delta(path: Path, base: TensorSource) -> Iterator[tuple[TensorSpec, Bytes]]:
    """Tensors of the new version, one after the other, from an open base. Raises DeltaError."""
    header = read_header(path)
    try:
        with path.open("rb") as file:
            for entry, (spec, data) in zip(header.tensors, base.tensors(), strict=True):
                if (entry.name, entry.dtype, entry.nbytes) != (spec.name, spec.dtype, spec.nbytes):
                    raise DeltaError(f"{path} is of another model: tensor {entry.name!r}; take the full weights")
                chunks = [file.read(size) for size in entry.chunks]
                yield spec, restore(data, chunks, ELEMENT_BYTES[spec.dtype]) if chunks else data
    except OSError as error:
        raise DeltaError(f"{path} cannot be read ({error.strerror}); take the full weights") from error
    except ValueError as error:
        raise DeltaError(f"{path} has other tensors than its base; take the full weights") from error
