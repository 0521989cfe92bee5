"""What one micro-batch adds to a step: the numerator of its loss, whatever computed the log-probs.

Invariants: nothing is divided by a count of the micro-batch; what is added to the gradients and to the totals is a
numerator, so that any split of a step into micro-batches gives the same sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.schema.algorithm import LOSS_OF_ESTIMATOR, Aggregation, AlgorithmConfig
from models.algorithms.correction import Correction
from models.algorithms.losses import policy_loss_of
from models.algorithms.metrics import MetricTotals, kept_scale, rejected_rollouts, step_statistics
from models.algorithms.objective import GroupColumns, Objective, group_objective, policy_objective, sft_objective
from models.algorithms.slime_hooks import Responses, hooks_of
from models.algorithms.tokens import PolicyTokens, StepStatistics
from models.errors import BackendMisuse
from models.train.dp_group import DpGroup, Float32Array
from models.train.spec import TrainSpec
from models.train.step.examples import Example
from models.train.step.micro_batches import Int64Array, MicroBatch

# --------------------------------------------------------------------------------------------------
# Columns of tokens from examples: what every loss and every fact of a step is computed from.
#
# Invariant: the order is that of the examples given, token by token; all tokens are trainable ones.


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On a GPU without waiting: what is queued there goes on."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def token_counts(examples: Sequence[Example]) -> Int64Array:
    """Trainable tokens [S] of each example."""
    return np.array([len(example.chosen) for example in examples], dtype=np.int64)


def float_column(parts: Sequence[Float32Array | None], device: torch.device) -> Tensor:
    """One flat fp32 tensor [N] on the device from the values of each example. Raises `BackendMisuse` for a gap."""
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        raise BackendMisuse("some examples of a batch have old log-probs and others not; begin a new batch")
    if not present:
        return torch.zeros(0, device=device)
    return to_device(np.concatenate(present).astype(np.float32, copy=False), device)


def optional_column(parts: Sequence[Float32Array | None], device: torch.device) -> Tensor | None:
    """As `float_column`, but None if no example has the values."""
    return None if all(part is None for part in parts) else float_column(parts, device)


def weight_column(examples: Sequence[Example], device: torch.device) -> Tensor:
    """Coefficient [N] of each token in the loss."""
    coefficients = np.array([example.coefficient for example in examples], dtype=np.float32)
    return to_device(np.repeat(coefficients, token_counts(examples)), device)


def policy_tokens(
    examples: Sequence[Example],
    log_probs: Tensor,
    correction: Correction,
    *,
    statistics: StepStatistics,
    entropy: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
) -> PolicyTokens:
    """The tokens of `examples` with `log_probs` [N] under the current weights.

    Old log-probs are mu if the correction says so, else those stored, else those of the current weights: with one step
    per batch they are those of its start. `ref_log_probs`: those of the examples unless given.
    """
    device, counts = log_probs.device, token_counts(examples)
    bypass = correction.policy_mode == "bypass"
    rollout_log_probs = float_column([example.rollout_log_probs for example in examples], device)
    old = None if bypass else optional_column([example.old_log_probs for example in examples], device)
    if ref_log_probs is None:
        ref_log_probs = optional_column([example.ref_log_probs for example in examples], device)
    scales = [example.kept_scale for example in examples]
    stale = [np.zeros(len(e.chosen), np.int64) if e.staleness is None else e.staleness for e in examples]
    return PolicyTokens(
        log_probs=log_probs,
        old_log_probs=rollout_log_probs if bypass else log_probs.detach() if old is None else old,
        rollout_log_probs=rollout_log_probs,
        advantages=float_column([example.advantages for example in examples], device),
        mask=torch.ones(int(counts.sum()), dtype=torch.bool, device=device),
        sequence=to_device(np.repeat(np.arange(len(examples)), counts), device),
        n_sequences=len(examples),
        ref_log_probs=ref_log_probs,
        entropy=entropy,
        staleness=to_device(np.concatenate([np.zeros(0, np.int64), *stale]), device),
        rejected=to_device(np.array([example.rejected for example in examples], dtype=np.bool_), device),
        kept_scale=None if set(scales) <= {1.0} else to_device(np.array(scales, dtype=np.float32), device),
        statistics=statistics,
    )


def rollout_numbers(examples: Sequence[Example]) -> tuple[Tensor, int]:
    """The rollout [S] of each example, counted from 0, and how many there are."""
    keys = np.array([example.key for example in examples], dtype=np.int64).reshape(-1, 2)
    rollouts, rollout = np.unique(keys, axis=0, return_inverse=True)
    return torch.from_numpy(rollout.reshape(-1)), len(rollouts)


# --------------------------------------------------------------------------------------------------
# Sums over the micro-batches of one optimizer step.


@dataclass
class StepTotals:
    """What the models add (`metrics`, `kept`), and what the micro-batches cost (`count`)."""

    metrics: MetricTotals = field(default_factory=MetricTotals)
    kept: torch.Tensor | int = 0  # tokens that no rejection rule removed
    costs: Counter[str] = field(default_factory=Counter)

    def count(self, batches: Sequence[MicroBatch], rank_costs: Sequence[float] = ()) -> None:
        """Note what micro-batches cost; blank ones are not counted. `rank_costs`: of all data-parallel ranks, which
        meet behind them."""
        waited_for = max(rank_costs, default=0.0) * len(rank_costs)
        self.costs.update(dealt=int(1e3 * sum(rank_costs)), waited_for=int(1e3 * waited_for))
        for batch in batches:
            if not batch.blank:
                self.costs.update(
                    micro_batches=1,
                    padded_tokens=batch.layout.padded_tokens,
                    used_tokens=batch.layout.used_tokens,  # of them, not padding
                    sequence_tokens=sum(one.input_length for one in batch.members),  # without sharing prompts
                )

    def combine(self, dp_group: DpGroup) -> None:
        """Make these the totals of all data-parallel ranks."""
        sums = dp_group.merge({"kept": float(self.kept), **self.costs})
        self.kept = torch.tensor(sums.pop("kept"), dtype=torch.float64)
        self.costs = Counter({name: int(value) for name, value in sums.items()})
        if dp_group.processes > 1:
            self.metrics = MetricTotals(
                means=_combined(self.metrics.means, dp_group),
                sums=_combined(self.metrics.sums, dp_group),
                maxima=_combined(self.metrics.maxima, dp_group, largest=True),
            )

    def result(self, denominator: float, *, loss_denominator: float) -> dict[str, float]:
        """Metrics of the step, for its denominators."""
        out = self.metrics.result(denominator, loss_denominator=loss_denominator)
        used, padded, apart = (self.costs[f"{kind}_tokens"] for kind in ("used", "padded", "sequence"))
        out["train/dp_balance"] = self.costs["dealt"] / self.costs["waited_for"] if self.costs["waited_for"] else 1.0
        out["train/micro_batches"] = float(self.costs["micro_batches"])
        out["train/padding_frac"] = 1.0 - used / padded if padded else 0.0
        out["train/shared_prompt_frac"] = 1.0 - used / apart if apart else 0.0
        return out


def _combined(values: dict[str, torch.Tensor], dp_group: DpGroup, *, largest: bool = False) -> dict[str, torch.Tensor]:
    found = dp_group.merge({name: float(value) for name, value in values.items()}, largest=largest)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


# --------------------------------------------------------------------------------------------------
# Statistics of one optimizer step, written into its examples. Nothing here runs a model.
#
# Invariant: every process computes the statistics of all sequences of the step, from the same numbers in the same
# order, so that no decision differs between them.


def write_step_statistics(
    examples: Sequence[Example], algorithm: AlgorithmConfig, correction: Correction, aggregation: Aggregation
) -> StepStatistics:
    """Facts of the step that `examples` are; sets `rejected` and `kept_scale` of each.

    The examples hold `current_log_probs` (under the weights of the step's start) and, unless the mode has no such
    `old_log_probs`.
    """
    # The log-probs of the step's start; the sampler's where none were needed.
    current = [e.rollout_log_probs if e.current_log_probs is None else e.current_log_probs for e in examples]
    log_probs = float_column(current, torch.device("cpu"))
    tokens = policy_tokens(examples, log_probs, correction, statistics=StepStatistics())
    rollout, _ = rollout_numbers(examples)
    if correction.rejects and correction.rs_unit == "rollout":
        rejected = rejected_rollouts(tokens, rollout, correction)
        tokens = replace(tokens, rejected=rejected)
        for example, value in zip(examples, rejected.tolist(), strict=True):
            example.rejected = value
    if correction.rejects and correction.renormalize_after_rejection:
        scale = kept_scale(tokens, rollout, aggregation, correction)
        for example, factor in zip(examples, scale.tolist(), strict=True):
            example.kept_scale = factor
    return step_statistics(tokens, algorithm, correction)


class PolicyNumerator:
    """The loss of the policy's tokens. Used by every framework on the log-probs that it computed."""

    def __init__(self, spec: TrainSpec) -> None:
        self._algorithm, self._correction = spec.algorithm, spec.correction
        self._sft, self._group_loss = spec.supervised, spec.group_loss
        usual = LOSS_OF_ESTIMATOR.get(spec.algorithm.advantage_estimator, "ppo")
        name = spec.algorithm.policy_loss
        self._policy_loss = policy_loss_of(usual if name == "auto" else name)
        self._hooks = hooks_of(spec.algorithm, spec.correction, spec.arguments)

    def entropy(self, statistics: StepStatistics) -> str:
        """How it is computed with the log-probs. A graph through the whole vocabulary is paid for only if the bonus is
        on, values only where they are measured, or a loss of the user's own may read them."""
        if self._algorithm.entropy_coef > 0 and not self._sft:
            return "graph"
        return "value" if statistics.entropy or self._group_loss is not None else "none"

    def __call__(
        self,
        members: Sequence[Example],
        log_probs: Tensor,
        entropy: Tensor | None,
        statistics: StepStatistics,
        totals: StepTotals,
        ref_log_probs: Tensor | None = None,
    ) -> Tensor:
        """The numerator, a scalar with a graph; adds the micro-batch's sums to `totals`.

        `members` in the order of the rows; `log_probs` and `entropy` [N] of their chosen tokens, with a graph;
        `ref_log_probs` [N] unless the members have them, or there is no reference.
        """
        tokens = policy_tokens(
            members, log_probs, self._correction, statistics=statistics, entropy=entropy, ref_log_probs=ref_log_probs
        )
        weights = weight_column(members, log_probs.device)
        objective = self._objective(tokens, members, weights)
        totals.metrics.add(objective.metrics, weights)
        totals.kept = totals.kept + objective.kept.sum()
        return torch.dot(objective.loss, weights)

    def _objective(self, tokens: PolicyTokens, members: Sequence[Example], weights: Tensor) -> Objective:
        if self._sft:
            return sft_objective(tokens)
        if self._group_loss is not None:
            groups = _groups(members, tokens.log_probs.device)
            return group_objective(tokens, groups, self._algorithm, self._group_loss)
        reads = self._hooks.tis or self._hooks.reducer
        hooks = replace(self._hooks, responses=responses_of(members, weights) if reads else None)
        return policy_objective(tokens, self._algorithm, self._correction, self._policy_loss, hooks)


def responses_of(members: Sequence[Example], weights: Tensor) -> Responses:
    """The responses of examples. `weights` [N]: of their trained tokens."""
    lengths = [len(one.tokens) - one.prompt for one in members]
    starts = np.cumsum([0, *lengths])
    at = np.concatenate([one.chosen - one.prompt + start for one, start in zip(members, starts, strict=False)])
    totals = [len(one.tokens) for one in members]
    return Responses(to_device(at, weights.device), lengths, totals, weights)


def _groups(members: Sequence[Example], device: torch.device) -> GroupColumns:
    groups, group = np.unique([example.key[0] for example in members], return_inverse=True)
    rollout, n_rollouts = rollout_numbers(members)
    return GroupColumns(
        group=to_device(group, device),
        rollout=rollout.to(device, non_blocking=True),
        reward=to_device(np.array([one.reward + one.turn_total for one in members], dtype=np.float32), device),
        n_groups=len(groups),
        n_rollouts=n_rollouts,
    )
