"""What is handed over for training, checked and made ready: sequences become examples, examples belong to rollouts.

Invariants:
- a rollout's trainable tokens are counted over all its sequences, which therefore arrive in one call;
- a sequence without a trainable token counts in the sizes and costs no forward pass;
- values at masked positions are dropped here: nothing later can see them;
- what is decided before the first backward pass of a batch is written into the examples: `old_log_probs` fills in what
  models say of them, `whole_batch` what follows from all of them together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from models.algorithms.aggregation import Aggregation, StepSize, coefficients
from models.train.errors import InvalidSequence
from models.train.interface import TrainSequence

Float32Array = npt.NDArray[np.float32]
RolloutKey = tuple[int, int]  # (group_id, rollout_id)


@dataclass(frozen=True)
class Intake:
    """How sequences are read."""

    mode: Aggregation
    vocab_size: int
    version: int = 0  # of the weights: a token's staleness is this minus its own
    newest_only: bool = False  # train only the tokens of a sequence's newest version
    needs_teacher: bool = False


@dataclass
class Example:
    """One sequence with K >= 1 trainable tokens."""

    tokens: npt.NDArray[np.int32]  # [T]
    prompt: int  # how many of them are the prompt
    chosen: npt.NDArray[np.int64]  # [K] indices of the trainable tokens in `tokens`
    rollout_log_probs: Float32Array  # [K] log mu
    advantages: Float32Array  # [K]
    coefficient: float  # c of the aggregation, the same for all its tokens
    key: RolloutKey = (0, 0)
    staleness: npt.NDArray[np.int64] | None = None  # [K]; None = all 0
    reward: float = 0.0
    truncated: bool = False
    teacher_log_probs: Float32Array | None = None  # [K]
    old_log_probs: Float32Array | None = None  # [K] under the weights of the batch's start
    current_log_probs: Float32Array | None = None  # [K] under the weights of the step's start
    ref_log_probs: Float32Array | None = None  # [K]
    values: Float32Array | None = None  # [K] the critic's, at the batch's start
    bootstrap: float = 0.0  # its value of the state after the last token
    returns: Float32Array | None = None  # [K] what the critic learns
    rejected: bool = False  # because of a sibling in its rollout
    kept_scale: float = 1.0  # for renormalize_after_rejection
    logged: dict[str, float] = field(default_factory=dict)  # sums over its tokens, of what was decided for the batch

    @property
    def input_length(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Rollout:
    """All sequences of one rollout."""

    key: RolloutKey
    size: StepSize
    examples: tuple[Example, ...]


def rollouts_of(sequences: Sequence[TrainSequence], intake: Intake) -> list[Rollout]:
    """Check sequences and group them by rollout, in order of first appearance. Raises `InvalidSequence`."""
    by_rollout: dict[RolloutKey, list[int]] = {}
    for index, sequence in enumerate(sequences):
        check_sequence(sequence, intake.vocab_size)
        if intake.needs_teacher and sequence.teacher_log_probs is None and sequence.loss_mask.any():
            raise InvalidSequence(
                f"{_name(sequence)}: teacher_log_probs are missing, but on-policy distillation needs them for every "
                "sequence; start a --frozen-engine that teaches, or leave --use-opd out"
            )
        by_rollout.setdefault((sequence.group_id, sequence.rollout_id), []).append(index)
    trainable = [_trainable(sequence, intake.newest_only) for sequence in sequences]
    counts = [len(places) for places in trainable]
    totals = [0] * len(sequences)
    for members in by_rollout.values():
        total = sum(counts[index] for index in members)
        for index in members:
            totals[index] = total
    weights = coefficients(intake.mode, counts, totals).tolist()
    return [
        Rollout(
            key=key,
            size=StepSize(rollouts=1, sequences=len(members), tokens=totals[members[0]]),
            examples=tuple(
                _example(sequences[index], trainable[index], weights[index], intake.version)
                for index in members
                if counts[index]
            ),
        )
        for key, members in by_rollout.items()
    ]


def _trainable(sequence: TrainSequence, newest_only: bool) -> npt.NDArray[np.int64]:
    """Indices of the trainable tokens; of those, the ones of the newest version if so asked for."""
    places: npt.NDArray[np.int64] = np.flatnonzero(sequence.loss_mask)
    if newest_only and places.size:
        versions = sequence.versions[places]
        places = places[versions == versions.max()]
    return places


def _example(sequence: TrainSequence, trainable: npt.NDArray[np.int64], coefficient: float, version: int) -> Example:
    teacher = sequence.teacher_log_probs
    return Example(
        tokens=sequence.tokens,
        prompt=sequence.prompt_length,
        chosen=trainable,
        rollout_log_probs=sequence.rollout_log_probs[trainable],
        advantages=sequence.advantages[trainable],
        coefficient=coefficient,
        key=(sequence.group_id, sequence.rollout_id),
        staleness=np.maximum(version - sequence.versions[trainable].astype(np.int64), 0),
        reward=sequence.reward,
        truncated=sequence.truncated,
        teacher_log_probs=None if teacher is None else teacher[trainable],
    )


def total_size(rollouts: Iterable[Rollout]) -> StepSize:
    """Sum of the rollouts' sizes."""
    size = StepSize()
    for rollout in rollouts:
        size += rollout.size
    return size


def partition(rollouts: Sequence[Rollout], parts: int, *, whole_groups: bool = False) -> list[list[Rollout]]:
    """Cut a batch into `parts` optimizer steps of nearly equal numbers of rollouts (or of groups, left whole).

    Ordered by (group, rollout), so that the cut does not depend on the order of arrival. With fewer rollouts than
    parts, the last parts are empty.
    """
    ordered = sorted(rollouts, key=lambda rollout: rollout.key)
    units = [[rollout] for rollout in ordered]
    if whole_groups:
        units = [list(members) for _, members in itertools.groupby(ordered, key=lambda rollout: rollout.key[0])]
    quotient, remainder = divmod(len(units), parts)
    cuts = [part * quotient + min(part, remainder) for part in range(parts + 1)]
    return [list(itertools.chain.from_iterable(units[low:high])) for low, high in itertools.pairwise(cuts)]


def check_sequence(sequence: TrainSequence, vocab_size: int) -> None:
    """Raise `InvalidSequence` naming the first contradiction in a sequence."""
    name, length, prompt = _name(sequence), len(sequence.tokens), sequence.prompt_length
    for column in ("loss_mask", "rollout_log_probs", "advantages", "versions", "teacher_log_probs"):
        values = getattr(sequence, column)
        if values is not None and len(values) != length:
            raise InvalidSequence(
                f"{name}: {column} has {len(values)} entries for {length} tokens; give exactly one for each, 0 for "
                "those of the prompt"
            )
    if not 0 <= prompt <= length:
        raise InvalidSequence(f"{name}: {length} tokens with prompt_length {prompt}; a prompt is part of its sequence")
    if prompt == 0 and length > 0:
        raise InvalidSequence(
            f"{name}: prompt_length 0 leaves no token to predict the first one from, which is never trained; "
            "keep at least one prompt token (e.g. BOS)"
        )
    if sequence.loss_mask[:prompt].any():
        raise InvalidSequence(
            f"{name}: loss_mask is 1 within the first {prompt} tokens, which are its prompt; set it to 0 there"
        )
    if length > prompt and not 0 <= int(sequence.tokens.min()) <= int(sequence.tokens.max()) < vocab_size:
        raise InvalidSequence(
            f"{name}: token ids {int(sequence.tokens.min())} to {int(sequence.tokens.max())} do not fit the model's "
            f"vocabulary of {vocab_size}; engine and trainer must use the same checkpoint"
        )


def _name(sequence: TrainSequence) -> str:
    return f"rollout {sequence.rollout_id} of group {sequence.group_id}"
