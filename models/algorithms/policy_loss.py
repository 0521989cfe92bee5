"""What a policy loss is: a pure function from tokens to the loss of each, before aggregation.

To add one, put `models/algorithms/<name>.py` with a function `policy_loss` of the shape of `PolicyLossFunction` beside
this file, or give an import path.

Invariants: losses are minimised; masked tokens are exactly 0 in value and gradient; a value that is not a number at a
trainable token is never hidden by a comparison, so that the step is refused for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.tokens import PolicyTokens


@dataclass(frozen=True)
class PolicyLoss:
    """What a policy loss says of each token."""

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
