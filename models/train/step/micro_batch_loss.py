"""What one micro-batch adds to a step: the numerator of its loss, whatever computed the log-probs.

Invariants: nothing is divided by a count of the micro-batch; what is added to the gradients and to the totals is a
numerator, so that any split of a step into micro-batches gives the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from configs.schema.algorithm import LOSS_OF_ESTIMATOR, AlgorithmConfig
from models.algorithms.correction import Correction
from models.algorithms.losses import policy_loss_of
from models.algorithms.objective import (
    GroupColumns,
    GroupLossFunction,
    Objective,
    group_objective,
    policy_objective,
    sft_objective,
)
from models.algorithms.tokens import PolicyTokens, StepStatistics
from models.train.step.columns import policy_tokens, rollout_numbers, weight_column
from models.train.step.examples import Example
from models.train.step.totals import StepTotals


class PolicyNumerator:
    """The loss of the policy's tokens. Used by every framework on the log-probs that it computed."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        correction: Correction,
        *,
        sft: bool,
        group_loss: GroupLossFunction | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._correction = correction
        name = algorithm.policy_loss
        self._policy_loss = policy_loss_of(
            LOSS_OF_ESTIMATOR.get(algorithm.advantage_estimator, "ppo") if name == "auto" else name
        )
        self._sft = sft
        self._group_loss = group_loss
        # A graph through the whole vocabulary is paid for only if the bonus is on.
        self.entropy = "graph" if algorithm.entropy_coef > 0 and not sft else "value"

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
        device = log_probs.device
        tokens = policy_tokens(
            members,
            log_probs,
            bypass=self._correction.policy_mode == "bypass",
            device=device,
            statistics=statistics,
            entropy=entropy,
            ref_log_probs=ref_log_probs,
        )
        objective = self._objective(tokens, members)
        weights = weight_column(members, device)
        totals.metrics.add(objective.metrics, weights)
        totals.kept = totals.kept + objective.kept.sum()
        return torch.dot(objective.loss, weights)

    def _objective(self, tokens: PolicyTokens, members: Sequence[Example]) -> Objective:
        if self._sft:
            return sft_objective(tokens)
        if self._group_loss is not None:
            groups = _groups(members, tokens.log_probs.device)
            return group_objective(tokens, groups, self._algorithm, self._group_loss)
        return policy_objective(tokens, self._algorithm, self._correction, self._policy_loss)


def _groups(members: Sequence[Example], device: torch.device) -> GroupColumns:
    groups, group = np.unique([example.key[0] for example in members], return_inverse=True)
    rollout, n_rollouts = rollout_numbers(members)
    return GroupColumns(
        group=torch.from_numpy(group).to(device),
        rollout=rollout.to(device),
        reward=torch.tensor([one.reward + one.turn_total for one in members], dtype=torch.float32, device=device),
        n_groups=len(groups),
        n_rollouts=n_rollouts,
    )
