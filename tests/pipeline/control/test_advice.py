"""What is advised: the bottleneck of pipelines whose bottleneck is known, within every limit, and nothing for noise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from synthetic_pipeline import SyntheticPipeline

from pipeline.control.advice import FULL, LEAST_GAIN, STARVED, WAITS_CORES, Advice, StageLoad, Window, advise

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
        assert advice.gain is not None
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
    assert advice is not None
    if slow == "train":
        assert advice.kind in ("train", "down")
        return
    if advice.kind == "up":
        assert advice.stage == slow
        before = pipeline.rate()
        pipeline.replicas[slow] = advice.to
        assert advice.gain is not None
        assert pipeline.rate() <= before * (1 + advice.gain) * 1.001, "no more than was said"
    else:  # the trainer is nearly as slow
        assert pipeline.rate() * pipeline.train > 1 / (1 + LEAST_GAIN) - 1e-6


def test_no_more_is_promised_than_the_trainer_has_time_for() -> None:
    pipeline = SyntheticPipeline({"engine": 0.1, "reward": 1.0}, {"engine": 1, "reward": 1}, 0.8)
    assert said(pipeline) == (
        "reward is the bottleneck; reward 1 -> 2 would make about 1.25 rollouts/s of 1 (+25%), then train is next"
    )


def test_what_is_said() -> None:
    pipeline = SyntheticPipeline({"engine": 0.1, "reward": 1.0}, {"engine": 1, "reward": 1}, 0.05)
    assert said(pipeline) == (
        "reward is the bottleneck; reward 1 -> 2 would make about 2 rollouts/s of 1 (+100%), then engine is next"
    )
    trained = SyntheticPipeline({"engine": 0.1, "reward": 0.1}, {"engine": 1, "reward": 4}, 1.0)
    assert said(trained) == (
        "train is the bottleneck: it computes 100% of the time, so that nothing to scale would add more than 0%; "
        "reward is oversized: its 4 are busy 2% of the time, 2 would do"
    )
    idle = SyntheticPipeline({"reward": 0.1}, {"reward": 1, "engine": 1}, 0.05, delays={"engine": 1000.0})
    assert said(idle).startswith("engines hold 100% of the rollouts in flight, though not always with a queue; engine")


def said(pipeline: SyntheticPipeline) -> str:
    advice = advise(pipeline.window())
    assert advice is not None
    return advice.sentence


SLOW = SyntheticPipeline({"engine": 0.1, "reward": 1.0}, {"engine": 1, "reward": 2}, 0.05)


def slow_reward(**changed: float | str) -> Window:
    window = SLOW.window()
    stages = tuple(replace(stage, **changed) if stage.name == "reward" else stage for stage in window.stages)
    return replace(window, stages=stages, free_cores=0.5)


def held(window: Window, limits: dict[str, tuple[int, int]] | None = None) -> Advice:
    advice = advise(window, limits)
    assert advice is not None
    assert advice.kind == "held", advice
    assert advice.to == 0
    return advice


def test_replicas_that_compute_are_not_added_without_a_core_for_them() -> None:
    assert "one replica uses 0.9 of a core and 0.5 are free" in held(slow_reward(cores=0.9)).sentence
    some, many = advise(slow_reward(cores=0.4)), advise(slow_reward(cores=0.05))
    assert some is not None
    assert (some.kind, some.to) == ("up", 3), "a core for one of them"
    assert many is not None
    assert (many.kind, many.to) == ("up", 4), "it waits, and shares nothing"
    full = replace(slow_reward(cores=0.2), free_cores=0.05)
    assert "more would only share them" in held(full).sentence, "others leave it that little"


def test_why_the_bottleneck_stays() -> None:
    assert "no GPU" in held(slow_reward(fixed="there is no GPU for another engine")).sentence
    assert "--autoscale stops at 2" in held(slow_reward(), {"reward": (1, 2), "engine": (1, 9)}).sentence
    assert "python launch.py scale RUN reward=4" in held(slow_reward(), {"engine": (1, 9)}).sentence


def test_a_stage_that_holds_much_without_a_queue_is_only_tried() -> None:
    pipeline = SyntheticPipeline(
        {"reward": 0.01}, {"reward": 1, "engine": 1}, 0.001, in_flight=100.0, delays={"engine": 5.0}
    )
    advice = advise(pipeline.window())
    assert advice is not None
    assert (advice.kind, advice.stage, advice.tried) == ("up", "engine", True)
    assert "only a trial can tell" in advice.sentence


@pytest.mark.parametrize("change", [{"rate": 0.0}, {"open": 0.0}])
def test_nothing_is_said_of_a_run_that_trains_nothing(change: dict[str, float]) -> None:
    assert advise(replace(SLOW.window(), **change)) is None
