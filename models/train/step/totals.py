"""Sums over the micro-batches of one optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from models.algorithms.metrics import MetricTotals
from models.train.dp_group import DpGroup
from models.train.packing.micro_batches import MicroBatch


@dataclass
class StepTotals:
    """What the models add (`metrics`, `kept`), and what the micro-batches cost (`count`)."""

    metrics: MetricTotals = field(default_factory=MetricTotals)
    kept: torch.Tensor | int = 0  # tokens that no rejection rule removed
    costs: Counter[str] = field(default_factory=Counter)

    def count(self, batches: Sequence[MicroBatch]) -> None:
        """Note what micro-batches cost; blank ones are not counted."""
        for batch in batches:
            if not batch.blank:
                self.costs.update(
                    micro_batches=1,
                    padded_tokens=batch.layout.padded_tokens,
                    used_tokens=batch.layout.used_tokens,  # of them, not padding
                    sequence_tokens=sum(one.input_length for one in batch.members),  # without sharing prompts
                )

    def combine(self, dp_group: DpGroup) -> None:
        """Make these the totals of all data-parallel ranks."""
        sums = dp_group.merge({"kept": float(self.kept), **self.costs})
        self.kept = torch.tensor(sums.pop("kept"), dtype=torch.float64)
        self.costs = Counter({name: int(value) for name, value in sums.items()})
        if dp_group.processes > 1:
            self.metrics = MetricTotals(
                means=_combined(self.metrics.means, dp_group),
                sums=_combined(self.metrics.sums, dp_group),
                maxima=_combined(self.metrics.maxima, dp_group, largest=True),
            )

    def result(self, denominator: float, *, loss_denominator: float) -> dict[str, float]:
        """Metrics of the step, for its denominators."""
        out = self.metrics.result(denominator, loss_denominator=loss_denominator)
        used, padded, apart = (self.costs[f"{kind}_tokens"] for kind in ("used", "padded", "sequence"))
        out["train/micro_batches"] = float(self.costs["micro_batches"])
        out["train/padding_frac"] = 1.0 - used / padded if padded else 0.0
        out["train/shared_prompt_frac"] = 1.0 - used / apart if apart else 0.0
        return out


def _combined(values: dict[str, torch.Tensor], dp_group: DpGroup, *, largest: bool = False) -> dict[str, torch.Tensor]:
    numbers = {name: float(value) for name, value in values.items()}
    found = dp_group.merge(numbers, largest=largest)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}
