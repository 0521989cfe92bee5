"""The tokens that a loss sees: flat tensors over the trainable part of whole sequences, and safe ratios of them.

Invariants:
- a micro-batch holds whole sequences, so that statistics of a sequence never cross micro-batches;
- what stands at masked positions is never used: it is replaced before any arithmetic, so that NaN there is harmless;
- a log-ratio is clamped to +-20 inside the exponent only; linear terms keep the true value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

EXPONENT_BOUND: Final = 20.0


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of the whole optimizer step, the same in each of its micro-batches."""

    weight_mean: float = 1.0  # of the importance weights after their bounds: the divisor of tis_batch_normalize
    m2po_bound: float = float("inf")  # tokens whose (log theta - log mu)^2 is larger are dropped


@dataclass(frozen=True)
class PolicyTokens:
    """N tokens of S sequences. Log-probs are natural logarithms under the sampling temperature."""

    log_probs: Tensor  # [N] log theta, with gradient
    old_log_probs: Tensor  # [N] log old, the ratio's denominator, no gradient
    rollout_log_probs: Tensor  # [N] log mu, no gradient
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool, True = trainable
    sequence: Tensor  # [N] int64, 0 .. S - 1
    n_sequences: int  # S
    ref_log_probs: Tensor | None = None  # [N] frozen reference, no gradient
    entropy: Tensor | None = None  # [N] of the whole next-token distribution
    staleness: Tensor | None = None  # [N] int64 >= 0, weights versions between the token and the batch; None = all 0
    rejected: Tensor | None = None  # [S] bool, sequences whose rollout failed a rule (rs_unit rollout)
    kept_scale: Tensor | None = None  # [S] factor of the policy term, for renormalize_after_rejection; None = 1
    statistics: StepStatistics = StepStatistics()

    @property
    def log_rho(self) -> Tensor:
        """log theta - log mu [N], 0 where masked, with gradient."""
        return log_ratio(self.log_probs, self.rollout_log_probs, self.mask)


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator where the mask is set, else exactly 0. Shapes [N]."""
    zero = torch.zeros((), dtype=numerator.dtype, device=numerator.device)
    return torch.where(mask, numerator, zero) - torch.where(mask, denominator, zero)


def bounded_exp(log_value: Tensor) -> Tensor:
    """exp with its exponent clamped to +-20."""
    return log_value.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """values where the mask is set, else exactly 0, in value and gradient."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def sequence_sum(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """Sum of masked values [N] within each sequence, [S]; differentiable."""
    return torch.zeros(tokens.n_sequences, dtype=values.dtype, device=values.device).index_add(
        0, tokens.sequence, masked(values, tokens.mask)
    )


def sequence_mean(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """Mean of values [N] over each sequence's trainable tokens, [S], 0 where there is none; differentiable."""
    counts = sequence_sum(torch.ones_like(values), tokens)
    return sequence_sum(values, tokens) / counts.clamp(min=1.0)


def sequence_max(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """Largest of non-negative values [N] over each sequence's trainable tokens, [S], 0 where there is none."""
    empty = torch.zeros(tokens.n_sequences, dtype=values.dtype, device=values.device)
    return empty.scatter_reduce(0, tokens.sequence, masked(values, tokens.mask), reduce="amax")
