"""Metrics of a policy step, summed over its micro-batches without waiting for the device.

Invariants: sums are kept in double precision on the device; there is one transfer, in `result`; what is added is never
changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from models.algorithms.token_metrics import STALENESS_BUCKETS, STALENESS_SUMS, TokenMetrics

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
