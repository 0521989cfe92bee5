"""PPO's clipped loss, the supervised loss, and the table of all policy losses by name.

    file               losses             ratio that they hold near 1
    losses             ppo                theta / old of a token
    sequence_losses    gspo               its geometric mean over a sequence
    gradient_losses    cispo, kimi        theta / old, as a detached factor or a penalty
    sampler_losses     dppo, topr, topr_sequence, aipo, m2po: theta / mu, the policy that sampled

Invariants: pure functions; masked tokens are exactly 0 in value and gradient; aggregation is somebody else's job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.clipping import clipped_surrogate
from models.algorithms.gradient_losses import cispo, kimi
from models.algorithms.policy_loss import PolicyLoss, PolicyLossFunction
from models.algorithms.sampler_losses import aipo, dppo, m2po, topr, topr_sequence
from models.algorithms.select import pick
from models.algorithms.sequence_losses import gspo
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked


def ppo_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """max(-r A, -clip(r, 1 - eps, 1 + eps_high) A), r = theta / old (arXiv:1707.06347, arXiv:2503.14476).

    With eps_clip_c, the loss of a token with A < 0 is at most -eps_clip_c A (dual clip, arXiv:1912.09729).
    """
    ratio = bounded_exp(log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask))
    return clipped_surrogate(ratio, tokens, config, dual=config.eps_clip_c)


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
