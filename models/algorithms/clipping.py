"""The clipped surrogate of PPO, for the ratio of a token or of a whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.policy_loss import PolicyLoss, clip_bounds
from models.algorithms.tokens import PolicyTokens, masked


def clipped_surrogate(
    ratio: Tensor, tokens: PolicyTokens, config: AlgorithmConfig, *, dual: float | None
) -> PolicyLoss:
    """max(-r A, -clip(r) A) of ratios r [N]; with `dual`, at most -dual A where A < 0."""
    low, high = clip_bounds(config)
    advantages = masked(tokens.advantages, tokens.mask)
    free = -ratio * advantages
    held = -ratio.clamp(low, high) * advantages
    clipped = held > free
    loss, dual_clipped = torch.maximum(free, held), None
    if dual is not None:
        ceiling = -dual * advantages
        dual_clipped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(dual_clipped, ceiling, loss)
    return PolicyLoss(
        loss=loss,
        clipped_high=clipped & (advantages > 0),
        clipped_low=clipped & (advantages < 0),
        dual_clipped=dual_clipped,
    )
