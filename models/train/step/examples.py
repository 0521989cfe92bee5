"""What is handed over for training, checked and made ready: sequences become examples, examples belong to rollouts.

Invariants:
- a rollout's trainable tokens are counted over all its sequences, which therefore arrive in one call;
- a token that several of its sequences show is trained once, by the first of them, with the mean of their advantages;
- a sequence without a trainable token counts in the sizes and costs no forward pass;
- values at masked positions are dropped here: nothing later can see them;
- what is decided before the first backward pass of a batch is written into the examples: `old_log_probs` fills in what
  models say of them, `whole_batch` what follows from all of them together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from models.algorithms.aggregation import IntArray, StepSize, averaged, coefficients, owned, prefix_fault, token_numbers
from models.algorithms.returns import token_rewards
from models.errors import InvalidSequence
from models.train.dp_group import Float32Array
from models.train.interface import TrainSequence
from models.train.spec import TrainSpec

RolloutKey = tuple[int, int]  # (group_id, rollout_id)


@dataclass
class Example:
    """One sequence with K >= 1 trainable tokens."""

    tokens: npt.NDArray[np.int32]  # [T]
    prompt: int  # how many of them are the prompt
    chosen: IntArray  # [K] indices of the trainable tokens in `tokens`
    rollout_log_probs: Float32Array  # [K] log mu
    advantages: Float32Array  # [K]
    coefficient: float  # c of the aggregation, the same for all its tokens
    key: RolloutKey = (0, 0)
    staleness: IntArray | None = None  # [K]; None = all 0
    reward: float = 0.0
    turn_rewards: Float32Array | None = None  # [K]
    turn_total: float = 0.0  # of all turns of its rollout
    truncated: bool = False
    teacher_log_probs: Float32Array | None = None  # [K]
    old_log_probs: Float32Array | None = None  # [K] under the weights of the batch's start
    current_log_probs: Float32Array | None = None  # [K] under the weights of the step's start
    ref_log_probs: Float32Array | None = None  # [K]
    values: Float32Array | None = None  # [K] the critic's, at the batch's start
    bootstrap: float = 0.0  # its value of the state after the last token
    returns: Float32Array | None = None  # [K] what the critic learns
    rejected: bool = False  # with rs_unit rollout: its rollout failed a rule
    kept_scale: float = 1.0  # for renormalize_after_rejection
    temperature: float | None = None  # at which its tokens were drawn; None: as configured
    logged: dict[str, float] = field(default_factory=dict)  # sums over its tokens, of what was decided for the batch

    @property
    def input_length(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Branch:
    """One sequence of a rollout whose sequences share tokens: an episode over all that it shows."""

    columns: IntArray  # [K] its trainable tokens among those of the rollout's examples, in one row
    reward: float
    turn_rewards: Float32Array | None  # [K]
    own: Example | None  # the example of the tokens behind its prefix; None if it trains none of them


@dataclass(frozen=True)
class Rollout:
    """All sequences of one rollout. An example trains the tokens of its sequence that no earlier one trains."""

    key: RolloutKey
    size: StepSize
    examples: tuple[Example, ...]
    branches: tuple[Branch, ...] = ()  # if sequences share tokens; else each example is an episode


def rollouts_of(
    sequences: Sequence[TrainSequence], spec: TrainSpec, vocab_size: int, version: int = 0
) -> list[Rollout]:
    """Check sequences and group them by rollout, in order of first appearance. Raises `InvalidSequence`.

    `version`: of the weights: a token's staleness is this minus its own.
    """
    needs_teacher = spec.opd_kl_coef is not None
    by_rollout: dict[RolloutKey, list[TrainSequence]] = {}
    for sequence in sequences:
        check_sequence(sequence, vocab_size)
        if needs_teacher and sequence.teacher_log_probs is None and sequence.loss_mask.any():
            raise InvalidSequence(
                f"{_name(sequence)}: teacher_log_probs are missing, but on-policy distillation needs them for every "
                "sequence; start a --frozen-engine that teaches, or leave --use-opd out"
            )
        by_rollout.setdefault((sequence.group_id, sequence.rollout_id), []).append(sequence)
    return [_rollout(key, members, spec, version) for key, members in by_rollout.items()]


def _rollout(key: RolloutKey, members: Sequence[TrainSequence], spec: TrainSpec, version: int) -> Rollout:
    prefixes = [member.prefix for member in members]
    wrong = prefix_fault([member.tokens for member in members], prefixes)
    if wrong is not None:
        raise InvalidSequence(f"{_name(members[0])}: {wrong}")
    masks = [member.loss_mask > 0 for member in members]
    chosen = [np.flatnonzero(mask) for mask in owned(masks, prefixes)]
    if spec.correction.mask_offpolicy_in_partial_rollout:
        chosen = [_newest(member, places) for member, places in zip(members, chosen, strict=True)]
    counts = [len(places) for places in chosen]
    weights = coefficients(spec.aggregation, counts, [sum(counts)] * len(counts)).tolist()
    made = [
        example_of(member, places, weight, version) if len(places) else None
        for member, places, weight in zip(members, chosen, weights, strict=True)
    ]
    examples = tuple(example for example in made if example is not None)
    size = StepSize(rollouts=1, sequences=len(members), tokens=sum(counts))
    branches = _branches(members, made, chosen) if any(prefixes) and examples else ()
    return Rollout(key, size, examples, branches)


def _newest(sequence: TrainSequence, places: IntArray) -> IntArray:
    """Of the tokens that a sequence trains, those of the newest version among them."""
    versions = sequence.versions[places]
    return places[versions == versions.max()] if places.size else places


def _branches(
    members: Sequence[TrainSequence], made: Sequence[Example | None], chosen: Sequence[IntArray]
) -> tuple[Branch, ...]:
    """The sequences as episodes; gives each example the mean of the advantages that branches have for its tokens."""
    numbers = token_numbers([len(member.tokens) for member in members], [member.prefix for member in members])
    column = np.full(1 + max(int(n[-1]) for n in numbers if len(n)), -1)
    order = np.concatenate([n[places] for n, places in zip(numbers, chosen, strict=True)])
    column[order] = np.arange(len(order))
    shown = [np.flatnonzero((one.loss_mask > 0) & (column[n] >= 0)) for one, n in zip(members, numbers, strict=True)]
    columns = [column[n[places]] for n, places in zip(numbers, shown, strict=True)]
    advantages = [member.advantages[places] for member, places in zip(members, shown, strict=True)]
    means = averaged(columns, advantages, [len(places) for places in chosen])
    for example, values in zip(made, means or (), strict=True):
        if example is not None:
            example.advantages = values.astype(np.float32)
    return tuple(
        Branch(at, member.reward, _turns(member, places), example)
        for member, places, at, example in zip(members, shown, columns, made, strict=True)
        if len(at)
    )


def _turns(sequence: TrainSequence, places: IntArray) -> Float32Array | None:
    """[K] the rewards of turns, each at the last of these tokens that is not behind it."""
    if sequence.token_rewards is None:
        return None
    mask = np.zeros(len(sequence.tokens), dtype=np.bool_)
    mask[places] = True
    return token_rewards(0.0, mask, turns=sequence.token_rewards.astype(np.float64))[places].astype(np.float32)


def example_of(sequence: TrainSequence, trainable: IntArray, coefficient: float = 0.0, version: int = 0) -> Example:
    """The example of these tokens of a sequence. `version`: of the weights."""
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
        turn_rewards=_turns(sequence, trainable),
        turn_total=sequence.turn_total,
        truncated=sequence.truncated,
        teacher_log_probs=None if teacher is None else teacher[trainable],
        temperature=sequence.temperature,
    )


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
    for column in ("loss_mask", "rollout_log_probs", "advantages", "versions", "teacher_log_probs", "token_rewards"):
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
    if sequence.temperature is not None and not 0 < sequence.temperature < math.inf:
        raise InvalidSequence(
            f"{name}: its tokens were drawn at temperature {sequence.temperature}, by which logits cannot be divided; "
            "give one above 0"
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
