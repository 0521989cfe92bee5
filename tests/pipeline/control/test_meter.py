"""A window is what was seen between two batches, and of one run alone."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from configs.graph import loops
from configs.load import load
from pipeline.control.autoscale import LEAST_BATCHES, Meter
from pipeline.facts.stats import CPU, Changed, StageStats
from pipeline.graph import build
from pipeline.observe.view import RunView
from stages.prompts.ledger import Ledger
from stages.staleness_gate import StalenessGate
from stages.topic_values import EngineAddress, EngineEntry

ENGINE = {
    "engine/engine-0": msgspec.msgpack.encode(EngineAddress("engine-0", "http://a", 1)),
    "directory/engine-0": msgspec.msgpack.encode(
        EngineEntry("engine-0", "http://a", 1, state="serving", run_generation=0, version=1, limit=64)
    ),
}


class Run:
    """A made-up run: a batch of 2 groups of 4 rollouts each 2 seconds; reward has one of 4 messages in work."""

    def __init__(self) -> None:
        arguments = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--autoscale-window-s", "4"]
        config = load(arguments).config
        self.now, self.ended, self.waiting = 0.0, set[str](), 0.0
        self.view = RunView(mode="async", total_steps=None, staleness_bound=1, started_s=0.0)
        self.recorder = SimpleNamespace(
            view=self.view, changes=[], restarts={}, training_started=0.0, last_step_s=0.0, ledger=Ledger()
        )
        self.stage = SimpleNamespace(ledger=Ledger(), gate=StalenessGate(2, 1), steps=0, draining=None, paused=False)
        graph = build(config)
        self.queues = {stream.name: SimpleNamespace(queued=0, leased=0) for stream in graph.streams}
        hubs = {name: SimpleNamespace(stats=lambda one=one: one) for name, one in self.queues.items()}
        topic = SimpleNamespace(items=lambda prefix: {k: v for k, v in ENGINE.items() if k.startswith(prefix)})
        assert not loops(config)
        runner = SimpleNamespace(
            replicas=lambda name: [] if name in self.ended else [f"{name}-0"],
            refusal=lambda name, count: f"no {count} of group" if name == "group" else None,
        )
        parts = SimpleNamespace(
            config=config, graph=graph, stage=self.stage, recorder=self.recorder, hubs=hubs, topic=topic, runner=runner
        )
        self.meter = Meter(parts, lambda: self.now)  # type: ignore[arg-type]

    def batch(self) -> None:
        """Two seconds in which two groups are trained, each of which came as four messages."""
        ledger, reward = self.stage.ledger, self.queues["reward"]
        groups = [ledger.admit(position=self.stage.steps * 2 + i).group_id for i in range(2)]
        reward.queued, reward.leased = 1, 3
        for _ in range(4):
            self.now += 0.5
            self.report()
            self.meter.look()
        for group in groups:
            ledger.settle(group, "trained", 0)
        self.stage.steps += 1
        self.recorder.last_step_s = self.now

    def report(self) -> None:
        engines = {"engine-0/running": 6.0, "engine-0/waiting": self.waiting, "engine-0/idle": 0.25}
        told = {"reward": (0.9, {CPU: 0.5 * self.now}), "train": (0.4, {}), "engines": (0.0, engines)}
        for name, (busy, extra) in told.items():
            self.view.stage(
                StageStats(
                    stage=name, replica=f"{name}-0", unix_s=self.now, busy_s=busy * self.now,
                    starved_s=(1 - busy) * self.now, items_in=int(4 * self.now), in_flight=1, extra=extra,
                )
            )  # fmt: skip
        self.view.engines({"engine-0": (1, 0.1)})


def test_a_window_has_the_rates_and_shares_of_its_batches() -> None:
    run = Run()
    while run.meter.window() is None:
        run.batch()
        assert run.stage.steps < 20
    assert run.stage.steps == 2 + run.stage.gate.max_staleness + LEAST_BATCHES, "behind what was in flight before"
    window = run.meter.window()
    assert window is not None
    assert (window.batches, window.step) == (LEAST_BATCHES, run.stage.steps - 1)
    assert window.rate == pytest.approx(2 * 4 / 2)
    assert window.train == pytest.approx(0.4)
    assert window.open == pytest.approx(2 * 4)
    stages = {stage.name: stage for stage in window.stages}
    reward, engine = stages["reward"], stages["engine"]
    assert (reward.busy, reward.starved, reward.queued) == (pytest.approx(0.9), pytest.approx(0.1), 1.0)
    assert (reward.here, reward.waiting) == (pytest.approx(4), pytest.approx(3)), "a message is a rollout here"
    assert reward.cores == pytest.approx(0.5)
    assert (engine.busy, engine.here, engine.waiting, engine.queued) == (pytest.approx(0.75), pytest.approx(6), 0, 0)
    assert engine.cores == pytest.approx(0.75), "the embedded engine computes here"
    assert (stages["generate"].here, stages["group"].fixed) == (0, "no 2 of group")
    assert "train" not in stages


@pytest.mark.parametrize(("waiting", "engine", "generate"), [(0.0, (6, 0, 0), (12, 12)), (2.0, (20, 14, 1), (0, 0))])
def test_prompts_that_wait_for_full_engines_are_theirs(
    waiting: float, engine: tuple[float, ...], generate: tuple[float, ...]
) -> None:
    run = Run()
    run.waiting = waiting
    run.queues["generate"].queued = 3  # prompts of 4 rollouts each
    while (window := run.meter.window()) is None:
        run.batch()
        assert run.stage.steps < 20
    stages = {stage.name: stage for stage in window.stages}
    seen = stages["engine"]
    assert (seen.here, seen.waiting, seen.queued) == pytest.approx(engine), (
        "6 run, and those wait that it has no slot for"
    )
    assert (stages["generate"].here, stages["generate"].waiting) == pytest.approx(generate)


@pytest.mark.parametrize("what", ["change", "restart", "replica", "pause"])
def test_two_different_runs_are_not_averaged(what: str) -> None:
    run = Run()
    for _ in range(9):
        run.batch()
    assert run.meter.window() is not None
    if what == "change":
        run.recorder.changes.append(Changed(9, "scale reward", "2"))
    elif what == "restart":
        run.recorder.restarts["reward-0"] = 1
    elif what == "replica":
        run.view.stage(StageStats(stage="reward", replica="reward-1", unix_s=run.now))
    else:
        run.stage.paused = True
    run.meter.look()
    assert run.meter.window() is None
    assert run.meter.steady == (what != "pause")


def test_nothing_is_said_of_a_run_whose_stages_have_begun_to_end() -> None:
    run = Run()
    for _ in range(9):
        run.batch()
    run.ended.add("generate")
    assert run.meter.window() is None


def test_the_end_of_a_run_is_another_run_than_its_middle() -> None:
    """When all groups that it will train are trained or in flight, no prompts enter any more."""
    run = Run()
    run.stage.gate = StalenessGate(2, 1, total=12)
    for _ in range(10):
        run.batch()
    assert run.meter.steady, "20 of 24 are trained"
    for position in range(20, 23):
        run.stage.ledger.admit(position=position)
    assert run.meter.steady, "one more is to enter"
    run.stage.ledger.admit(position=23)
    assert not run.meter.steady
