"""Off-policy correction as a run has it: decided by the resolution of the configuration."""

from __future__ import annotations

from torch import Tensor

from configs.resolve import derive
from configs.schema import Config
from configs.schema.algorithm import AlgorithmConfig, CorrectionConfig
from configs.schema.rollout import AsyncConfig
from models.algorithms.correction import Correction, ImportanceWeights, correction_of, importance_weights, log_weight_of
from models.algorithms.metrics import MetricTotals
from models.algorithms.objective import Objective
from models.algorithms.tokens import PolicyTokens


def weights_of(tokens: PolicyTokens, correction: Correction) -> ImportanceWeights:
    return importance_weights(tokens, correction, log_weight_of(tokens, correction))


def totals_of(objective: Objective, weights: Tensor, divisor: float) -> dict[str, float]:
    """The metrics of one micro-batch that is the whole step."""
    totals = MetricTotals()
    totals.add(objective.metrics, weights)
    return totals.result(divisor)


def corrected(off_policy: CorrectionConfig, *, max_staleness: int = 1, policy_loss: str = "ppo") -> Correction:
    """What becomes of these settings in a run with this bound of staleness."""
    config = Config(
        correction=off_policy,
        algorithm=AlgorithmConfig(policy_loss=policy_loss),
        asynchrony=AsyncConfig(max_staleness=max_staleness),
    )
    return correction_of(derive(config)[0].correction)
