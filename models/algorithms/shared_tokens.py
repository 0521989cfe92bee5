"""The tokens that the sequences of one rollout have in common, so that each is counted and trained once.

A sequence may begin with the first tokens of an earlier one of its rollout, its prefix (place of that one, tokens). A
token is then shown by several sequences. It belongs to the first of them that trains it.

Invariants: no torch here, stages call this module; a shared token stands at the same position in all sequences that
show it; every token that some sequence trains belongs to exactly one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Prefix = tuple[int, int]
IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def token_numbers(lengths: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[IntArray]:
    """[T] for each sequence: numbers of the rollout's tokens from 0 on, the same one wherever a token is shown."""
    numbers: list[IntArray] = []
    count = 0
    for length, prefix in zip(lengths, prefixes, strict=True):
        shared = np.zeros(0, np.int64) if prefix is None else numbers[prefix[0]][: prefix[1]]
        end = count + length - len(shared)
        numbers.append(np.concatenate([shared, np.arange(count, end)]))
        count = end
    return numbers


def owned(masks: Sequence[Mask], prefixes: Sequence[Prefix | None]) -> list[Mask]:
    """[T] for each sequence: the tokens that it trains itself, of those that its mask [T] lets it train."""
    if not any(prefixes):
        return list(masks)
    numbers = token_numbers([len(mask) for mask in masks], prefixes)
    owner = np.full(1 + max((int(n[-1]) for n in numbers if len(n)), default=0), -1)
    for place in reversed(range(len(masks))):  # the first one writes last
        owner[numbers[place][masks[place]]] = place
    return [mask & (owner[n] == place) for place, (mask, n) in enumerate(zip(masks, numbers, strict=True))]


def averaged(
    columns: Sequence[IntArray], values: Sequence[npt.NDArray[np.floating[Any]] | None], counts: Sequence[int]
) -> list[npt.NDArray[np.float64]] | None:
    """The means of what several branches say of the same tokens, in parts of these counts; None if one says nothing.

    `values[i]` [K] are of the tokens `columns[i]` [K]; every token is in one of them at least.
    """
    ends = np.cumsum(counts)
    sums, shown = np.zeros(ends[-1]), np.zeros(ends[-1])
    for at, said in zip(columns, values, strict=True):
        if said is None:
            return None
        sums[at] += said
        shown[at] += 1
    return np.split(sums / shown, ends[:-1])


def prefix_fault(tokens: Sequence[npt.NDArray[np.int32]], prefixes: Sequence[Prefix | None]) -> str | None:
    """What is wrong with the prefixes of a rollout's sequences, in one sentence, or None."""
    for place, prefix in enumerate(prefixes):
        if prefix is None:
            continue
        other, length = prefix
        if not 0 <= other < place:
            return f"the prefix of sequence {place} names sequence {other}; it must name an earlier one of its rollout"
        if not 0 <= length <= min(len(tokens[place]), len(tokens[other])):
            return (
                f"the prefix of sequence {place} has {length} tokens, but the sequences have {len(tokens[place])} and "
                f"{len(tokens[other])}; it cannot be longer than either"
            )
        if not np.array_equal(tokens[place][:length], tokens[other][:length]):
            return f"the first {length} tokens of sequence {place} are not those of sequence {other}, its prefix"
    return None
