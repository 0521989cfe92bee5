"""Outcomes of groups: filter metrics of each step, and over the run how the trained groups differ from the rest.

A filter, an age limit or an over-sampled batch selects what is learnt. `bias.json` shows what the selection favours:
lengths and pass rates of the trained groups beside those of all other groups.

Invariants: a group enters by its settlement, once; lengths and pass rates are compared over graded groups only, because
an interrupted group has neither.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from models.disk import write_json
from stages.messages import Settled, StepDone
from stages.train.batch_metrics import length_bucket

MOST_REASONS = 30  # names of metrics; the rest is counted as `other`
RATE_BUCKETS = 10


@dataclass
class OutcomeFigures:
    """Groups with one outcome. Histograms count groups: by mean response length (upper bound, tokens), by pass rate."""

    groups: int = 0
    graded: int = 0
    rated: int = 0
    length_sum: float = 0.0
    pass_rate_sum: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)
    pass_rates: Counter[str] = field(default_factory=Counter)

    @property
    def length_mean(self) -> float | None:
        return _mean(self.length_sum, self.graded)

    @property
    def pass_rate_mean(self) -> float | None:
        return _mean(self.pass_rate_sum, self.rated)

    def length(self, tokens: float) -> None:
        self.graded += 1
        self.length_sum += tokens
        self.lengths[length_bucket(tokens)] += 1

    def rate(self, share: float) -> None:
        self.rated += 1
        self.pass_rate_sum += share
        low = min(int(share * RATE_BUCKETS + 1e-9), RATE_BUCKETS - 1) / RATE_BUCKETS
        self.pass_rates["1.0" if share >= 1 else f"{low:.1f}"] += 1


class GroupOutcomes:
    """Counts settlements. `n_samples`: rollouts of a group."""

    def __init__(self, n_samples: int) -> None:
        self._n_samples = n_samples
        self.by_outcome = defaultdict[str, OutcomeFigures](OutcomeFigures)
        self._names: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        """Begin the count towards the next step."""
        self._rewards: list[float] = []  # of graded groups that were not trained
        self._rates: list[float] = []  # of all groups
        self._drops = Counter[str]()
        self._ended = 0
        self._wasted = 0

    def settled(self, report: Settled) -> None:
        figures = self.by_outcome[report.outcome]
        figures.groups += 1
        if report.pass_rate is not None:
            figures.rate(report.pass_rate)
            self._rates.append(report.pass_rate)
        if report.outcome == "trained":
            return  # its length comes with the step, which knows the groups one by one
        self._ended += 1
        if report.reward is not None:
            figures.length(report.tokens / self._n_samples)
            self._rewards.append(report.reward)
        if report.outcome == "filtered":
            self._wasted += report.tokens
            self._drops[self._name(report.detail)] += 1

    def _name(self, reason: str) -> str:
        """A reason as part of a metric's name."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", reason).strip("_")[:60] or "filtered"
        if name not in self._names and len(self._names) >= MOST_REASONS:
            return "other"
        self._names.add(name)
        return name

    def step(self, report: StepDone) -> dict[str, float]:
        """Metrics of the groups that ended since the last step, the trained ones of `report` included."""
        trained = self.by_outcome["trained"]
        for name, count in report.metrics.items():
            place, _, bucket = name.rpartition("/")
            if place.endswith("group_len"):
                trained.lengths[int(bucket)] += int(count)
        n = len(report.groups)
        trained.graded += n
        trained.length_sum += report.metrics.get("rollout/response_len/mean", 0.0) * n
        metrics = {
            "filter/accept_ratio": n / (n + len(self._rewards)),
            "filter/oversample_ratio": (n + self._ended) / n if n else 0.0,
            "filter/wasted_tokens": float(self._wasted),
        }
        reward = report.metrics.get("rollout/raw_reward")
        if reward is not None:
            metrics["reward/mean"] = (reward * n + sum(self._rewards)) / (n + len(self._rewards))
        if self._rates:
            metrics["passrate/mean"] = sum(self._rates) / len(self._rates)
        for reason, count in self._drops.items():
            metrics[f"filter/drop_{reason}"] = float(count)
        self._clear()
        return metrics | self._bias()

    def _bias(self) -> dict[str, float]:
        """How the groups trained so far differ from all graded groups."""
        trained, everyone = self.by_outcome["trained"], self.by_outcome.values()
        length = _mean(sum(f.length_sum for f in everyone), sum(f.graded for f in everyone))
        rate = _mean(sum(f.pass_rate_sum for f in everyone), sum(f.rated for f in everyone))
        metrics: dict[str, float] = {}
        if length and trained.length_mean is not None:
            metrics["filter/trained_len_ratio"] = trained.length_mean / length
        if rate is not None and trained.pass_rate_mean is not None:
            metrics["filter/pass_rate_gap"] = trained.pass_rate_mean - rate
        return metrics

    def write(self, path: Path) -> None:
        """The report by outcome, as JSON."""
        lines = {
            outcome: {
                "groups": figures.groups,
                "length_mean": figures.length_mean,
                "pass_rate_mean": figures.pass_rate_mean,
                "lengths": dict(sorted(figures.lengths.items())),
                "pass_rates": dict(sorted(figures.pass_rates.items())),
            }
            for outcome, figures in sorted(self.by_outcome.items())
        }
        write_json(path, lines)


def _mean(total: float, n: int) -> float | None:
    return total / n if n else None
