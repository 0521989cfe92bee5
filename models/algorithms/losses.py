"""Policy losses and the supervised loss, per token and before aggregation. Losses are minimised.

Invariants: pure functions; masked tokens are exactly 0 in value and gradient; aggregation is somebody else's job.

A policy loss has the shape of `PolicyLossFunction`. To add one, put `models/algorithms/<name>.py` with a function
`policy_loss` beside this file (an estimator of the same name selects it), or give an import path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.select import pick
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked


@dataclass(frozen=True)
class PolicyLoss:
    """What a policy loss says of each token."""

    loss: Tensor  # [N]
    clipped_high: Tensor  # [N] bool, held back by the upper bound
    clipped_low: Tensor  # [N] bool, held back by the lower bound


class PolicyLossFunction(Protocol):
    """Loss per token [N] of a policy update."""

    def __call__(self, tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss: ...


def clip_bounds(config: AlgorithmConfig) -> tuple[float, float]:
    """(1 - eps_clip, 1 + eps_clip_high), the range of the ratio in which a token moves freely."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1.0 - config.eps_clip, 1.0 + high


def ppo_clip(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """max(-r A, -clip(r, 1 - eps, 1 + eps_high) A), r = theta / old (arXiv:1707.06347, arXiv:2503.14476)."""
    low, high = clip_bounds(config)
    advantages = masked(tokens.advantages, tokens.mask)
    ratio = bounded_exp(log_ratio(tokens.log_probs, tokens.old_log_probs, tokens.mask))
    free = -ratio * advantages
    held = -ratio.clamp(low, high) * advantages
    clipped = held > free
    return PolicyLoss(
        loss=torch.maximum(free, held),
        clipped_high=clipped & (advantages > 0),
        clipped_low=clipped & (advantages < 0),
    )


def sft(tokens: PolicyTokens) -> Tensor:
    """-log theta on the trainable tokens, [N]. Temperature 1: the logits of demonstrations are not divided."""
    return -masked(tokens.log_probs, tokens.mask)


POLICY_LOSSES: Final[Mapping[str, PolicyLossFunction]] = {"ppo": ppo_clip}


def policy_loss_of(name: str) -> PolicyLossFunction:
    """The policy loss of this name or import path. Raises `UnknownAlgorithm`."""
    return pick("policy_loss", name, POLICY_LOSSES)
