"""Policy losses of the form -factor A log theta: every token keeps a gradient, however far it has moved.

Invariant: the factor is detached; the ratio is to the old policy, so that they follow the policy mode as PPO does.
"""

from __future__ import annotations

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.policy_loss import PolicyLoss, clip_bounds
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked


def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-clip(r, 1 - eps, 1 + eps_high) A log theta, the clipped ratio detached (arXiv:2506.13585).

    The canonical form has no lower bound: eps_clip of 1 or more.
    """
    low, high = clip_bounds(config)
    ratio = bounded_exp(log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)).detach()
    advantages = masked(tokens.advantages, tokens.mask)
    return PolicyLoss(
        loss=-ratio.clamp(low, high) * advantages * masked(tokens.log_probs, tokens.mask),
        clipped_high=(ratio > high) & tokens.mask,
        clipped_low=(ratio < low) & tokens.mask,
    )


def kimi(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-A log theta + (tau / 2) (log theta - log old)^2 (arXiv:2501.12599)."""
    change = log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)
    advantages = masked(tokens.advantages, tokens.mask)
    none = tokens.mask & ~tokens.mask
    return PolicyLoss(
        loss=-advantages * masked(tokens.log_probs, tokens.mask) + 0.5 * config.kimi_tau * change.square(),
        clipped_high=none,
        clipped_low=none,
    )
