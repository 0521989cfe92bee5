"""What became of the engines' slot time: accounts of a made-up run, second by second; whole runs with responses that
live for many batches, whose stale tokens are masked, and whose N follows the lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import NO_DATA, SIMULATED, made_model, succeed_here

from configs.plan.goodput import attainable
from pipeline.facts.stats import RunSnapshot, StageStats
from pipeline.record.goodput import Goodput, wasted_by
from pipeline.record.metrics import read_metrics
from pipeline.record.view import RunView
from stages.messages import Settled
from stages.topic_values import EngineEntry, length_of, length_place
from tests.stages.stage_rig import make_config

ROLLOUT = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "server_concurrency": 16}
CONFIG = make_config(rollout=ROLLOUT, asynchrony={"max_staleness": 2})


class Run:
    """One engine of 16 slots and a trainer, of which every second is reported."""

    def __init__(self) -> None:
        self.view = RunView(RunSnapshot("async", staleness_bound=2), 0.0)
        self.goodput = Goodput(CONFIG, self.view)
        self.now = self.busy = self.starved = 0.0
        self.version = 0
        self.seconds(1, running=0)
        for name in self.goodput._slot_s:
            self.goodput._slot_s[name] = 0.0  # until here the engine was not seen

    def seconds(self, n: int, *, running: int, capacity: int = 0, trains: bool = False, stall_s: float = 0.0) -> None:
        for _ in range(n):
            self.now += 1
            self.busy, self.starved = self.busy + trains, self.starved + (not trains)
            self.report("train", busy_s=self.busy, starved_s=self.starved)
            self.report("engines", extra={"engine-0/running": float(running)})
            entry = EngineEntry(engine="engine-0", url="", incarnation=1, version=self.version, stall_s=stall_s)
            self.goodput.look(self.now, {"engine-0": entry}, capacity)

    def report(self, stage: str, **fields: Any) -> None:
        self.view.stage(StageStats(stage, f"{stage}-0", self.now, **fields))

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.goodput.step({"perf/train_time": 20.0})

    def lost(self) -> dict[str, float]:
        return {name: round(share, 6) for name, share in self.goodput.figures().lost.items()}


def test_empty_slots_are_counted_by_what_they_wait_for() -> None:
    run = Run()
    run.view.run.trained_tokens = 100
    run.seconds(4, running=16)
    assert run.goodput.figures().goodput == 1.0
    run.seconds(2, running=8, trains=True)  # the gate is closed, and the trainer computes
    run.seconds(2, running=8)  # it waits
    run.seconds(2, running=0, capacity=3)  # the gate is open
    assert run.lost() == {"trainer": 0.1, "tail": 0.1, "starved": 0.2}
    assert run.goodput.figures().goodput == pytest.approx(0.6)


def test_slots_are_starved_where_all_rollouts_wait_for_other_stages_behind_a_closed_gate() -> None:
    run = Run()
    run.seconds(6, running=16)
    run.seconds(3, running=0)  # all that was admitted is with a slow grader
    run.seconds(1, running=4)  # one long response
    assert run.lost() == {"starved": 0.3, "tail": 0.075}


def test_a_weight_update_takes_its_time_from_what_runs() -> None:
    run = Run()
    run.view.run.trained_tokens = 100
    run.seconds(9, running=16)
    run.version = 2
    run.seconds(1, running=16, stall_s=0.5)  # two versions in this second
    assert run.lost() == {"update": 0.1}
    assert run.goodput.figures().goodput == pytest.approx(0.9)


def test_work_that_is_not_trained_is_lost_by_its_cause() -> None:
    run = Run()
    run.view.run.trained_tokens = 500
    run.seconds(10, running=8)
    run.goodput.settled(Settled(1, "stale", tokens=200))
    run.goodput.settled(Settled(2, "filtered", "zero_std_1.0", tokens=100))
    run.goodput.settled(Settled(3, "filtered", "too_long", tokens=50))
    run.goodput.settled(Settled(4, "discarded", "over-sampled: oldest token has version 1", tokens=50))
    run.goodput.step({"rollout/masked_stale_tokens": 100.0})
    found = run.goodput.figures()
    assert found.waste == {"stale": 300, "no_variance": 100, "filtered": 50, "over_sampled": 50}
    assert found.goodput == pytest.approx(0.5 * 500 / 1000)
    assert sum(found.lost.values()) + (found.goodput or 0.0) == pytest.approx(1.0)
    metrics = run.goodput.metrics()
    assert (metrics["waste/stale"], metrics["goodput/lost_stale"]) == (300.0, pytest.approx(0.15))
    assert wasted_by(Settled(5, "failed", "x")) == "failed"


def test_what_is_attainable_follows_measured_lengths_and_times() -> None:
    run = Run()
    counts: dict[str, float] = {}
    for length, n in ((100, 90), (1600, 10)):
        counts[f"length/{length_place(length)}"] = float(n)
    run.seconds(250, running=16)
    run.report("generate", tokens=100 * 90 + 1600 * 10, extra=counts)
    assert run.goodput.take_workload() is None
    run.steps(4)
    work = run.goodput.take_workload()
    assert run.goodput.take_workload() is None, "each workload once"
    assert sorted(set(work.lengths)) == [length_of(length_place(100)), length_of(length_place(1600))]
    assert (work.slots, work.groups, work.members) == (16, 4, 4)
    # 25,000 tokens in 250 s of 16 slots: a batch of 16 rollouts of 250 tokens takes 40 s, and training half as long.
    assert work.train_ratio == pytest.approx(0.5, rel=0.1)
    assert run.goodput.figures().attainable == attainable(work, 2).goodput
    run.steps(4)  # nothing new was generated
    assert run.goodput.take_workload() is None
    run.report("generate", tokens=100_000, extra={name: 2 * n for name, n in counts.items()})
    run.seconds(1, running=16)
    run.goodput.look(run.now + 1, {}, 0)  # no engine has weights
    run.steps(1)
    assert run.goodput.take_workload() is None


def test_looks_that_miss_what_runs_do_not_make_the_engines_faster() -> None:
    ratios = []
    run = Run()
    for number, looks in ((1, 100), (2, 1)):  # as much was made in both times
        run.seconds(5, running=0)  # estimates are made so far apart
        run.seconds(looks, running=16)
        run.report("generate", tokens=number * 10_000, extra={f"length/{length_place(100)}": number * 100.0})
        run.steps(4)
        work = run.goodput.take_workload()
        assert work is not None
        ratios.append(work.train_ratio)
    assert ratios[0] < ratios[1] < 3 * ratios[0]


def test_what_is_attainable_is_estimated_at_most_each_five_seconds() -> None:
    run = Run()
    made = []
    for second in range(1, 13):
        run.seconds(1, running=16)
        run.report("generate", tokens=second * 10_000, extra={f"length/{length_place(100)}": second * 100.0})
        run.steps(4)
        made += [second] if run.goodput.take_workload() else []
    assert made == [1, 6, 11]


def test_lengths_are_kept_within_a_tenth() -> None:
    for length in (1, 2, 3, 10, 100, 999, 32_000):
        assert length_of(length_place(length)) == pytest.approx(length, rel=0.1, abs=0.5)


def test_lengths_are_measured_on_after_the_replica_was_started_again() -> None:
    run = Run()
    run.seconds(100, running=16)
    run.report("generate", tokens=500_000, extra={f"length/{length_place(100)}": 5000.0})
    run.steps(4)
    assert run.goodput.take_workload() is not None
    run.seconds(100, running=16)
    counts = {f"length/{length_place(200)}": 60.0, f"length/{length_place(100)}": 80.0}
    run.report("generate", tokens=20_000, extra=counts)
    run.steps(4)
    work = run.goodput.take_workload()
    assert len(work.lengths) == 140


# 16 slots for batches of 16 rollouts; the longest response lives for eight batches.
LONG_TAIL = [
    *NO_DATA, *made_model(), "--prompt-data", "arithmetic", *SIMULATED, "--rollout-max-response-len", "800",
    "--rollout-max-context-len", "1000", "--engine-slots", "16", "--server-concurrency", "16",
    "engine.simulated.length_mean=100", "engine.simulated.length_cap=800", "engine.simulated.time_scale=0.3",
    "--simulated-step-s", "0.2",
]  # fmt: skip


@pytest.mark.slow
def test_stale_tokens_are_masked_and_their_groups_are_trained(tmp_path: Path) -> None:
    masked = succeed_here(
        tmp_path / "masked", *LONG_TAIL, "--num-rollout", "16", "--async-unused-samples-handler", "train_masked"
    )
    rows = read_metrics(masked.run_dir / "metrics.jsonl")
    tokens = sum(row.get("rollout/masked_stale_tokens", 0.0) for row in rows)
    summary = masked.summary
    assert tokens > 0
    assert summary["goodput"]["waste"]["stale"] >= tokens
    assert summary["staleness"]["max"] <= 2 == summary["staleness"]["bound"]
    assert summary["groups"]["trained"] == 16 * 4
    dropped = succeed_here(tmp_path / "dropped", *LONG_TAIL, "--num-rollout", "16")
    assert dropped.summary["groups"]["stale"] > summary["groups"]["stale"], "the longest groups are not lost any more"
    assert summary["goodput"]["lost"]["tail"] > 0
    assert "goodput" in masked.out


@pytest.mark.slow
def test_auto_follows_the_measured_lengths_and_a_resume_begins_where_it_was(tmp_path: Path) -> None:
    # Engines so slow that a busy machine does not make the trainer the slower side: then a smaller N would be right.
    flags = [*LONG_TAIL, "engine.simulated.time_scale=0.5", "--simulated-step-s", "0.1"]
    flags += ["--async-buffer-size", "auto", "--max-staleness", "1", "--save-interval", "24"]
    run = succeed_here(tmp_path / "run", *flags, "--num-rollout", "24")
    changes = run.summary["changes"]
    assert changes[0]["what"] == "auto max_staleness"
    chosen = int(changes[-1]["value"].split()[0])
    assert 4 <= chosen <= 8
    assert "--async-buffer-size auto: N 1 to " in run.out
    rows = [row for row in read_metrics(run.run_dir / "metrics.jsonl") if "goodput/share" in row]
    assert rows[-1]["staleness/max"] <= 8
    assert max(row["staleness/max"] for row in rows) > 1, "the new bound is used"
    resumed = succeed_here(run.run_dir, "--resume", str(run.run_dir), "--num-rollout", "26")
    held = json.loads((run.run_dir / "config.json").read_text())["asynchrony"]
    assert held["async_buffer_size"] == "auto"
    assert held["max_staleness"] >= 4
    assert resumed.summary["steps"] == 26
