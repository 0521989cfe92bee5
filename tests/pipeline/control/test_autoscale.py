"""Advice and `--autoscale` on pipelines whose bottleneck is known, and the windows from which both decide.

Advice stays within every limit; autoscaling comes near the best split, ends, and yields to the user; a window is of one
run alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from configs.graph import loops
from configs.load import load
from pipeline.control.advice import FULL, LEAST_GAIN, STARVED, WAITS_CORES, Advice, StageLoad, Window, advise
from pipeline.control.autoscale import LEAST_BATCHES, Autoscale, Meter
from pipeline.facts.stats import CPU, Changed, RunSnapshot, StageStats
from pipeline.graph import build
from pipeline.record.view import RunView
from stages.prompts.ledger import Ledger
from stages.staleness_gate import StalenessGate
from stages.topic_values import EngineAddress, EngineEntry

# A closed loop of stages with known speeds, as the meter would see it: what an advisor has to find out.


@dataclass
class SyntheticPipeline:
    """`demand`: seconds of a replica for one rollout, by stage; `train`: of the trainer; `delays`: seconds that a
    rollout spends in a stage however many replicas it has."""

    demand: Mapping[str, float]
    replicas: dict[str, int]
    train: float
    in_flight: float = 500.0
    delays: Mapping[str, float] = field(default_factory=dict)
    step: int = 0

    def capacity(self, stage: str) -> float:
        return self.replicas[stage] / self.demand[stage]

    def rate(self) -> float:
        most = min([1 / self.train, *map(self.capacity, self.demand)])
        delay = sum(self.delays.values())
        return min(most, self.in_flight / delay) if delay else most

    def bottleneck(self) -> str:
        slowest = min(self.demand, key=self.capacity)
        return slowest if self.capacity(slowest) < 1 / self.train else "train"

    def window(self, noise: float = 1.0) -> Window:
        rate, slow = self.rate(), self.bottleneck()
        held = {stage: rate * demand for stage, demand in self.demand.items()}
        held |= {stage: rate * delay for stage, delay in self.delays.items()}
        saturated = rate >= 0.999 * min([1 / self.train, *map(self.capacity, self.demand)])
        stages = []
        for stage, count in self.replicas.items():
            if stage in self.delays:
                stages.append(StageLoad(name=stage, replicas=count, busy=1.0, starved=0.0, here=held[stage]))
                continue
            busy = min(1.0, rate / self.capacity(stage))
            waiting = max(0.0, self.in_flight - sum(held.values())) if stage == slow and saturated else 0.0
            stages.append(
                StageLoad(
                    name=stage, replicas=count, busy=busy, starved=1 - busy, here=held[stage] + waiting,
                    waiting=waiting, queued=float(waiting > 0),
                )
            )  # fmt: skip
        self.step += 5
        return Window(
            batches=5, step=self.step, rate=rate * noise, open=self.in_flight, train=rate * self.train,
            stages=tuple(stages),
        )  # fmt: skip


SHARE = st.floats(0.0, 1.0)
NAMES = ("generate", "reward", "engine", "tools")


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Any, whether it could be measured or not."""
    stages = [
        StageLoad(
            name=name, replicas=draw(st.integers(1, 20)), busy=draw(SHARE), starved=draw(SHARE),
            here=draw(st.floats(0, 1e4)), waiting=draw(st.floats(0, 1e4)), queued=draw(SHARE),
            cores=draw(st.floats(0, 2)), fixed=draw(st.sampled_from(["", "", "it is the only one"])),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]  # fmt: skip
    return Window(
        batches=5, step=9, rate=draw(st.floats(0, 1e4)), open=draw(st.floats(0, 1e4)),
        train=draw(SHARE), stages=tuple(stages), free_cores=draw(st.none() | st.floats(0, 64)),
    )  # fmt: skip


@st.composite
def pipelines(draw: st.DrawFn) -> SyntheticPipeline:
    demand = {name: draw(st.floats(0.01, 2.0)) for name in ("engine", "reward", "tools")}
    return SyntheticPipeline(
        demand, {name: draw(st.integers(1, 4)) for name in demand}, draw(st.floats(0.01, 2.0)), in_flight=500.0
    )


@given(windows(), st.none() | st.dictionaries(st.sampled_from(NAMES), st.tuples(st.integers(1, 9), st.integers(9, 30))))
def test_no_advice_leaves_the_limits_or_adds_to_what_waits_for_work(
    window: Window, limits: dict[str, tuple[int, int]] | None
) -> None:
    advice = advise(window, limits)
    if advice is None:
        return
    assert limits is not None or "--autoscale" not in advice.sentence
    if advice.kind not in ("up", "down"):
        return
    stage = next(stage for stage in window.stages if stage.name == advice.stage)
    assert advice.now == stage.replicas
    assert advice.to >= 1
    if limits is not None:
        assert advice.to <= limits[advice.stage][1] or advice.kind == "down"
        assert advice.to >= limits[advice.stage][0] or advice.kind == "up"
    if advice.kind == "up":
        assert stage.replicas < advice.to <= 2 * stage.replicas
        assert stage.starved < STARVED
        assert not stage.fixed
        assert advice.gain >= LEAST_GAIN * 0.999
        assert advice.gain <= 1 / max(window.train, 1e-9) - 1 + 1e-3, "the trainer has no time for more"
        if window.free_cores is not None and stage.cores >= WAITS_CORES:
            assert (advice.to - advice.now) * stage.cores <= window.free_cores + 1e-9
    else:
        assert stage.replicas / 2 <= advice.to < stage.replicas
        assert stage.queued < FULL


@given(pipelines())
def test_the_bottleneck_of_a_known_pipeline_is_found(pipeline: SyntheticPipeline) -> None:
    advice, slow = advise(pipeline.window()), pipeline.bottleneck()
    if slow == "train":
        assert advice.kind in ("train", "down")
        return
    if advice.kind == "up":
        assert advice.stage == slow
        before = pipeline.rate()
        pipeline.replicas[slow] = advice.to
        assert pipeline.rate() <= before * (1 + advice.gain) * 1.001, "no more than was said"
    else:  # the trainer is nearly as slow
        assert pipeline.rate() * pipeline.train > 1 / (1 + LEAST_GAIN) - 1e-6


def test_what_is_reported() -> None:
    one = {"engine": 1, "reward": 1}
    for demand, replicas, train, sentence in (
        ({"engine": 0.1, "reward": 1.0}, one, 0.05,
         "reward is the bottleneck; reward 1 -> 2 would make about 2 rollouts/s of 1 (+100%), then engine is next"),
        ({"engine": 0.1, "reward": 1.0}, one, 0.8,
         "reward is the bottleneck; reward 1 -> 2 would make about 1.25 rollouts/s of 1 (+25%), then train is next"),
        ({"engine": 0.1, "reward": 0.1}, {"engine": 1, "reward": 4}, 1.0,
         "train is the bottleneck: it computes 100% of the time, so that nothing to scale would add more than 0%; "
         "reward is oversized: its 4 are busy 2% of the time, 2 would do"),
    ):  # fmt: skip
        assert advise(SyntheticPipeline(demand, replicas, train).window()).sentence == sentence
    idle = SyntheticPipeline({"reward": 0.1}, one, 0.05, delays={"engine": 1000.0})
    words = "engines hold 100% of the rollouts in flight, though not always with a queue; engine"
    assert advise(idle.window()).sentence.startswith(words)


SLOW = SyntheticPipeline({"engine": 0.1, "reward": 1.0}, {"engine": 1, "reward": 2}, 0.05)


def slow_reward(**changed: float | str) -> Window:
    window = SLOW.window()
    stages = tuple(replace(stage, **changed) if stage.name == "reward" else stage for stage in window.stages)
    return replace(window, stages=stages, free_cores=0.5)


def held(window: Window, limits: dict[str, tuple[int, int]] | None = None) -> Advice:
    advice = advise(window, limits)
    assert (advice.kind, advice.to) == ("held", 0), advice
    return advice


def test_replicas_that_compute_are_not_added_without_a_core_for_them() -> None:
    assert "one replica uses 0.9 of a core and 0.5 are free" in held(slow_reward(cores=0.9)).sentence
    some, many = advise(slow_reward(cores=0.4)), advise(slow_reward(cores=0.05))
    assert (some.kind, some.to) == ("up", 3), "a core for one of them"
    assert (many.kind, many.to) == ("up", 4), "it waits, and shares nothing"
    full = replace(slow_reward(cores=0.2), free_cores=0.05)
    assert "more would only share them" in held(full).sentence, "others leave it that little"


def test_why_the_bottleneck_stays() -> None:
    assert "no GPU" in held(slow_reward(fixed="there is no GPU for another engine")).sentence
    assert "--autoscale stops at 2" in held(slow_reward(), {"reward": (1, 2), "engine": (1, 9)}).sentence
    assert "python launch.py scale RUN reward=4" in held(slow_reward(), {"engine": (1, 9)}).sentence


@pytest.mark.parametrize("change", [{"rate": 0.0}, {"open": 0.0}])
def test_nothing_is_reported_about_a_run_that_trains_nothing(change: dict[str, float]) -> None:
    assert advise(replace(SLOW.window(), **change)) is None


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
        self.view = RunView(RunSnapshot("async", staleness_bound=1), 0.0)
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
            placement=SimpleNamespace(config=config, graph=graph),
            stage=self.stage,
            recorder=self.recorder,
            hubs=hubs,
            topic=topic,
            runner=runner,
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
        reported = {"reward": (0.9, {CPU: 0.5 * self.now}), "train": (0.4, {}), "engines": (0.0, engines)}
        for name, (busy, extra) in reported.items():
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


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.recorder.changes.append(Changed(9, "scale reward", "2")),
        lambda run: run.recorder.restarts.update({"reward-0": 1}),
        lambda run: run.view.stage(StageStats(stage="reward", replica="reward-1", unix_s=run.now)),
        lambda run: setattr(run.stage, "paused", True),
    ],
    ids=["change", "restart", "replica", "pause"],
)
def test_two_different_runs_are_not_averaged(change: Callable[[Run], None]) -> None:
    run = Run()
    for _ in range(9):
        run.batch()
    assert run.meter.window() is not None
    change(run)
    run.meter.look()
    assert run.meter.window() is None
    assert run.meter.steady == (not run.stage.paused)


LIMITS = {"engine": (1, 8), "reward": (1, 8), "tools": (1, 8)}


def scale_all(pipeline: SyntheticPipeline, own: Autoscale, noise: random.Random | None, most: int = 60) -> int:
    """Let it have its way, window by window, until it is content. Returns the changes."""
    changes = calm = 0
    for _ in range(most):
        counts, why = own.decide(pipeline.window(noise.uniform(0.99, 1.01) if noise else 1.0))
        assert bool(counts) == bool(why)
        for stage, count in counts.items():
            assert LIMITS[stage][0] <= count <= LIMITS[stage][1]
        pipeline.replicas |= counts
        changes, calm = changes + bool(counts), 0 if counts else calm + 1
        if calm == 5:
            return changes
    raise AssertionError(f"it goes on changing: {pipeline.replicas}")


def best(pipeline: SyntheticPipeline) -> float:
    most = [LIMITS[stage][1] / demand for stage, demand in pipeline.demand.items()]
    return min([1 / pipeline.train, *most])


@settings(max_examples=60)
@given(st.tuples(*[st.floats(0.02, 1.0)] * 3), st.floats(0.02, 1.0), st.none() | st.integers(0, 99))
@example((1.0, 1.0, 0.02), 0.3, None)  # two equal bottlenecks
def test_it_comes_near_the_best_within_its_limits_and_ends(
    demands: tuple[float, float, float], train: float, seed: int | None
) -> None:
    demand = dict(zip(LIMITS, demands, strict=True))
    pipeline = SyntheticPipeline(demand, dict.fromkeys(LIMITS, 1), train)
    scale_all(pipeline, Autoscale(LIMITS), None if seed is None else random.Random(seed))
    assert pipeline.rate() >= 0.88 * best(pipeline), (pipeline.replicas, demand, train)


def delayed() -> SyntheticPipeline:
    """Engines hold what is in flight, and more of them change nothing."""
    return SyntheticPipeline(
        {"reward": 0.01}, {"reward": 1, "engine": 2}, 0.001, in_flight=100.0, delays={"engine": 5.0}
    )


def test_what_brings_nothing_is_taken_back_and_not_tried_again() -> None:
    pipeline = delayed()
    own = Autoscale(LIMITS)
    assert own.decide(pipeline.window())[0] == {"engine": 4}
    pipeline.replicas["engine"] = 4
    counts, why = own.decide(pipeline.window())
    assert counts == {"engine": 2}
    assert why == "taken back, for the rate changed by +0%"
    pipeline.replicas["engine"] = 2
    assert scale_all(pipeline, own, None) == 0


def test_what_brought_nothing_is_tried_again_when_the_run_has_become_faster() -> None:
    held = delayed()
    graded = SyntheticPipeline({"reward": 1.0, "engine": 0.01}, {"reward": 1, "engine": 2}, 0.001)
    own = Autoscale(LIMITS)
    assert own.decide(held.window())[0] == {"engine": 4}
    held.replicas["engine"] = 4
    assert own.decide(held.window())[0] == {"engine": 2}
    held.replicas["engine"] = 2
    assert own.decide(graded.window())[0] == {"reward": 2}, "the policy changed, and grading takes long"
    assert own.decide(held.window())[0] == {"engine": 4}


def test_replicas_that_are_not_needed_go_and_come_back_if_they_were() -> None:
    pipeline = SyntheticPipeline({"engine": 1.0, "reward": 0.1}, {"engine": 8, "reward": 8}, 0.2)
    own = Autoscale(LIMITS)
    assert own.decide(pipeline.window())[0] == {"reward": 4}
    pipeline.replicas["reward"] = 4
    lower = pipeline.window(0.8)
    assert own.decide(lower)[0] == {"reward": 8}, "the rate fell"
    pipeline.replicas["reward"] = 8
    assert "reward" not in own.decide(pipeline.window())[0]


def test_a_change_of_others_is_neither_judged_nor_taken_back_and_a_refused_one_not_requested_again() -> None:
    pipeline = SyntheticPipeline({"engine": 0.1, "reward": 1.0}, {"engine": 1, "reward": 1}, 0.05)
    users, otherwise, refused = (Autoscale(LIMITS) for _ in range(3))
    for own in (users, otherwise, refused):
        assert own.decide(pipeline.window())[0] == {"reward": 2}
    refused.refused({"reward": 2})
    assert scale_all(pipeline, refused, None) == 0
    users.users({"reward": 1})
    assert users.decide(pipeline.window(0.5)) == ({}, ""), "what the user scales is the user's: not scaled again"
    assert "reward" not in users.within(pipeline.window())
    pipeline.replicas["reward"] = 2
    otherwise.forget()
    assert otherwise.decide(pipeline.window(0.1))[0] == {"reward": 4}, "the run before is no measure for this one"
