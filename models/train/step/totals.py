"""Sums over the micro-batches of one optimizer step."""

from __future__ import annotations

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
    kept: torch.Tensor | None = None  # tokens that no rejection rule removed
    micro_batches: int = 0
    padded_tokens: int = 0
    used_tokens: int = 0  # of them, not padding
    sequence_tokens: int = 0  # what the sequences would need without sharing prompts

    def keep(self, kept: torch.Tensor) -> None:
        """Add a number of tokens that are still trained."""
        self.kept = kept if self.kept is None else self.kept + kept

    def count(self, batches: Sequence[MicroBatch]) -> None:
        """Note what micro-batches cost; blank ones are not counted."""
        for batch in batches:
            if batch.blank:
                continue
            self.micro_batches += 1
            self.padded_tokens += batch.layout.padded_tokens
            self.used_tokens += batch.layout.used_tokens
            self.sequence_tokens += sum(example.input_length for example in batch.members)

    def combine(self, dp_group: DpGroup) -> None:
        """Make these the totals of all data-parallel ranks."""
        own = {
            "kept": 0.0 if self.kept is None else float(self.kept),
            "micro_batches": self.micro_batches,
            "padded_tokens": self.padded_tokens,
            "used_tokens": self.used_tokens,
            "sequence_tokens": self.sequence_tokens,
        }
        sums = dp_group.merge(own)
        self.kept = torch.tensor(sums["kept"], dtype=torch.float64)
        self.micro_batches, self.padded_tokens = int(sums["micro_batches"]), int(sums["padded_tokens"])
        self.used_tokens, self.sequence_tokens = int(sums["used_tokens"]), int(sums["sequence_tokens"])
        if dp_group.processes > 1:
            self.metrics = MetricTotals(
                means=_combined(self.metrics.means, dp_group),
                sums=_combined(self.metrics.sums, dp_group),
                maxima=_combined(self.metrics.maxima, dp_group, largest=True),
            )

    def result(self, denominator: float, *, loss_denominator: float) -> dict[str, float]:
        """Metrics of the step, for its denominators."""
        out = self.metrics.result(denominator, loss_denominator=loss_denominator)
        out["train/micro_batches"] = float(self.micro_batches)
        out["train/padding_frac"] = 1.0 - self.used_tokens / self.padded_tokens if self.padded_tokens else 0.0
        out["train/shared_prompt_frac"] = 1.0 - self.used_tokens / self.sequence_tokens if self.sequence_tokens else 0.0
        return out


def _combined(values: dict[str, torch.Tensor], dp_group: DpGroup, *, largest: bool = False) -> dict[str, torch.Tensor]:
    numbers = {name: float(value) for name, value in values.items()}
    found = dp_group.merge(numbers, largest=largest)
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}
