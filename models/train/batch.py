"""What is handed over for training, checked and made ready: sequences become examples, examples belong to rollouts.

Invariants:
- a rollout's trainable tokens are counted over all its sequences, which therefore arrive in one call;
- a sequence without a trainable token counts in the sizes and costs no forward pass;
- values at masked positions are dropped here: nothing later can see them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.algorithms.aggregation import Aggregation, StepSize, coefficients
from models.train.errors import InvalidSequence
from models.train.interface import TrainSequence

Float32Array = npt.NDArray[np.float32]
RolloutKey = tuple[int, int]  # (group_id, rollout_id)


@dataclass
class Example:
    """One sequence with K >= 1 trainable tokens."""

    tokens: npt.NDArray[np.int32]  # [T]
    prompt: int  # how many of them are the prompt
    chosen: npt.NDArray[np.int64]  # [K] indices of the trainable tokens in `tokens`
    rollout_log_probs: Float32Array  # [K] log mu
    advantages: Float32Array  # [K]
    coefficient: float  # c of the aggregation, the same for all its tokens
    old_log_probs: Float32Array | None = None  # [K] under the weights of the batch's start
    ref_log_probs: Float32Array | None = None  # [K]

    @property
    def input_length(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Rollout:
    """All sequences of one rollout."""

    key: RolloutKey
    size: StepSize
    examples: tuple[Example, ...]


def rollouts_of(sequences: Sequence[TrainSequence], mode: Aggregation, vocab_size: int) -> list[Rollout]:
    """Check sequences and group them by rollout, in order of first appearance. Raises `InvalidSequence`."""
    by_rollout: dict[RolloutKey, list[int]] = {}
    for index, sequence in enumerate(sequences):
        check_sequence(sequence, vocab_size)
        by_rollout.setdefault((sequence.group_id, sequence.rollout_id), []).append(index)
    trainable = [np.flatnonzero(sequence.loss_mask) for sequence in sequences]
    counts = [len(places) for places in trainable]
    totals = [0] * len(sequences)
    for members in by_rollout.values():
        total = sum(counts[index] for index in members)
        for index in members:
            totals[index] = total
    weights = coefficients(mode, counts, totals).tolist()
    return [
        Rollout(
            key=key,
            size=StepSize(rollouts=1, sequences=len(members), tokens=totals[members[0]]),
            examples=tuple(
                _example(sequences[index], trainable[index], weights[index]) for index in members if counts[index]
            ),
        )
        for key, members in by_rollout.items()
    ]


def _example(sequence: TrainSequence, trainable: npt.NDArray[np.int64], coefficient: float) -> Example:
    prompt = len(sequence.tokens) - sequence.response_length
    return Example(
        tokens=sequence.tokens,
        prompt=prompt,
        chosen=trainable + prompt,
        rollout_log_probs=sequence.rollout_log_probs[trainable],
        advantages=sequence.advantages[trainable],
        coefficient=coefficient,
    )


def total_size(rollouts: Iterable[Rollout]) -> StepSize:
    """Sum of the rollouts' sizes."""
    size = StepSize()
    for rollout in rollouts:
        size += rollout.size
    return size


def partition(rollouts: Sequence[Rollout], parts: int) -> list[list[Rollout]]:
    """Cut a batch into `parts` optimizer steps of nearly equal numbers of rollouts.

    Ordered by (group, rollout), so that the cut does not depend on the order of arrival. With fewer rollouts than
    parts, the last parts are empty.
    """
    ordered = sorted(rollouts, key=lambda rollout: rollout.key)
    quotient, remainder = divmod(len(ordered), parts)
    cuts = [part * quotient + min(part, remainder) for part in range(parts + 1)]
    return [ordered[low:high] for low, high in itertools.pairwise(cuts)]


def check_sequence(sequence: TrainSequence, vocab_size: int) -> None:
    """Raise `InvalidSequence` naming the first contradiction in a sequence."""
    name = f"rollout {sequence.rollout_id} of group {sequence.group_id}"
    response = sequence.response_length
    for field in ("loss_mask", "rollout_log_probs", "advantages", "versions"):
        length = len(getattr(sequence, field))
        if length != response:
            raise InvalidSequence(
                f"{name}: {field} has {length} entries for {response} response tokens; give exactly one for each"
            )
    prompt = len(sequence.tokens) - response
    if prompt < 0 or (prompt == 0 and response > 0):
        raise InvalidSequence(
            f"{name}: {len(sequence.tokens)} tokens with response_length {response} leave no prompt token to predict "
            "the first response token from; keep at least one prompt token (e.g. BOS)"
        )
    if response and not 0 <= int(sequence.tokens.min()) <= int(sequence.tokens.max()) < vocab_size:
        raise InvalidSequence(
            f"{name}: token ids {int(sequence.tokens.min())} to {int(sequence.tokens.max())} do not fit the model's "
            f"vocabulary of {vocab_size}; engine and trainer must use the same checkpoint"
        )
