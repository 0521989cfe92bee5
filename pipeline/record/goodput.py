"""What became of a run's work. Goodput: the share of the engines' slot time that made trained tokens, and what took the
rest.

Every look adds the time since the previous look to one account for each slot: it works, or it is empty because

- `update`: its engine stands still for new weights,
- `trainer`: the gate is closed, and the trainer computes: it is the slower side,
- `tail`: the gate is closed, and the trainer waits for the longest responses of the groups that are out,
- `starved`: the gate is open, and no prompt comes; or nothing is at any engine, and all rollouts that are out wait for
  tools, graders or other stages.

Tokens of groups that were not trained, and stale tokens that were masked, are counted by cause; so a working slot is
`trained`, or wasted. `attainable` is what a perfect scheduler would reach with the measured lengths and times.

`GroupOutcomes` has the filter metrics of each step, and over the run how the trained groups differ from the rest. A
filter, an age limit or an over-sampled batch selects what is learnt: `bias.json` shows what the selection favours, by
the lengths and pass rates of the trained groups beside those of all other groups.

Invariants: nothing here reads a clock, so the figures are functions of what was observed; a group enters by its
settlement, once; lengths and pass rates are compared over graded groups only, because an interrupted group has neither.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from configs.plan.goodput import Workload, attainable
from configs.schema import Config
from models.disk import write_json
from pipeline.facts.stats import GoodputFigures
from pipeline.record.view import RunView
from stages.group.filters import EARLY
from stages.messages import Settled, StepDone
from stages.topic_values import LENGTH, RUNNING, EngineEntry, length_of
from stages.train.batch_metrics import MASKED, length_bucket

LEAST_RESPONSES: Final = 64
LEAST_BATCHES: Final = 4  # between two estimates of what is attainable
LEAST_S: Final = 5.0  # as well: it takes up to 40 ms
KEPT_SHARE: Final = 0.9  # of what earlier estimates saw of the speed of a slot


def wasted_by(report: Settled) -> str:
    """Why the tokens of a group that is not trained were made for nothing."""
    if report.outcome == "filtered":
        return "no_variance" if report.detail.startswith("zero_std") else "filtered"
    if report.outcome == "discarded" and report.detail.startswith("over-sampled"):
        return "over_sampled"
    return report.outcome


class Goodput:
    """The accounts of one phase of a run, which goes by `view`."""

    def __init__(self, config: Config, view: RunView) -> None:
        self.view, self.waste = view, view.waste
        self._rollout, self._most = config.rollout, config.rollout.server_concurrency
        if config.engine.engine != "sglang":
            self._most = min(self._most, config.engine.engine_slots)
        self._asynchrony = config.asynchrony
        self._slot_s = dict.fromkeys(("working", "update", "trainer", "tail", "starved"), 0.0)
        self._last_s: float | None = None
        self._train = (0.0, 0.0)  # busy and watched seconds of the trainer
        self._train_busy = 0.0  # share between its newest two reports
        self._versions: dict[str, int] = {}
        self._slots = 0
        self._batches = 0  # since the newest estimate
        self._next_s = 0.0  # no estimate before it
        self._train_s = 0.0  # of these batches
        self._before: dict[str, float] = {}  # figures at the newest estimate
        self._made = self._worked_s = 0.0  # tokens and the slot time they took, of the newest estimates above all
        self._work: Workload | None = None
        self._attainable: float | None = None

    def look(self, now_s: float, engines: Mapping[str, EngineEntry], capacity: int) -> None:
        """Add the time since the previous look. `engines`: that carry weights; `capacity`: groups that may enter."""
        passed, self._last_s = 0.0 if self._last_s is None else now_s - self._last_s, now_s
        slots = {name: min(entry.limit or self._most, self._most) for name, entry in engines.items()}
        self._slots = sum(slots.values())
        working = sum(min(self.view.extra("engines", f"{name}{RUNNING}"), n) for name, n in slots.items())
        stalled = 0.0
        for name, entry in engines.items():  # an engine that stands still keeps what runs
            newer = max(entry.version - self._versions.get(name, entry.version), 0)
            self._versions[name] = entry.version
            stalled += newer * entry.stall_s * working / max(self._slots, 1) * slots[name]
        self._slot_s["update"] += stalled
        self._slot_s["working"] += working * passed - stalled
        empty, busy = (self._slots - working) * passed, self._busy()
        if capacity > 0:
            self._slot_s["starved"] += empty
        else:
            self._slot_s["trainer"] += empty * busy
            self._slot_s["tail" if working else "starved"] += empty * (1 - busy)

    def _busy(self) -> float:
        """Share of its time in which the trainer computed, between its newest two reports."""
        busy = self.view.total("train", "busy_s")
        watched = busy + sum(self.view.total("train", name) for name in ("starved_s", "blocked_s", "stalled_s"))
        before = self._train
        if watched > before[1]:
            self._train, self._train_busy = (busy, watched), (busy - before[0]) / (watched - before[1])
        return self._train_busy

    def settled(self, report: Settled) -> None:
        """A group ended without being trained."""
        self.waste[wasted_by(report)] += report.tokens

    def step(self, metrics: Mapping[str, float]) -> None:
        """A batch was trained."""
        self.waste["stale"] += int(metrics.get(MASKED, 0))
        self._batches += 1
        self._train_s += metrics.get("perf/train_time", 0.0)
        if self._batches >= LEAST_BATCHES and (self._last_s or 0.0) >= self._next_s:
            self._estimate()

    def take_workload(self) -> Workload | None:
        """The newest measured workload, once."""
        work, self._work = self._work, None
        return work

    def _estimate(self) -> None:
        """Simulate what the newest batches would have attained."""
        figures = self.view.extras("generate", LENGTH)
        figures |= {"tokens": self.view.total("generate", "tokens"), "working": self._slot_s["working"]}
        # A replica that was started again counts its lengths from 0.
        grown = {
            n: value - (before if (before := self._before.get(n, 0.0)) <= value else 0) for n, value in figures.items()
        }
        counts = {int(name): int(n) for name, n in grown.items() if name.isdigit() and n > 0}
        if sum(counts.values()) < LEAST_RESPONSES or min(grown["tokens"], grown["working"], self._slots) <= 0:
            return
        # A few looks at slots that are rarely in use may all find none, so the speed is that of many estimates.
        self._made = KEPT_SHARE * self._made + grown["tokens"]
        self._worked_s = KEPT_SHARE * self._worked_s + grown["working"]
        lengths = tuple(length_of(place) for place, n in sorted(counts.items()) for _ in range(n))
        rollouts = self._rollout.rollout_batch_size * self._rollout.n_samples_per_prompt
        # Seconds that full engines take for a batch, at the speed of a slot as it was.
        generate_s = rollouts * sum(lengths) / len(lengths) / (self._made / self._worked_s) / self._slots
        work = Workload(
            lengths=lengths,
            slots=self._slots,
            groups=self._rollout.rollout_batch_size,
            members=self._rollout.n_samples_per_prompt,
            train_ratio=self._train_s / self._batches / generate_s,
            interval=self._asynchrony.update_weights_interval,
            masked=self._asynchrony.async_unused_samples_handler == "train_masked",
            cancels=self._asynchrony.cancel_stale_rollouts,
        )
        self._work, self._before, self._batches, self._train_s = work, figures, 0, 0.0
        self._next_s = (self._last_s or 0.0) + LEAST_S
        ahead = max((self.view.run.staleness_bound or 0) - self._asynchrony.update_weights_interval + 1, 0)
        self._attainable = attainable(work, ahead).goodput

    def figures(self) -> GoodputFigures:
        """The shares so far."""
        whole, waste = sum(self._slot_s.values()), {cause: n for cause, n in self.waste.items() if n}
        recomputed = int(self.view.extra("generate", "recomputed_tokens"))
        if whole <= 0:
            return GoodputFigures(waste=waste, recomputed_tokens=recomputed)
        trained = self.view.run.trained_tokens
        made, working = max(trained + sum(waste.values()), 1), self._slot_s["working"] / whole
        lost = {name: seconds / whole for name, seconds in self._slot_s.items() if name != "working" and seconds > 0}
        lost |= {cause: working * n / made for cause, n in waste.items()}
        return GoodputFigures(working * trained / made, self._attainable, lost, waste, recomputed)

    def metrics(self) -> dict[str, float]:
        """The same under the names of docs/metrics.md."""
        found = self.figures()
        shares = {"goodput/share": found.goodput, "goodput/attainable": found.attainable}
        known = {name: value for name, value in shares.items() if value is not None}
        lost = {f"goodput/lost_{cause}": share for cause, share in found.lost.items()}
        waste = {f"waste/{cause}": float(n) for cause, n in found.waste.items()}
        return known | lost | waste | {"waste/recomputed_prefill": float(found.recomputed_tokens)}


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
        self._ended = self._aborted = 0
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
        self._aborted += report.outcome in ("stale", "discarded")
        if report.reward is not None:
            if not report.detail.endswith(EARLY):
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
            "rollout/aborted_ratio": self._aborted / (n + self._ended),
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
