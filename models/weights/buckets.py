"""A slot cut into buckets: consecutive tensors whose bytes lie end to end. No torch.

Invariants:
- every tensor is in exactly one bucket, buckets follow each other in file order, and together they are the file's data;
- a bucket holds at most `limit` bytes, unless one tensor alone is larger;
- inside a bucket every tensor is aligned to its element size, so a receiver may view the bytes as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from models.weights.layout import Layout, TensorRange

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
