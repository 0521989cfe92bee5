"""Division of one whole parameter among tensor-parallel processes, and its reverse. Pure arithmetic on tensors.

Invariant: `merge([part(x, split, i, n) for i in range(n)], split)` is x, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.families.hugging_face_names import Split


def padded_vocab(vocab_size: int, parts: int) -> int:
    """Rows of the embedding that `parts` processes share equally: `vocab_size`, rounded up to a multiple."""
    return -(-vocab_size // parts) * parts


def part(whole: Tensor, split: Split, index: int, parts: int) -> Tensor:
    """What process `index` of `parts` holds. Vocabulary rows are padded already. A view where possible."""
    if split == "none" or parts == 1:
        return whole
    if split == "gated_rows":
        return torch.cat([half.chunk(parts)[index] for half in whole.chunk(2)])
    dimension = 1 if split == "columns" else 0
    length = whole.shape[dimension] // parts
    return whole.narrow(dimension, index * length, length)


def merge(held: Sequence[Tensor], split: Split) -> Tensor:
    """The whole of what the processes hold, in their order."""
    if split == "none" or len(held) == 1:
        return held[0]
    if split == "gated_rows":
        halves = [one.chunk(2) for one in held]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(held), dim=1 if split == "columns" else 0)
