"""Policy losses and divergences from the reference policy, per token, before aggregation. No I/O, no state.

    losses                                   ratio that they hold near 1
    ppo                                      theta / old of a token
    gspo                                     its geometric mean over a sequence
    cispo, kimi                              theta / old, as a detached factor or a penalty
    sapo                                     theta / old, by a gate that falls smoothly
    clip_cov, kl_cov                         theta / old, and tokens of large covariance held back
    dppo, topr, topr_sequence, aipo, m2po    theta / mu, the policy that sampled

To add a loss or a KL estimator, put `models/algorithms/<name>.py` with a function `policy_loss` (`PolicyLossFunction`)
or `kl` (`KLFunction`) beside this file, or give an import path.

Invariants: losses are minimised; masked tokens are exactly 0 in value and gradient; bounds and masks are detached;
statistics of a sequence run over its trainable tokens, and rejection acts on the token losses after them; no comparison
hides a value at a trainable token that is not a number, so that the trainer refuses the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked, sequence_mean, sequence_sum
from models.import_path import pick


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of each token, and which bounds held it back."""

    loss: Tensor  # [N]
    clipped_high: Tensor  # [N] bool, held back by the upper bound
    clipped_low: Tensor  # [N] bool, held back by the lower bound
    dual_clipped: Tensor | None = None  # [N] bool, held back by the bound of the loss itself; None = has none


class PolicyLossFunction(Protocol):
    """Loss per token [N] of a policy update."""

    def __call__(self, tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss: ...


def clip_bounds(config: AlgorithmConfig) -> tuple[float, float]:
    """(1 - eps_clip, 1 + eps_clip_high), the range of the ratio in which a token moves freely."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1.0 - config.eps_clip, 1.0 + high


def clipped_surrogate(
    ratio: Tensor, tokens: PolicyTokens, config: AlgorithmConfig, *, dual: float | None
) -> PolicyLoss:
    """max(-r A, -clip(r) A) of ratios r [N]; with `dual`, at most -dual A where A < 0."""
    advantages = masked(tokens.advantages, tokens.mask)
    free = -ratio * advantages
    held = -ratio.clamp(*clip_bounds(config)) * advantages
    clipped = held > free
    loss, dual_clipped = torch.maximum(free, held), None
    if dual is not None:
        ceiling = -dual * advantages
        dual_clipped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(dual_clipped, ceiling, loss)
    high, low = clipped & (advantages > 0), clipped & (advantages < 0)
    return PolicyLoss(loss=loss, clipped_high=high, clipped_low=low, dual_clipped=dual_clipped)


# --------------------------------------------------------------------------------------------------
# Policy losses relative to the sampler: their ratio is rho = theta / mu, whatever `old_log_probs` holds.
#
# They correct for staleness by themselves and need neither old log-probs nor an importance weight. In their metrics
# "clipped high" means held back because theta has moved above mu, "clipped low" because it has moved below.
#
# Invariants: bounds and masks are detached; masked tokens are exactly 0; a comparison never hides a value that is not a
# number (the code tests "dropped", not "kept").


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


def ppo_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """max(-r A, -clip(r, 1 - eps, 1 + eps_high) A), r = theta / old (arXiv:1707.06347, arXiv:2503.14476).

    With eps_clip_c, the loss of a token with A < 0 is at most -eps_clip_c A (dual clip, arXiv:1912.09729).
    """
    ratio = bounded_exp(log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask))
    return clipped_surrogate(ratio, tokens, config, dual=config.eps_clip_c)


def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO's clip on s = exp(mean of log theta - log old over the sequence) (arXiv:2507.18071).

    One ratio, clipped once, for all tokens of the sequence; the gradient flows through the mean into every one of them.
    The paper's eps_clip is 3e-4, its eps_clip_high 4e-4.
    """
    change = log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)
    mean = masked(sequence_mean(change, tokens)[tokens.sequence], tokens.mask)
    return clipped_surrogate(bounded_exp(mean), tokens, config, dual=None)


def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-clip(r, 1 - eps, 1 + eps_high) A log theta, the clipped ratio detached (arXiv:2506.13585).

    Every token keeps a gradient, however far it moves. The canonical form has no lower bound: eps_clip of 1 or more.
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
    """-A log theta + (tau / 2) (log theta - log old)^2 (arXiv:2501.12599); nothing is clipped."""
    change = log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)
    advantages = masked(tokens.advantages, tokens.mask)
    loss = -advantages * masked(tokens.log_probs, tokens.mask) + 0.5 * config.kimi_tau * change.square()
    none = torch.zeros_like(tokens.mask)
    return PolicyLoss(loss=loss, clipped_high=none, clipped_low=none)


def sapo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0, else tau_neg (arXiv:2511.20347).

    The gradient at r = 1 is that of -r A, and falls smoothly on both sides; nothing is clipped.
    """
    ratio = bounded_exp(log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask))
    advantages = masked(tokens.advantages, tokens.mask)
    tau = torch.where(advantages > 0, config.tau_pos, config.tau_neg).to(ratio.dtype)
    none = torch.zeros_like(tokens.mask)
    return PolicyLoss(-4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages, clipped_high=none, clipped_low=none)


# Entropy falls with the covariance of log-probs and advantages, which a few tokens make up. These two hold such tokens
# back (arXiv:2505.22617). Means, and which tokens are chosen, are facts of the whole step (`metrics.step_statistics`).


def covariances(tokens: PolicyTokens) -> Tensor:
    """(A - mean A) (log theta - mean log theta) [N], the means over the step; 0 where masked, no gradient."""
    facts = tokens.statistics
    product = (tokens.advantages - facts.advantage_mean) * (tokens.log_probs.detach() - facts.log_prob_mean)
    return masked(product, tokens.mask)


def draws(tokens: PolicyTokens) -> Tensor:
    """A number [N] from 0 to 1 for each token, from the last digits of log mu: the same however a step is split."""
    scaled: Tensor = masked(tokens.rollout_log_probs, tokens.mask).double().abs() * 16180.339887
    return scaled.frac()


def clip_cov_candidates(tokens: PolicyTokens, config: AlgorithmConfig) -> Tensor:
    """[N] bool: tokens between the bounds of the covariance that PPO's clip leaves alone."""
    clipped, found = ppo_clip(tokens, config), covariances(tokens)
    inside = (found > config.clip_cov_lb) & (found < config.clip_cov_ub)
    return inside & tokens.mask & ~(clipped.clipped_high | clipped.clipped_low)


def clip_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO's clip, and 0 for clip_cov_ratio of the step's tokens, drawn from those of a covariance within bounds."""
    clipped = ppo_clip(tokens, config)
    chosen = clip_cov_candidates(tokens, config) & (draws(tokens) <= tokens.statistics.cov_bound)
    return replace(clipped, loss=masked(clipped.loss, ~chosen), clipped_high=clipped.clipped_high | chosen)


def kl_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-r A, plus ppo_kl_coef |log theta - log old| for kl_cov_ratio of the step's tokens, of the largest covariance."""
    change = log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask)
    chosen = (-covariances(tokens) <= tokens.statistics.cov_bound) & tokens.mask
    loss = -bounded_exp(change) * masked(tokens.advantages, tokens.mask)
    none = torch.zeros_like(tokens.mask)
    return PolicyLoss(loss + config.ppo_kl_coef * masked(change.abs(), chosen), clipped_high=none, clipped_low=none)


def sft(tokens: PolicyTokens) -> Tensor:
    """-log theta on the trainable tokens, [N]. Temperature 1: the logits of demonstrations are not divided."""
    return -masked(tokens.log_probs, tokens.mask)


POLICY_LOSSES: Final[Mapping[str, PolicyLossFunction]] = {
    "ppo": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "topr": topr,
    "topr_sequence": topr_sequence,
    "aipo": aipo,
    "m2po": m2po,
    "kimi": kimi,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def policy_loss_of(name: str) -> PolicyLossFunction:
    """The policy loss of this name or import path. Raises `UnknownAlgorithm`."""
    return pick("policy_loss", name, POLICY_LOSSES)


# --------------------------------------------------------------------------------------------------
# Estimators of the divergence from the reference policy (J. Schulman, "Approximating KL divergence", 2020).
#
# x = log theta - log ref at the sampled token. Values and gradients (with respect to log theta):
#
#     k1          x                    gradient 1: no pull towards the reference in expectation
#     k2          x^2 / 2              gradient x: that of the reverse KL on-policy
#     k3          exp(-x) - 1 + x      non-negative, low variance
#     low_var_kl  k3 clamped to +-10
#
# The expectation of these is over the current policy. `use_unbiased_kl` multiplies by the ratio of theta to the policy
# that sampled, with gradient: on-policy the value stays and the gradient becomes that of the divergence itself.
# The exponent is clamped to +-20, the linear term is not.


LOW_VAR_BOUND: Final = 10.0


class KLFunction(Protocol):
    """KL estimate [N] from x = log theta - log ref [N]; differentiable."""

    def __call__(self, difference: Tensor) -> Tensor: ...


def k1(difference: Tensor) -> Tensor:
    """x."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """x^2 / 2."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(-x) - 1 + x."""
    return bounded_exp(-difference) - 1.0 + difference


def low_var_kl(difference: Tensor) -> Tensor:
    """k3 clamped to [-10, 10]: one wild token cannot rule the step."""
    return k3(difference).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)


KL_ESTIMATORS: Final[Mapping[str, KLFunction]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}


def kl_values(kind: str, difference: Tensor, ratio: Tensor | None = None) -> Tensor:
    """KL estimate [N] from x [N], times `ratio` [N] if given; in or out of the graph, as its inputs are.

    The bound of low_var_kl applies after the ratio. Raises `UnknownAlgorithm` for a wrong `kind`.
    """
    bounded = kind == "low_var_kl"
    value = pick("kl", "k3" if bounded else kind, KL_ESTIMATORS)(difference)
    value = value if ratio is None else ratio * value
    return value.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if bounded else value


def kl_to_reference(
    kind: str, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, ratio: Tensor | None = None
) -> Tensor:
    """KL estimate per token [N], 0 where masked. Raises `UnknownAlgorithm` for a wrong `kind`."""
    return masked(kl_values(kind, log_ratio(log_probs, ref_log_probs, mask), ratio), mask)
