"""How token losses become one number, and which sequence trains a token that several sequences show. No torch.

    mode          loss of the step
    rollout_mean  1/G  sum over rollouts [ sum of m L over the rollout's sequences / max(sum of m over them, 1) ]
    token_mean    sum of m L / max(sum of m, 1)
    seq_mean      mean over sequences of (sum of m L / max(sum of m, 1))
    constant      sum of m L / (G C), C = longest possible response (arXiv:2503.20783)
    seq_mean_token_sum    mean over sequences of (sum of m L)

G = rollouts of the step, fully masked ones included.

Every mode is  sum of c(token) m L / D  with a coefficient c known from the token's own rollout and one number D known
when the step is complete. Hence gradients of the numerators may be summed over micro-batches in any split, and be
divided by D at the end. All terms of the loss and all metrics use the same c and D.

Invariant: D is a fact of the step, never of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from configs.schema.algorithm import Aggregation

TOKEN_SUMS: Final = ("constant", "seq_mean_token_sum")  # divide by no count of tokens
FloatArray = npt.NDArray[np.float64]


def coefficients(mode: Aggregation, sequence_tokens: npt.ArrayLike, rollout_tokens: npt.ArrayLike) -> FloatArray:
    """c [S] of the tokens of each of S sequences.

    `sequence_tokens` [S]: trainable tokens of each sequence; `rollout_tokens` [S]: trainable tokens of the whole
    rollout that the sequence belongs to.
    """
    own = np.asarray(sequence_tokens, dtype=np.float64)
    if mode == "rollout_mean":
        return 1.0 / np.maximum(np.asarray(rollout_tokens, dtype=np.float64), 1.0)
    if mode == "seq_mean":
        return 1.0 / np.maximum(own, 1.0)
    return np.ones_like(own)


@dataclass(frozen=True)
class StepSize:
    """What a step consists of, fully masked rollouts and sequences included."""

    rollouts: int = 0
    sequences: int = 0
    tokens: int = 0  # trainable

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(self.rollouts + other.rollouts, self.sequences + other.sequences, self.tokens + other.tokens)


def denominator(mode: Aggregation, size: StepSize, *, max_response_len: int) -> float:
    """D of the step; at least 1 so that an empty step is 0 and not NaN."""
    counts = {"rollout_mean": size.rollouts, "constant": size.rollouts, "token_mean": size.tokens}
    counts |= {"seq_mean": size.sequences, "seq_mean_token_sum": size.sequences}
    return float(max(counts[mode], 1) * (max_response_len if mode == "constant" else 1))


def metric_mode(mode: Aggregation) -> Aggregation:
    """The reducer of metrics: that of the loss, but a token mean where its divisor is no count of tokens."""
    return "token_mean" if mode in TOKEN_SUMS else mode


# --------------------------------------------------------------------------------------------------
# Shared tokens: a sequence may begin with the first tokens of an earlier sequence of its rollout, its prefix (place of
# the earlier sequence, tokens). Several sequences then show one token; it belongs to the first that trains it.
#
# Invariants: a shared token has the same position in all sequences that show it; every token that some sequence trains
# belongs to exactly one sequence.


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
    """The means over several branches of values of the same tokens, in parts of these counts; None if one has no
    values.

    `values[i]` [K] are of the tokens `columns[i]` [K]; every token is in one of them at least.
    """
    ends = np.cumsum(counts)
    sums, shown = np.zeros(ends[-1]), np.zeros(ends[-1])
    for numbers, given in zip(columns, values, strict=True):
        if given is None:
            return None
        sums[numbers] += given
        shown[numbers] += 1
    return np.split(sums / shown, ends[:-1])


def prefix_fault(tokens: Sequence[npt.NDArray[np.int32]], prefixes: Sequence[Prefix | None]) -> str | None:
    """The fault in the prefixes of a rollout's sequences, in one sentence, or None."""
    for place, prefix in enumerate(prefixes):
        if prefix is None:
            continue
        earlier, length = prefix
        if not 0 <= earlier < place:
            names = f"the prefix of sequence {place} names sequence {earlier}"
            return f"{names}; it must name an earlier one of its rollout"
        if not 0 <= length <= min(len(tokens[place]), len(tokens[earlier])):
            return (
                f"the prefix of sequence {place} has {length} tokens, but the sequences have {len(tokens[place])} and "
                f"{len(tokens[earlier])}; it cannot be longer than either"
            )
        if not np.array_equal(tokens[place][:length], tokens[earlier][:length]):
            return f"the first {length} tokens of sequence {place} are not those of sequence {earlier}, its prefix"
    return None
