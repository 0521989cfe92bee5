"""Slots of weights: their safetensors layout, their cut into buckets, and their directory. No torch.

A safetensors file is: 8 bytes little-endian header length, the header (JSON, padded with spaces), the tensors' bytes.

Invariants:
- tensors lie in order of falling element size, then in the given order, without gaps: each is aligned to its element,
  and the file satisfies the format's rule that the ranges cover the data exactly;
- the data begin at a multiple of 64 bytes;
- the same tensors give the same header, so every later version overwrites the file in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from models.disk import open_file
from models.errors import SourceError

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
    data: bytes | memoryview


class _HeaderEntry(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


# Made here: engines read headers in several threads, and msgspec crashes where two of them learn a type at once.
_decode_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry: Final = msgspec.json.Decoder(_HeaderEntry).decode


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
    with open_file(path) as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
            raise SourceError(f"{path} is no safetensors file: its header claims {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        fields = _decode_fields(text)
        fields.pop("__metadata__", None)
        entries = {name: _decode_entry(raw) for name, raw in fields.items()}
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


def stored_tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Names and tensors of a safetensors file, in file order. Raises SourceError if it is not one."""
    with open_file(path) as file:
        for item in read_layout(path).tensors:
            file.seek(item.start)
            yield item.spec.name, StoredTensor(item.spec, file.read(item.spec.nbytes))


# --------------------------------------------------------------------------------------------------
# A slot cut into buckets: consecutive tensors whose bytes lie end to end. No torch.
#
# Invariants:
# - every tensor is in exactly one bucket, buckets follow each other in file order, and together they are the file's
#   data;
# - a bucket holds at most `limit` bytes, unless one tensor alone is larger;
# - inside a bucket every tensor is aligned to its element size, so a receiver may view the bytes as they are.


# safetensors' names of the element types that slots hold, and torch's
TORCH_NAMES: Final[Mapping[str, str]] = {
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip


class Bucket(Struct, frozen=True):
    """Tensors whose bytes are [start, end) of the file."""

    tensors: tuple[TensorRange, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


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
