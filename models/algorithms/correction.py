"""Truncated importance weights of single tokens against the policy that sampled them.

Order, always: mask -> clamp to +-20 -> exp -> bound -> detach. The weight multiplies the whole policy term after its
clipping, never the entropy or the KL term.

Invariant: no gradient flows through a weight. Sources: arXiv:2110.00641, arXiv:2505.24298.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.algorithms.tokens import bounded_exp, log_ratio


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights of N tokens, without gradient. Masked tokens have raw weight 1."""

    log_weight: Tensor  # [N] log old - log mu, 0 where masked
    raw: Tensor  # [N] exp of it, before the bounds
    weight: Tensor  # [N] within the bounds
    truncated: Tensor  # [N] bool, the bounds changed the weight


def token_tis(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, low: float, high: float
) -> ImportanceWeights:
    """clamp(exp(log old - log mu), low, high) per token. All shapes [N]."""
    log_weight = log_ratio(old_log_probs.detach(), rollout_log_probs.detach(), mask)
    raw = bounded_exp(log_weight)
    weight = raw.clamp(low, high)
    return ImportanceWeights(log_weight=log_weight, raw=raw, weight=weight, truncated=(raw != weight) & mask)
