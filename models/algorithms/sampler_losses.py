"""Policy losses relative to the sampler: their ratio is rho = theta / mu, whatever `old_log_probs` holds.

They correct for staleness by themselves and need neither old log-probs nor an importance weight. In their metrics
"clipped high" means held back because theta has moved above mu, "clipped low" because it has moved below.

Invariants: bounds and masks are detached; masked tokens are exactly 0; a comparison never hides a value that is not a
number (what is tested is "dropped", not "kept").
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.policy_loss import PolicyLoss
from models.algorithms.tokens import PolicyTokens, bounded_exp, masked, sequence_sum


def dppo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-rho A + tau (log theta - log mu)^2, with rho A dropped where the probability has moved too far.

    Too far: up by more than `dppo_threshold` with A > 0, down by more than it with A <= 0. The distance is the total
    variation of "this token or another". The quadratic term is not dropped. Source: arXiv:2602.04879.
    """
    change = tokens.log_rho
    advantages = masked(tokens.advantages, tokens.mask)
    theta = bounded_exp(masked(tokens.log_probs.detach(), tokens.mask))
    distance = theta - bounded_exp(masked(tokens.rollout_log_probs, tokens.mask))
    high = (advantages > 0) & (distance > config.dppo_threshold)
    low = (advantages <= 0) & (distance < -config.dppo_threshold)
    policy = masked(-bounded_exp(change) * advantages, ~(high | low))
    return PolicyLoss(loss=policy + config.dppo_kl_coef * change.square(), clipped_high=high, clipped_low=low)


def topr(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-A log theta where A > 0, -min(rho, 1) A log theta otherwise, rho of the token (arXiv:2503.14286)."""
    del config
    return _tapered(tokens, tokens.log_rho.detach())


def topr_sequence(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """As `topr`, with the product of rho over the sequence: the paper's form."""
    del config
    total = sequence_sum(tokens.log_rho.detach(), tokens)
    return _tapered(tokens, masked(total[tokens.sequence], tokens.mask))


def aipo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-min(rho, aipo_clip) A log theta, the factor detached (arXiv:2505.24034)."""
    rho = bounded_exp(tokens.log_rho).detach()
    loss = -rho.clamp(max=config.aipo_clip) * _advantage_log_prob(tokens)
    clipped = (rho > config.aipo_clip) & tokens.mask
    return PolicyLoss(loss=loss, clipped_high=clipped, clipped_low=clipped & ~clipped)


def m2po(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-rho A on tokens whose (log theta - log mu)^2 is at most `tokens.statistics.m2po_bound` (arXiv:2510.01161).

    The bound is a fact of the whole step: see `step_statistics.m2po_bound`.
    """
    del config
    change = tokens.log_rho
    far = change.detach().square() > tokens.statistics.m2po_bound
    policy = -bounded_exp(change) * masked(tokens.advantages, tokens.mask)
    return PolicyLoss(
        loss=masked(policy, ~far), clipped_high=far & (change.detach() > 0), clipped_low=far & (change.detach() < 0)
    )


def _tapered(tokens: PolicyTokens, log_rho: Tensor) -> PolicyLoss:
    rho = bounded_exp(log_rho)
    positive = masked(tokens.advantages, tokens.mask) > 0
    factor = torch.where(positive, torch.ones_like(rho), rho.clamp(max=1.0))
    clipped = ~positive & (rho > 1.0) & tokens.mask
    return PolicyLoss(loss=-factor * _advantage_log_prob(tokens), clipped_high=clipped, clipped_low=clipped & ~clipped)


def _advantage_log_prob(tokens: PolicyTokens) -> Tensor:
    """A log theta [N], 0 where masked."""
    return masked(tokens.advantages, tokens.mask) * masked(tokens.log_probs, tokens.mask)
