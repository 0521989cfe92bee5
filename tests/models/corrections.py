"""Off-policy correction as a run has it: decided by the resolution of the configuration."""

from __future__ import annotations

from configs.resolve import derive
from configs.schema import Config
from configs.schema.algorithm import AlgorithmConfig, CorrectionConfig
from configs.schema.rollout import AsyncConfig
from models.algorithms.correction import Correction, correction_of


def corrected(off_policy: CorrectionConfig, *, max_staleness: int = 1, policy_loss: str = "ppo") -> Correction:
    """What becomes of these settings in a run with this bound of staleness."""
    config = Config(
        correction=off_policy,
        algorithm=AlgorithmConfig(policy_loss=policy_loss),
        asynchrony=AsyncConfig(max_staleness=max_staleness),
    )
    return correction_of(derive(config)[0].correction)
