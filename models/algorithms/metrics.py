"""Metrics of a policy step, summed over micro-batches without waiting for the device.

Invariants: every mean and every fraction uses the reducer of the loss (coefficient c per token, denominator D of the
step), so that it does not depend on the split into micro-batches; tensors that are logged are never changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from models.algorithms.correction import ImportanceWeights
from models.algorithms.tokens import PolicyTokens, bounded_exp, log_ratio, masked, sequence_sum

LOSS_TERMS: Final = frozenset({"train/loss", "train/pg_loss", "train/kl_loss", "train/entropy_loss"})


@dataclass(frozen=True)
class TokenMetrics:
    """Ingredients from one micro-batch, all without gradient."""

    means: Mapping[str, Tensor]  # [N] each: become sum of c m v / D
    sums: Mapping[str, Tensor]  # scalars: added over the step
    maxima: Mapping[str, Tensor]  # scalars: largest over the step


def drift_metrics(tokens: PolicyTokens) -> dict[str, Tensor]:
    """Distance of theta from old, the anchor: [N] each."""
    change = log_ratio(tokens.log_probs.detach(), tokens.old_log_probs, tokens.mask)
    return {"train/ppo_kl": -change, "train/kl_old_theta_k3": bounded_exp(change) - 1.0 - change}


def mismatch_metrics(tokens: PolicyTokens, weights: ImportanceWeights, *, use_tis: bool) -> TokenMetrics:
    """Distance of old from mu, the sampler (different kernels, staleness), over trainable tokens before truncation."""
    delta, raw, mask = weights.log_weight, weights.raw, tokens.mask
    distance = delta.abs()
    means = {
        "train/train_rollout_logprob_abs_diff": distance,
        "train/kl_mu_old_k1": -delta,
        "train/kl_mu_old_k3": raw - 1.0 - delta,
        "train/chi2_token": bounded_exp(2.0 * delta) - 1.0,
    }
    if use_tis:
        means["train/tis"] = raw
        means["train/tis_clipfrac"] = weights.truncated.to(raw.dtype)
        means["train/tis_abs"] = (raw - 1.0).abs()
    rho = bounded_exp(log_ratio(tokens.log_probs.detach(), tokens.rollout_log_probs, mask))
    live = torch.zeros(tokens.n_sequences, dtype=raw.dtype, device=raw.device)
    live[tokens.sequence[mask]] = 1.0
    sequence = bounded_exp(sequence_sum(delta, tokens)) * live
    sums = {"n": mask.sum(), "n_sequences": live.sum()}
    for name, weight in (
        ("ess", masked(raw, mask)),
        ("ess_truncated", masked(weights.weight, mask)),
        ("ess_theta", masked(rho, mask)),
        ("ess_sequence", sequence),
    ):
        sums[f"{name}/w"] = weight.sum()
        sums[f"{name}/ww"] = weight.square().sum()
    maxima = {"train/train_rollout_logprob_abs_diff_max": distance.max() if distance.numel() else distance.sum()}
    return TokenMetrics(means=means, sums=sums, maxima=maxima)


def advantage_sums(tokens: PolicyTokens) -> dict[str, Tensor]:
    """Sums for mean and standard deviation of the advantages over trainable tokens."""
    values = masked(tokens.advantages, tokens.mask).double()
    return {"advantage": values.sum(), "advantage2": values.square().sum(), "advantage/n": tokens.mask.sum()}


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
        tensors = [*self.means.values(), *self.sums.values(), *self.maxima.values()]
        if not tensors:
            return {}
        values = iter(torch.stack(tensors).tolist())
        out = {name: next(values) / (for_loss if name in LOSS_TERMS else denominator) for name in self.means}
        sums = {name: next(values) for name in self.sums}
        out.update({name: next(values) for name in self.maxima})
        out.update(_from_sums(sums))
        return out


def _from_sums(sums: Mapping[str, float]) -> dict[str, float]:
    """Effective sample sizes (sum w)^2 / (N sum w^2) and the moments of the advantages."""
    out: dict[str, float] = {}
    for name in ("ess", "ess_truncated", "ess_theta", "ess_sequence"):
        if f"{name}/ww" in sums:
            count = sums["n_sequences" if name == "ess_sequence" else "n"]
            denominator = count * sums[f"{name}/ww"]
            out[f"train/{name}"] = sums[f"{name}/w"] ** 2 / denominator if denominator > 0 else 1.0
    if count := sums.get("advantage/n", 0.0):
        mean = sums["advantage"] / count
        out["train/advantage_mean"] = mean
        out["train/advantage_std"] = math.sqrt(max(sums["advantage2"] / count - mean * mean, 0.0))
    return out
