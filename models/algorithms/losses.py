"""Policy losses that follow the policy mode as PPO does, the supervised loss, and the table of all policy losses.

    losses                                   ratio that they hold near 1
    ppo                                      theta / old of a token
    gspo                                     its geometric mean over a sequence
    cispo, kimi                              theta / old, as a detached factor or a penalty
    dppo, topr, topr_sequence, aipo, m2po    theta / mu, the policy that sampled (`sampler_losses`)

Invariants: pure functions; masked tokens are exactly 0 in value and gradient; aggregation is somebody else's job;
statistics of a sequence run over its trainable tokens, and rejection acts on the token losses after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.clipping import clipped_surrogate
from models.algorithms.policy_loss import PolicyLoss, PolicyLossFunction, clip_bounds
from models.algorithms.sampler_losses import aipo, dppo, m2po, topr, topr_sequence
from models.algorithms.select import pick
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked, sequence_mean


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
    none = tokens.mask & ~tokens.mask
    return PolicyLoss(
        loss=-advantages * masked(tokens.log_probs, tokens.mask) + 0.5 * config.kimi_tau * change.square(),
        clipped_high=none,
        clipped_low=none,
    )


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
}


def policy_loss_of(name: str) -> PolicyLossFunction:
    """The policy loss of this name or import path. Raises `UnknownAlgorithm`."""
    return pick("policy_loss", name, POLICY_LOSSES)
