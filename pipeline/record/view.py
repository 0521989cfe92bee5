"""The run as the controller sees it: takes reports, ledger counts and steps, gives snapshots with rates.

Invariants:
- reports are cumulative, so a lost or repeated one changes no total; a report older than the newest is ignored;
- a counter that falls means that the replica was restarted: its earlier work stays in the totals;
- nothing here reads a clock: times come with the calls, so a snapshot is a function of its inputs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pipeline.facts.stats import COUNTERS, EngineRow, Ring, RunSnapshot, StageRow, StageStats
from stages.topic_values import ASKED, FAILED, IDLE

ENGINE_BUSY = "engine_busy_s"  # busy seconds of all engines, as the engines stage reports them


@dataclass
class _Replica:
    """One replica's counters, monotone across restarts."""

    newest: StageStats
    # Unix time at which its training phase began, with the busy seconds of replica and engines until then.
    first_s: float
    ring: Ring
    first_busy_s: float = 0.0
    first_engine_s: float = 0.0
    base: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    restarts: int = 0

    def total(self) -> dict[str, float]:
        return {name: self.base[name] + getattr(self.newest, name) for name in COUNTERS}

    def feed(self, stats: StageStats) -> None:
        if stats.unix_s < self.newest.unix_s:
            return
        if any(getattr(stats, name) < getattr(self.newest, name) for name in COUNTERS):
            self.base = self.total()
            self.restarts += 1
        self.newest = stats
        self.ring.add(stats.unix_s, self.total())

    def rates(self) -> dict[str, float]:
        """Change per second over the window."""
        seconds, grown = self.ring.change()
        return {name: grown[name] / seconds if seconds > 0 else 0.0 for name in COUNTERS}


class RunView:
    """Collects what the controller learns and makes snapshots.

    Args:
        run: all that a snapshot shows, but for what `snapshot` computes; at first what is known of a run that begins.
        started_s: when the training phase began, unix time.
        stages: the stages in the order of the table; others are appended as they report.
        window_s: length of the window of rates, seconds.
    """

    def __init__(self, run: RunSnapshot, started_s: float, stages: Iterable[str] = (), window_s: float = 15.0) -> None:
        self.run = run
        self._started_s, self._window_s = started_s, window_s
        self._order = list(stages)
        self._replicas: dict[tuple[str, str], _Replica] = {}
        self._retired: set[tuple[str, str]] = set()
        self.queues: dict[str, int] = {}  # messages waiting in front of a stage
        self._restarts = Counter[str]()
        self._steps = Ring(0.0, step=20)
        self.waste = Counter[str]()  # tokens that were generated and not trained, by cause
        self._rewards: deque[float] = deque(maxlen=20)
        self._up: frozenset[str] = frozenset()
        self._engines: dict[str, tuple[int, float] | None] = {}
        self.engines_left: set[str] = set()  # scaled away
        self.most_engines = 0  # at once
        self.staleness = Counter[int]()  # trained tokens by staleness, all steps

    def stage(self, stats: StageStats) -> None:
        """Take a replica's report."""
        key = (stats.stage, stats.replica)
        if stats.stage not in self._order:
            self._order.append(stats.stage)
        self._retired.discard(key)
        replica = self._replicas.get(key)
        if replica is None:
            # Since the replica's start: the sum of its four accounts.
            watched_s = stats.busy_s + stats.starved_s + stats.blocked_s + stats.stalled_s
            replica = self._replicas[key] = _Replica(stats, stats.unix_s - watched_s, Ring(self._window_s))
        replica.feed(stats)

    def newest(self) -> list[StageStats]:
        """The newest report of each replica that stays."""
        return [replica.newest for key, replica in self._replicas.items() if key not in self._retired]

    def begin(self) -> None:
        """The trainer has its weights: earlier work does not count for the training phase."""
        for replica in self._replicas.values():
            replica.first_s, replica.first_busy_s = replica.newest.unix_s, replica.total()["busy_s"]
            replica.first_engine_s = replica.newest.extra.get(ENGINE_BUSY, 0.0)

    def retire(self, stage: str, replica: str) -> None:
        """A replica was scaled away: its work still counts; its rates and its row do not."""
        self._retired.add((stage, replica))

    def restarted(self, stage: str) -> None:
        """The supervisor restarted a replica of the stage."""
        self._restarts[stage] += 1

    def engines(self, reports: Mapping[str, tuple[int, float] | None]) -> None:
        """The engines that have an address: (version, seconds of the newest update), None before the first.

        An engine of an earlier report that is missing here is lost, unless it was scaled away (`engines_left`).
        """
        known = {**dict.fromkeys(self._engines), **reports}
        self._engines = {name: report for name, report in known.items() if name not in self.engines_left}
        self._up = frozenset(reports)
        self.most_engines = max(self.most_engines, len(self._engines))

    def step(
        self, step: int, *, at_s: float, metrics: Mapping[str, float], tokens: int, staleness: Mapping[int, int]
    ) -> None:
        """A rollout batch was trained: `tokens` of it, `staleness` their histogram."""
        self.run.step, self.run.loss = step, metrics.get("train/loss")
        self.run.trained_tokens += tokens
        self._steps.add(at_s, {"step": step, "tokens": self.run.trained_tokens})
        reward = metrics.get("reward/mean")
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
        self.staleness.update(staleness)

    def evaluated(self, dataset: str, version: int, value: float) -> None:
        """An evaluation ended."""
        self.run.evals[dataset] = (version, value)

    def busy_shares(self, engines: int) -> dict[str, float]:
        """Busy share of each stage since `begin`, by the clock of its own reports, so no share is above 1.

        A generate replica only waits: the account of its `engines` replaces its own where they report.
        """
        busy: dict[str, float] = {}
        seconds: dict[str, float] = {}
        for (stage, _), replica in self._replicas.items():
            length = replica.newest.unix_s - replica.first_s
            busy[stage] = busy.get(stage, 0.0) + replica.total()["busy_s"] - replica.first_busy_s
            seconds[stage] = seconds.get(stage, 0.0) + length
            generating = replica.newest.extra.get(ENGINE_BUSY, 0.0)
            if engines and generating > 0:
                busy["generate"] = generating - replica.first_engine_s
                seconds["generate"] = length * engines
        return {stage: busy[stage] / seconds[stage] for stage in busy if seconds[stage] > 0}

    def pending_s(self) -> dict[str, float]:
        """Engine -> seconds since the start of its oldest pending request."""
        oldest: dict[str, float] = {}
        for key, replica in self._replicas.items():
            for name, seconds in replica.newest.extra.items():
                if name.endswith(ASKED) and key not in self._retired:
                    engine = name.removesuffix(ASKED)
                    oldest[engine] = max(seconds, oldest.get(engine, 0.0))
        return oldest

    def _of(self, stage: str) -> list[_Replica]:
        """All past and present replicas of the stage."""
        return [replica for key, replica in self._replicas.items() if key[0] == stage]

    def extra(self, stage: str, name: str) -> float:
        """Sum of the newest value of a figure over the stage's replicas; 0 if none reports it."""
        return sum(replica.newest.extra.get(name, 0.0) for replica in self._of(stage))

    def extras(self, stage: str, prefix: str) -> dict[str, float]:
        """The figures whose names begin with `prefix`, without it, each as `extra`."""
        names = {name for replica in self._of(stage) for name in replica.newest.extra if name.startswith(prefix)}
        return {name.removeprefix(prefix): self.extra(stage, name) for name in names}

    def total(self, stage: str, name: str) -> float:
        """A counter, summed over all past and present replicas of the stage."""
        return sum(replica.total()[name] for replica in self._of(stage))

    def in_flight(self, stage: str) -> int:
        """Messages that the replicas of a stage work on."""
        return sum(stats.in_flight for stats in self.newest() if stats.stage == stage)

    def alive(self) -> frozenset[tuple[str, str]]:
        """(stage, replica) of the replicas that report and were not scaled away."""
        return frozenset(self._replicas.keys() - self._retired)

    def snapshot(self, now_s: float) -> RunSnapshot:
        """The run at `now_s`."""
        total = sum(self.staleness.values())
        weighted = sum(lag * count for lag, count in self.staleness.items())
        wasted = sum(self.waste.values())
        generated = self.run.trained_tokens + wasted
        seconds, grown = self._steps.change()
        tokens = grown.get("tokens", 0.0)
        rows = tuple(self._row(stage) for stage in self._order)
        busiest = max(((row.stage, row.busy) for row in rows if row.replicas), key=lambda pair: pair[1], default=None)
        return replace(
            self.run,
            elapsed_s=now_s - self._started_s,
            eta_s=self._eta_s(now_s, seconds, grown.get("step", 0.0)),
            stages=rows,
            reward_mean=self._rewards[-1] if self._rewards else None,
            reward_recent=sum(self._rewards) / len(self._rewards) if self._rewards else None,
            evals=dict(self.run.evals),
            staleness_mean=weighted / total if total else None,
            staleness_max=max((lag for lag, count in self.staleness.items() if count), default=None),
            trained_tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
            wasted_tokens=wasted,
            wasted_share=wasted / generated if generated else 0.0,
            failed_rollouts={reason: int(n) for reason, n in self.extras("group", FAILED).items()},
            busiest=busiest,
            engines=self.engine_rows(),
        )

    def engine_rows(self) -> tuple[EngineRow, ...]:
        """The engines that generate, lost ones among them, in the order of their numbers."""
        idle: dict[str, float] = {}
        for replica in self._of("engines"):
            idle |= {n.removesuffix(IDLE): v for n, v in replica.newest.extra.items() if n.endswith(IDLE)}
        rows = []
        for name, report in sorted(self._engines.items(), key=lambda item: (len(item[0]), item[0])):
            up, (version, update_s) = name in self._up, report if report is not None else (None, None)
            rows.append(EngineRow(name, up, version, idle.get(name) if up else None, update_s))
        return tuple(rows)

    def _row(self, stage: str) -> StageRow:
        alive = [r for key, r in self._replicas.items() if key[0] == stage and key not in self._retired]
        everyone = self._of(stage)
        rates = [replica.rates() for replica in alive]

        total = {name: sum(rate[name] for rate in rates) for name in COUNTERS}
        share = {name: min(1.0, rate / len(alive)) if alive else 0.0 for name, rate in total.items()}
        queue = self.queues.get(stage, int(sum(r.newest.extra.get("queue_depth", 0.0) for r in alive)))
        return StageRow(
            stage=stage,
            replicas=len(alive),
            busy=share["busy_s"],
            starved=share["starved_s"],
            blocked=share["blocked_s"],
            stalled=share["stalled_s"],
            queue_depth=queue,
            in_flight=sum(replica.newest.in_flight for replica in alive),
            items_per_s=total["items_out"],
            tokens_per_s=total["tokens"],
            items_out=int(sum(replica.total()["items_out"] for replica in everyone)),
            failures=int(sum(replica.total()["failures"] for replica in everyone)),
            restarts=max(self._restarts[stage], sum(replica.restarts for replica in everyone)),
        )

    def stage_metrics(self) -> dict[str, float]:
        """The shares of the table, of stages that were seen long enough, under the names of docs/metrics.md."""
        found: dict[str, float] = {}
        for stage in self._order:
            row = self._row(stage)
            if row.busy + row.starved + row.blocked + row.stalled > 0:
                found |= {f"stage/{stage}/busy": row.busy, f"stage/{stage}/starved": row.starved}
                found |= {f"stage/{stage}/blocked": row.blocked, f"stage/{stage}/stalled": row.stalled}
        return found

    def _eta_s(self, now_s: float, seconds: float, steps: float) -> float | None:
        """Remaining steps at the pace of the last `steps`, which took so many seconds; counts down between steps."""
        if self.run.total_steps is None or self._steps.newest is None or not steps:
            return None
        at_s, counters = self._steps.newest
        return max(0.0, (self.run.total_steps - counters["step"]) * seconds / steps - (now_s - at_s))
