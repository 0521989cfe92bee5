"""Importance weights of tokens against the policy that sampled them.

Order, always: mask -> sum or mean over the sequence -> clamp to +-20 -> exp -> bound -> detach. The weight multiplies
the whole policy term after its clipping, never the entropy or the KL term.

    level      exponent of the weight, D = log old - log mu
    token      D of the token
    sequence   sum of D over the trainable tokens of the sequence, the same for all of them
    geometric  mean of D over them

    mode      outside the bounds
    clip      moved to the bound (truncated importance sampling)
    icepop    0; inside it stays as it is (arXiv:2510.18855)
    seq_mask  moved to the bound, and 0 for sequences whose geometric mean lies outside bounds of its own

Invariants: no gradient flows through a weight; a weight that is not a number stays one, for the step to be refused.
Sources: arXiv:2110.00641, arXiv:2505.24298.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from models.algorithms.errors import AlgorithmError
from models.algorithms.modes import Correction, WeightLevel
from models.algorithms.select import pick
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked, sequence_mean, sequence_sum


class WeightFunction(Protocol):
    """Weights [N] from log old - log mu [N] (0 where masked); a gradient through them is cut off."""

    def __call__(self, log_weight: Tensor, tokens: PolicyTokens) -> Tensor: ...


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights of N tokens, without gradient; 1 where masked."""

    raw: Tensor  # [N] before the bounds
    weight: Tensor  # [N] within the bounds
    truncated: Tensor  # [N] bool, the bounds changed the weight


CUSTOM_WEIGHTS: Final[Mapping[str, WeightFunction]] = {}


def log_weight_of(tokens: PolicyTokens, correction: Correction) -> Tensor:
    """D = log old - log mu [N], or log theta - log mu where the correction is against the current policy.

    0 where masked, no gradient. `tokens.old_log_probs` are those of the mode.
    """
    numerator = tokens.log_probs if correction.against_current else tokens.old_log_probs
    return log_ratio(numerator.detach(), tokens.rollout_log_probs.detach(), tokens.mask)


def mismatch_of(tokens: PolicyTokens, correction: Correction) -> Tensor:
    """How far the trainer's policy is from the sampler, [N], 0 where masked, no gradient: what is logged.

    D, but of the current policy where the old log-probs are made from the sampler's and would hide that
    kernels differ.
    """
    numerator = tokens.log_probs if correction.measures_current else tokens.old_log_probs
    return log_ratio(numerator.detach(), tokens.rollout_log_probs.detach(), tokens.mask)


def importance_weights(tokens: PolicyTokens, correction: Correction, log_weight: Tensor) -> ImportanceWeights:
    """Bounded weights [N] from D [N]. Raises `UnknownAlgorithm` or `AlgorithmError` for a wrong custom function."""
    exponent = spread(log_weight, tokens, correction.tis_level)
    raw = bounded_exp(exponent)
    if correction.custom_tis_function_path is not None:
        weight = _custom(correction.custom_tis_function_path, log_weight, tokens)
    else:
        weight = _bounded(raw, log_weight, tokens, correction)
    weight = torch.where(tokens.mask, weight, torch.ones_like(weight))
    return ImportanceWeights(raw=raw, weight=weight, truncated=(raw != weight) & tokens.mask)


def spread(log_weight: Tensor, tokens: PolicyTokens, level: WeightLevel) -> Tensor:
    """The exponent of each token's weight [N], 0 where masked. Nothing is clamped before it is summed."""
    if level == "token":
        return log_weight
    statistic = sequence_sum if level == "sequence" else sequence_mean
    return masked(statistic(log_weight, tokens)[tokens.sequence], tokens.mask)


def upper_bound(tokens: PolicyTokens, correction: Correction) -> Tensor:
    """1 + (high - 1) decay^s of each token s versions old, [N] or a scalar."""
    like = tokens.rollout_log_probs
    if correction.tis_clip_decay == 1.0 or tokens.staleness is None or correction.tis_level != "token":
        return torch.full((), correction.tis_clip, dtype=like.dtype, device=like.device)
    decay = torch.full((), correction.tis_clip_decay, dtype=like.dtype, device=like.device)
    return 1.0 + (correction.tis_clip - 1.0) * decay ** tokens.staleness.clamp(min=0).to(like.dtype)


def _bounded(raw: Tensor, log_weight: Tensor, tokens: PolicyTokens, correction: Correction) -> Tensor:
    high = upper_bound(tokens, correction)
    if correction.tis_mode == "icepop":
        return torch.where((raw < correction.tis_clip_low) | (raw > high), torch.zeros_like(raw), raw)
    weight = torch.minimum(raw.clamp(min=correction.tis_clip_low), high)
    if correction.tis_mode == "seq_mask":
        geometric = bounded_exp(spread(log_weight, tokens, "geometric"))
        outside = (geometric < correction.tis_seq_low) | (geometric > correction.tis_seq_high)
        weight = torch.where(outside, torch.zeros_like(weight), weight)
    return weight


def _custom(path: str, log_weight: Tensor, tokens: PolicyTokens) -> Tensor:
    weight = pick("importance_weights", path, CUSTOM_WEIGHTS)(log_weight, tokens)
    if not isinstance(weight, Tensor) or weight.shape != log_weight.shape:
        shape = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise AlgorithmError(
            f"custom_tis_function_path {path!r} returned {shape}: return one weight for each of the "
            f"{len(log_weight)} tokens"
        )
    return weight.detach().to(log_weight.dtype)
