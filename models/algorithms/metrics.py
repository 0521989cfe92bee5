"""Metrics of a policy step: what a micro-batch contributes, and their sums over the step.

Invariants: every mean and every fraction over tokens uses the reducer of the loss (coefficient c per token, denominator
D of the step), so that it does not depend on the split into micro-batches; mismatch is measured over trainable tokens
before rejection and before truncation; logged tensors are never changed in place; sums are kept in double precision on
the device, with a single transfer in `result`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from models.algorithms.correction import VETO, ImportanceWeights, Rejection
from models.algorithms.losses import PolicyLoss
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked, sequence_sum

STALENESS_BUCKETS: Final = ("0", "1", "2", "3-4", "5+")
BUCKET_STARTS: Final = (1, 2, 3, 5)
STALENESS_SUMS: Final = ("n", "w", "ww", "clipped", "distance")


@dataclass(frozen=True)
class TokenMetrics:
    """Ingredients from one micro-batch. What is logged of them carries no gradient."""

    means: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each: become sum of c m v / D
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # scalars: added over the step
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # scalars: largest over the step


def joined(*parts: TokenMetrics) -> TokenMetrics:
    """All of them as one."""
    return TokenMetrics(
        means={name: value for part in parts for name, value in part.means.items()},
        sums={name: value for part in parts for name, value in part.sums.items()},
        maxima={name: value for part in parts for name, value in part.maxima.items()},
    )


def clip_metrics(policy: PolicyLoss) -> dict[str, Tensor]:
    """Shares of the tokens that the policy loss held back: [N] each."""
    dtype = policy.loss.dtype
    means = {
        "train/pg_clipfrac": (policy.clipped_high | policy.clipped_low).to(dtype),
        "train/pg_clipfrac_high": policy.clipped_high.to(dtype),
        "train/pg_clipfrac_low": policy.clipped_low.to(dtype),
    }
    if policy.dual_clipped is not None:
        means["train/dual_clipfrac"] = policy.dual_clipped.to(dtype)
    return means


def drift_metrics(tokens: PolicyTokens) -> dict[str, Tensor]:
    """Distance of theta from old: [N] each."""
    change = log_ratio(tokens.log_probs.detach(), tokens.old_log_probs, tokens.mask)
    return {"train/ppo_kl": -change, "train/kl_old_theta_k3": bounded_exp(change) - 1.0 - change}


def mismatch_metrics(tokens: PolicyTokens, delta: Tensor, weights: ImportanceWeights | None) -> TokenMetrics:
    """Distance of old from mu, the sampler (different kernels, staleness), by `delta` = log old - log mu [N]."""
    raw, distance = bounded_exp(delta), delta.abs()
    means = {
        "train/train_rollout_logprob_abs_diff": distance,
        "train/kl_mu_old_k1": -delta,
        "train/kl_mu_old_k3": raw - 1.0 - delta,
        "train/chi2_token": bounded_exp(2.0 * delta) - 1.0,
    }
    live = (sequence_sum(torch.ones_like(delta), tokens) > 0).to(delta.dtype)
    of_weights = {
        "ess": masked(raw, tokens.mask),
        "ess_theta": masked(bounded_exp(tokens.log_rho.detach()), tokens.mask),
        "ess_sequence": bounded_exp(sequence_sum(delta, tokens)) * live,
    }
    if weights is not None:
        means["train/tis"] = weights.raw
        means["train/tis_clipfrac"] = weights.truncated.to(delta.dtype)
        means["train/tis_abs"] = (weights.raw - 1.0).abs()
        of_weights["ess_truncated"] = masked(weights.weight, tokens.mask)
    sums = {"n": tokens.mask.sum(), "n_sequences": live.sum()}
    for name, weight in of_weights.items():
        sums[f"{name}/w"] = weight.sum()
        sums[f"{name}/ww"] = weight.square().sum()
    maxima = {"train/train_rollout_logprob_abs_diff_max": distance.max() if distance.numel() else distance.sum()}
    return TokenMetrics(means=means, sums=sums, maxima=maxima)


def rejection_metrics(rejection: Rejection, tokens: PolicyTokens) -> TokenMetrics:
    """What each rule removes by itself, of tokens and of whole sequences; nothing if there is no rule."""
    dtype = tokens.log_probs.dtype
    means = {
        "train/veto_fraction" if rule == VETO else f"train/mask_fraction/{rule}": lost.to(dtype)
        for rule, lost in rejection.removed.items()
    }
    sums = {f"rejected_sequences/{rule}": lost.sum() for rule, lost in rejection.removed_sequences.items()}
    if not rejection.none:
        means["train/mask_fraction"] = (tokens.mask & ~rejection.kept).to(dtype)
        sums["kept"] = rejection.kept.sum()
    return TokenMetrics(means, sums)


def staleness_sums(tokens: PolicyTokens, delta: Tensor, policy: PolicyLoss) -> TokenMetrics:
    """By how many versions old the tokens are, `staleness/<sum>/<bucket>`: the sums of `STALENESS_SUMS`."""
    if tokens.staleness is None:
        return TokenMetrics()
    starts = torch.tensor(BUCKET_STARTS, device=tokens.staleness.device)
    bucket = torch.bucketize(tokens.staleness, starts, right=True)
    raw = bounded_exp(delta)
    clipped = (policy.clipped_high | policy.clipped_low).to(raw.dtype)
    values = torch.stack([torch.ones_like(raw), raw, raw.square(), clipped, delta.abs()])
    values = torch.where(tokens.mask, values, torch.zeros_like(values)).double()
    table = torch.zeros(len(STALENESS_SUMS), len(STALENESS_BUCKETS), dtype=values.dtype, device=values.device)
    numbers = table.index_add(1, bucket, values).flatten().unbind()
    names = [f"staleness/{sum_}/{where}" for sum_ in STALENESS_SUMS for where in STALENESS_BUCKETS]
    return TokenMetrics(sums=dict(zip(names, numbers, strict=True)))


def advantage_sums(tokens: PolicyTokens) -> dict[str, Tensor]:
    """Sums for mean and standard deviation of the advantages over trainable tokens."""
    values = masked(tokens.advantages, tokens.mask).double()
    return {"advantage": values.sum(), "advantage2": values.square().sum(), "advantage/n": tokens.mask.sum()}


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
        names = list(metrics.means)
        if names:
            values = torch.stack([metrics.means[name].detach().to(coefficient.dtype) for name in names])
            totals = (values @ coefficient).double()
            for name, total in zip(names, totals.unbind(), strict=True):
                self.means[name] = self.means[name] + total if name in self.means else total
        for name, value in metrics.sums.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in metrics.maxima.items():
            value = value.detach().double()
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

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
        out.update({name: next(values) for name in self.maxima})
        sums = {name: next(values) for name in self.sums}
        out.update(_from_sums(sums))
        out.update(_by_staleness(sums))
        return out


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
