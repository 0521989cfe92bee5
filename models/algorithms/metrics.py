"""Numbers over a whole optimizer step: the metrics that it logs, and the statistics that its loss needs.

Invariants of metrics: every mean and every fraction over tokens uses the reducer of the loss (coefficient c per token,
denominator D of the step), so that it does not depend on the split into micro-batches; mismatch is measured over
trainable tokens before rejection and truncation; logged tensors are never changed in place; sums stay in double
precision on the device, with a single transfer in `result`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from configs.schema.algorithm import Aggregation, AlgorithmConfig
from models.algorithms.aggregation import TOKEN_SUMS
from models.algorithms.correction import Correction, importance_weights, log_weight_of, rejection_of, with_old_log_probs
from models.algorithms.losses import clip_cov_candidates, covariances, draws
from models.algorithms.tokens import PolicyTokens, StepStatistics, masked, sequence_sum

STALENESS_BUCKETS: Final = ("0", "1", "2", "3-4", "5+")
STALENESS_SUMS: Final = ("n", "w", "ww", "clipped", "distance")


@dataclass(frozen=True)
class TokenMetrics:
    """Ingredients from one micro-batch. What is logged of them carries no gradient."""

    means: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each: become sum of c m v / D
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # scalars: added over the step
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # scalars: largest over the step


LOSS_TERMS: Final = frozenset({"train/loss", "train/pg_loss", "train/kl_loss", "train/entropy_loss"})
EFFECTIVE_SIZES: Final = ("ess", "ess_truncated", "ess_theta", "ess_sequence")


@dataclass
class MetricTotals:
    """Running totals of one optimizer step, kept on the device until `result`."""

    means: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, metrics: TokenMetrics, coefficient: Tensor) -> None:
        """Add a micro-batch. `coefficient` [N] is c m of each token."""
        means: Mapping[str, Tensor] = {}
        if names := list(metrics.means):
            values = torch.stack([metrics.means[name].detach().to(coefficient.dtype) for name in names])
            means = dict(zip(names, (values @ coefficient).double().unbind(), strict=True))
        for totals, found, both in (
            (self.means, means, torch.add),
            (self.sums, metrics.sums, torch.add),
            (self.maxima, metrics.maxima, torch.maximum),
        ):
            for name, value in found.items():
                value = value.detach().double()
                totals[name] = both(totals[name], value) if name in totals else value

    def result(self, denominator: float, *, loss_denominator: float | None = None) -> dict[str, float]:
        """The metrics of the step as numbers; one transfer from the device.

        Terms of the loss are divided by `loss_denominator` where it differs from that of the other means.
        """
        for_loss = denominator if loss_denominator is None else loss_denominator
        tensors = [*self.means.values(), *self.maxima.values(), *self.sums.values()]
        if not tensors:
            return {}
        values = iter(torch.stack(tensors).tolist())
        out = {name: next(values) / (for_loss if name in LOSS_TERMS else denominator) for name in self.means}
        out |= {name: next(values) for name in self.maxima}
        sums = {name: next(values) for name in self.sums}
        return out | _from_sums(sums) | _by_staleness(sums)


def effective_size(count: float, total: float, squares: float) -> float:
    """(sum w)^2 / (n sum w^2): the share of n equally weighted samples that these weights are worth; 1 for none."""
    return total**2 / (count * squares) if count * squares > 0 else 1.0


def _from_sums(sums: Mapping[str, float]) -> dict[str, float]:
    """Effective sample sizes, shares of sequences, and the moments of the advantages."""
    out: dict[str, float] = {}
    for name in EFFECTIVE_SIZES:
        if f"{name}/ww" in sums:
            count = sums["n_sequences" if name == "ess_sequence" else "n"]
            out[f"train/{name}"] = effective_size(count, sums[f"{name}/w"], sums[f"{name}/ww"])
    for name, value in sums.items():
        kind, _, rule = name.partition("/")
        if kind == "rejected_sequences":
            out[f"train/seq_mask_fraction/{rule}"] = value / max(sums["n_sequences"], 1.0)
    if "kept" in sums:
        out["correction/all_rejected"] = float(sums["kept"] == 0 and sums["n"] > 0)
    if count := sums.get("advantage/n", 0.0):
        mean = sums["advantage"] / count
        out["train/advantage_mean"] = mean
        out["train/advantage_std"] = math.sqrt(max(sums["advantage2"] / count - mean * mean, 0.0))
    return out


def _by_staleness(sums: Mapping[str, float]) -> dict[str, float]:
    """staleness/{ess,clipfrac,abs_diff}/{bucket}: token means within each bucket that has a token."""
    out: dict[str, float] = {}
    for bucket in STALENESS_BUCKETS:
        count, weight, squares, clipped, distance = (
            sums.get(f"staleness/{name}/{bucket}", 0.0) for name in STALENESS_SUMS
        )
        if count > 0:
            out[f"staleness/ess/{bucket}"] = effective_size(count, weight, squares)
            out[f"staleness/clipfrac/{bucket}"] = clipped / count
            out[f"staleness/abs_diff/{bucket}"] = distance / count
    return out


# --------------------------------------------------------------------------------------------------
# What a loss must know of the whole optimizer step before the first backward pass.
#
#     normalised weights    their mean over the step
#     m2po                  the bound of (log theta - log mu)^2, from all tokens of the step
#     clip_cov, kl_cov      means of advantages and log-probs, and which covariances or draws are chosen
#     rs_unit rollout       which rollouts fail, tested over the tokens of all their rows
#     renormalize           how many tokens of each rollout are left after rejection
#
# Each function takes one `PolicyTokens` with the step's trainable tokens, computed without gradient. The results go to
# every micro-batch: `PolicyTokens.statistics`, and its sequences' part of the columns [S] `rejected` and `kept_scale`.
#
# Invariant: a result depends neither on the order of the tokens nor on the split into micro-batches.


def step_statistics(tokens: PolicyTokens, algorithm: AlgorithmConfig, correction: Correction) -> StepStatistics:
    """Facts of the step that consists of `tokens`."""
    with torch.no_grad():
        found = StepStatistics()
        if algorithm.policy_loss == "m2po":
            bound = m2po_bound(tokens.log_rho.detach().square()[tokens.mask], algorithm.m2po_threshold)
            found = StepStatistics(m2po_bound=bound)
        if algorithm.policy_loss in ("clip_cov", "kl_cov"):
            found = _covariance_statistics(with_old_log_probs(tokens, correction), algorithm)
        if correction.use_tis and correction.tis_batch_normalize:
            found = replace(found, weight_mean=_weight_mean(with_old_log_probs(tokens, correction), correction))
    return found


def _covariance_statistics(tokens: PolicyTokens, config: AlgorithmConfig) -> StepStatistics:
    """Means of advantages and log-probs, and from which covariance on (kl_cov) or up to which draw (clip_cov) tokens
    are chosen: the share of all tokens that the loss asks for, one at least. Equal ones are chosen together."""
    count = max(int(tokens.mask.sum()), 1)
    sums = [float(masked(each, tokens.mask).double().sum()) for each in (tokens.advantages, tokens.log_probs)]
    found = StepStatistics(advantage_mean=sums[0] / count, log_prob_mean=sums[1] / count)
    tokens = replace(tokens, statistics=found)
    if config.policy_loss == "kl_cov":
        ranked, share = -covariances(tokens)[tokens.mask], config.kl_cov_ratio
    else:
        ranked, share = draws(tokens)[clip_cov_candidates(tokens, config)], config.clip_cov_ratio
    ranked, wanted = ranked.sort().values, max(int(share * count), 1)
    if wanted >= len(ranked):
        return replace(found, cov_bound=math.inf)
    bound = float((ranked[wanted - 1] + ranked[wanted]) / 2)
    return replace(found, cov_bound=bound if bound < float(ranked[wanted]) else float(ranked[wanted - 1]))


def rejected_rollouts(tokens: PolicyTokens, rollout: Tensor, correction: Correction) -> Tensor:
    """[S] bool: whether the rollout of each sequence fails a sequence rule or the veto, with rs_unit rollout.

    The statistic is pooled: sum, mean or maximum over the trainable tokens of all rows of the rollout. `rollout` [S]
    int64: the rollout of each sequence, any numbers.
    """
    with torch.no_grad():
        names, index = rollout.unique(return_inverse=True)
        tokens = with_old_log_probs(tokens, correction)
        pooled = replace(tokens, sequence=index[tokens.sequence], n_sequences=len(names), rejected=None)
        return rejection_of(pooled, correction).failed_sequences[index]


def kept_scale(tokens: PolicyTokens, rollout: Tensor, aggregation: Aggregation, correction: Correction) -> Tensor:
    """[S] factor of the policy term that replaces the token counts in its divisor by those after rejection.

    Tokens before / after rejection: of the rollout (rollout_mean), of the sequence (seq_mean) or of the step
    (token_mean); 1 for `constant` and `seq_mean_token_sum`, which divide by no count, and where nothing is left. With
    rs_unit rollout `tokens.rejected` must hold `rejected_rollouts` already.
    """
    with torch.no_grad():
        rejection = rejection_of(with_old_log_probs(tokens, correction), correction)
        before = sequence_sum(tokens.mask.double(), tokens)
        after = sequence_sum(rejection.kept.double(), tokens)
        if aggregation in TOKEN_SUMS:
            return torch.ones_like(before)
        if aggregation == "token_mean":
            before, after = before.sum().expand_as(before), after.sum().expand_as(after)
        elif aggregation == "rollout_mean":
            before, after = _over_rollout(before, rollout), _over_rollout(after, rollout)
        return torch.where(after > 0, before / after.clamp(min=1.0), 1.0)


def m2po_bound(squares: Tensor, threshold: float) -> float:
    """Largest square that is kept so that the mean of the kept ones is at most `threshold` (arXiv:2510.01161).

    Equal squares are kept or dropped together; the smallest are always kept. The bound lies between the last square
    kept and the first one dropped, so that rounding in another forward pass does not move a token across it.
    """
    if squares.numel() == 0:
        return math.inf
    values, counts = squares.double().unique(return_counts=True)  # ascending
    means = (values * counts).cumsum(0) / counts.cumsum(0)
    kept = max(int((means <= threshold).sum()), 1)
    if kept == len(values):
        return math.inf
    last, first = values[kept - 1], values[kept]
    middle = ((last + first) / 2).to(squares.dtype).double()  # as it will be compared
    return float(middle if bool(middle < first) else last)


def _weight_mean(tokens: PolicyTokens, correction: Correction) -> float:
    """Mean of the bounded weights over trainable tokens, or over sequences that have any."""
    weight = importance_weights(tokens, correction, log_weight_of(tokens, correction)).weight.double()
    counts = sequence_sum(torch.ones_like(weight), tokens)
    live = counts > 0
    if not bool(live.any()):
        return 1.0
    if correction.tis_level == "token":
        mean = float(weight[tokens.mask].mean())
    else:
        mean = float((sequence_sum(weight, tokens)[live] / counts[live]).mean())
    # All weights 0: there is nothing to normalise. A mean that is not finite is kept, for the step to be refused.
    return 1.0 if mean == 0.0 else mean


def _over_rollout(values: Tensor, rollout: Tensor) -> Tensor:
    """Sum of values [S] over the sequences of each rollout, given back to each of them."""
    names, index = rollout.unique(return_inverse=True)
    totals = torch.zeros(len(names), dtype=values.dtype, device=values.device).index_add(0, index, values)
    return totals[index]
