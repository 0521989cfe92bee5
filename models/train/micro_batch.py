"""One micro-batch through the policy: forward and backward of its numerator.

Invariants: nothing is divided by a count of the micro-batch; what is added to the gradients and to the totals is a
numerator, so that any split of a step into micro-batches gives the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from configs.schema.algorithm import LOSS_OF_ESTIMATOR, AlgorithmConfig
from models.algorithms.group_loss import GroupColumns, GroupLossFunction, group_objective
from models.algorithms.losses import policy_loss_of
from models.algorithms.metrics import MetricTotals
from models.algorithms.modes import Correction
from models.algorithms.objective import Objective, policy_objective, sft_objective
from models.algorithms.tokens import StepFacts
from models.train.batch import Example, Float32Array
from models.train.columns import policy_tokens, weight_column
from models.train.packing import Layout
from models.train.reduce import Reducer, merged
from models.train.rows import PackedRows, pack_rows
from models.train.scoring import Scorer


@dataclass
class StepTotals:
    """Sums over the micro-batches of one optimizer step."""

    metrics: MetricTotals = field(default_factory=MetricTotals)
    kept: torch.Tensor | None = None  # tokens that no rejection rule removed
    micro_batches: int = 0
    padded_tokens: int = 0
    used_tokens: int = 0  # of them, not padding
    sequence_tokens: int = 0  # what the sequences would need without sharing prompts

    def count(self, layout: Layout, members: Sequence[Example]) -> None:
        """Note what a micro-batch costs."""
        self.micro_batches += 1
        self.padded_tokens += layout.padded_tokens
        self.used_tokens += layout.used_tokens
        self.sequence_tokens += sum(example.input_length for example in members)

    def combine(self, reducer: Reducer) -> None:
        """Make these the totals of all processes."""
        kept = 0.0 if self.kept is None else float(self.kept)
        own = {
            "kept": kept,
            "micro_batches": self.micro_batches,
            "padded_tokens": self.padded_tokens,
            "used_tokens": self.used_tokens,
            "sequence_tokens": self.sequence_tokens,
        }
        sums = merged(reducer, own)
        self.kept = torch.tensor(sums["kept"], dtype=torch.float64)
        self.micro_batches, self.padded_tokens = int(sums["micro_batches"]), int(sums["padded_tokens"])
        self.used_tokens, self.sequence_tokens = int(sums["used_tokens"]), int(sums["sequence_tokens"])
        if reducer.world > 1:
            self.metrics = MetricTotals(
                means=_combined(self.metrics.means, reducer),
                sums=_combined(self.metrics.sums, reducer),
                maxima=_combined(self.metrics.maxima, reducer, largest=True),
            )

    def result(self, denominator: float, *, loss_denominator: float) -> dict[str, float]:
        """Metrics of the step, for its denominators."""
        out = self.metrics.result(denominator, loss_denominator=loss_denominator)
        out["train/micro_batches"] = float(self.micro_batches)
        out["train/padding_frac"] = 1.0 - self.used_tokens / self.padded_tokens if self.padded_tokens else 0.0
        out["train/shared_prompt_frac"] = 1.0 - self.used_tokens / self.sequence_tokens if self.sequence_tokens else 0.0
        return out


def _combined(values: dict[str, torch.Tensor], reducer: Reducer, *, largest: bool = False) -> dict[str, torch.Tensor]:
    numbers = {name: float(value) for name, value in values.items()}
    found = merged(reducer, numbers, largest=largest)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


class MicroBatchPass:
    """Runs the policy (and the reference, where its log-probs are not there yet) over packed rows."""

    def __init__(
        self,
        score: Scorer,
        score_reference: Scorer | None,
        algorithm: AlgorithmConfig,
        correction: Correction,
        *,
        device: torch.device,
        sft: bool,
        group_loss: GroupLossFunction | None = None,
    ) -> None:
        self._score = score
        self._score_reference = score_reference
        self._algorithm = algorithm
        self._correction = correction
        name = algorithm.policy_loss
        self._policy_loss = policy_loss_of(
            LOSS_OF_ESTIMATOR.get(algorithm.advantage_estimator, "ppo") if name == "auto" else name
        )
        self._device = device
        self._sft = sft
        self._group_loss = group_loss
        # A graph through the whole vocabulary is paid for only if the bonus is on.
        self._entropy = "graph" if algorithm.entropy_coef > 0 and not sft else "value"

    def log_probs(
        self, layout: Layout, tokens: Sequence[npt.NDArray[np.int32]], chosen: Sequence[npt.NDArray[np.int64]]
    ) -> Iterator[tuple[int, Float32Array]]:
        """(index, log-probs of its chosen tokens) of each sequence of the layout, under the current weights."""
        with torch.no_grad():
            values, _ = self._score(pack_rows(layout, tokens, chosen))
        cuts = np.cumsum([len(chosen[item]) for item in layout.items])[:-1]
        return zip(layout.items, np.split(values.cpu().numpy(), cuts), strict=True)

    def backward(self, rows: PackedRows, members: Sequence[Example], facts: StepFacts, totals: StepTotals) -> None:
        """Add the gradient of the micro-batch's numerator to the parameters, and its sums to `totals`.

        `members` in the order of the rows.
        """
        log_probs, entropy = self._score(rows, entropy=self._entropy)
        objective = self._objective(rows, members, facts, log_probs, entropy)
        weights = weight_column(members, self._device)
        torch.dot(objective.loss, weights).backward()
        totals.metrics.add(objective.metrics, weights)
        kept = objective.kept.sum()
        totals.kept = kept if totals.kept is None else totals.kept + kept

    def _objective(
        self,
        rows: PackedRows,
        members: Sequence[Example],
        facts: StepFacts,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
    ) -> Objective:
        ref_log_probs = None
        if self._score_reference is not None and members[0].ref_log_probs is None:
            with torch.no_grad():
                ref_log_probs, _ = self._score_reference(rows)
        tokens = policy_tokens(
            members,
            log_probs,
            bypass=self._correction.mode == "bypass",
            device=self._device,
            facts=facts,
            entropy=entropy,
            ref_log_probs=ref_log_probs,
        )
        if self._sft:
            return sft_objective(tokens)
        if self._group_loss is not None:
            return group_objective(tokens, self._groups(members), self._algorithm, self._group_loss)
        return policy_objective(tokens, self._algorithm, self._correction, self._policy_loss)

    def _groups(self, members: Sequence[Example]) -> GroupColumns:
        keys = np.array([example.key for example in members], dtype=np.int64)
        groups, group = np.unique(keys[:, 0], return_inverse=True)
        rollouts, rollout = np.unique(keys, axis=0, return_inverse=True)
        reward = torch.tensor([example.reward for example in members], dtype=torch.float32, device=self._device)
        return GroupColumns(
            group=torch.from_numpy(group.reshape(-1)).to(self._device),
            rollout=torch.from_numpy(rollout.reshape(-1)).to(self._device),
            reward=reward,
            n_groups=len(groups),
            n_rollouts=len(rollouts),
        )
