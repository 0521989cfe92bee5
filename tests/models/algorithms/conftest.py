"""Fixture F: two rollouts of one sequence each, whose losses and gradients are known to six digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.schema.algorithm import Aggregation, AlgorithmConfig
from models.algorithms.aggregation import StepSize, coefficients, denominator
from models.algorithms.correction import Correction
from models.algorithms.tokens import PolicyTokens


def column(first: list[float], second: list[float]) -> Tensor:
    return torch.tensor(first + second, dtype=torch.float64)


@dataclass(frozen=True)
class FixtureF:
    mu: Tensor = field(default_factory=lambda: column([-1.2, -0.5, 0.0, -2.0, -0.1], [-0.4, -1.5, -0.9]))
    old: Tensor = field(default_factory=lambda: column([-1.0, -0.6, -3.0, -2.3, -0.15], [-0.7, -1.2, -0.95]))
    theta: Tensor = field(default_factory=lambda: column([-0.7, -0.75, -3.2, -2.1, -0.12], [-0.2, -0.6, -2.2]))
    ref: Tensor = field(default_factory=lambda: column([-1.1, -0.55, -2.8, -2.5, -0.2], [-0.6, -1.4, -1.0]))
    advantages: Tensor = field(default_factory=lambda: column([1.0] * 5, [-0.8] * 3))
    mask: Tensor = field(default_factory=lambda: column([1, 1, 0, 1, 1], [1, 1, 1]).bool())
    sequence: Tensor = field(default_factory=lambda: torch.tensor([0] * 5 + [1] * 3))

    def tokens(self, theta: Tensor | None = None, **changes: Any) -> PolicyTokens:
        values: dict[str, Any] = {
            "log_probs": self.theta if theta is None else theta,
            "old_log_probs": self.old,
            "rollout_log_probs": self.mu,
            "advantages": self.advantages,
            "mask": self.mask,
            "sequence": self.sequence,
            "ref_log_probs": self.ref,
        }
        return PolicyTokens(**{"n_sequences": 2, **values, **changes})

    def weights(self, mode: Aggregation) -> tuple[Tensor, float]:
        """c m of each token, and the denominator (C = 8)."""
        counts = [4, 3]
        per_sequence = torch.from_numpy(coefficients(mode, counts, counts))
        divisor = denominator(mode, StepSize(rollouts=2, sequences=2, tokens=7), max_response_len=8)
        return per_sequence[self.sequence] * self.mask, divisor

    def aggregate(self, values: Tensor, mode: Aggregation) -> float:
        weights, divisor = self.weights(mode)
        return float((values * weights).sum() / divisor)

    def loss_and_gradient(self, function: Callable[[PolicyTokens], Tensor]) -> tuple[Tensor, Tensor]:
        """Loss per token and the gradient of its sum over the mask with respect to log theta."""
        theta = self.theta.clone().requires_grad_()
        loss = function(self.tokens(theta))
        (loss * self.mask).sum().backward()
        assert theta.grad is not None
        return loss.detach(), theta.grad


@pytest.fixture
def f() -> FixtureF:
    return FixtureF()


@pytest.fixture
def close() -> Callable[[Tensor, list[float]], None]:
    def check(actual: Tensor, expected: list[float]) -> None:
        np.testing.assert_allclose(actual.detach().numpy(), np.array(expected, dtype=np.float64), atol=1e-6, rtol=0)

    return check


CLIP_HIGHER = AlgorithmConfig(eps_clip=0.2, eps_clip_high=0.28)
ON_POLICY = Correction(policy_mode="onpolicy", use_tis=False)


@pytest.fixture
def clip_higher() -> AlgorithmConfig:
    return CLIP_HIGHER


@pytest.fixture
def on_policy() -> Correction:
    return ON_POLICY
