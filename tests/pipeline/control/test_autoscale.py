"""`--autoscale` on pipelines with known speeds: it comes near the best within its limits, ends, yields to the user."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_pipeline import SyntheticPipeline

from pipeline.control.autoscale import Autoscale

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
def test_it_comes_near_the_best_within_its_limits_and_ends(
    demands: tuple[float, float, float], train: float, seed: int | None
) -> None:
    demand = dict(zip(LIMITS, demands, strict=True))
    pipeline = SyntheticPipeline(demand, dict.fromkeys(LIMITS, 1), train)
    scale_all(pipeline, Autoscale(LIMITS), None if seed is None else random.Random(seed))
    assert pipeline.rate() >= 0.88 * best(pipeline), (pipeline.replicas, demand, train)


def test_two_equal_bottlenecks_are_scaled_together() -> None:
    pipeline = SyntheticPipeline({"engine": 1.0, "reward": 1.0}, {"engine": 1, "reward": 1}, 0.3)
    scale_all(pipeline, Autoscale(LIMITS), None)
    assert pipeline.replicas == {"engine": 4, "reward": 4} or pipeline.rate() > 0.9 / 0.3


def test_what_brings_nothing_is_taken_back_and_not_tried_again() -> None:
    pipeline = SyntheticPipeline(
        {"reward": 0.01}, {"reward": 1, "engine": 2}, 0.001, in_flight=100.0, delays={"engine": 5.0}
    )
    own = Autoscale(LIMITS)
    assert own.decide(pipeline.window())[0] == {"engine": 4}
    pipeline.replicas["engine"] = 4
    counts, why = own.decide(pipeline.window())
    assert counts == {"engine": 2}
    assert why == "taken back, for the rate changed by +0%"
    pipeline.replicas["engine"] = 2
    assert scale_all(pipeline, own, None) == 0


def test_what_brought_nothing_is_tried_again_when_the_run_has_become_faster() -> None:
    held = SyntheticPipeline(
        {"reward": 0.01}, {"reward": 1, "engine": 2}, 0.001, in_flight=100.0, delays={"engine": 5.0}
    )
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


def test_what_the_user_scales_is_his() -> None:
    pipeline = SyntheticPipeline({"engine": 0.1, "reward": 1.0}, {"engine": 1, "reward": 1}, 0.05)
    own = Autoscale(LIMITS)
    assert own.decide(pipeline.window())[0] == {"reward": 2}
    own.users({"reward": 1})
    assert own.decide(pipeline.window(0.5)) == ({}, ""), "neither judged nor scaled again"
    assert "reward" not in own.within(pipeline.window())


def test_a_run_that_was_changed_otherwise_is_not_compared_with_the_one_before() -> None:
    pipeline = SyntheticPipeline({"engine": 0.1, "reward": 1.0}, {"engine": 1, "reward": 1}, 0.05)
    own = Autoscale(LIMITS)
    pipeline.replicas |= own.decide(pipeline.window())[0]
    own.forget()
    assert own.decide(pipeline.window(0.1))[0] == {"reward": 4}, "it goes on, and takes nothing back"


def test_a_refused_change_is_not_asked_for_again() -> None:
    pipeline = SyntheticPipeline({"engine": 0.1, "reward": 1.0}, {"engine": 1, "reward": 1}, 0.05)
    own = Autoscale(LIMITS)
    counts, _ = own.decide(pipeline.window())
    own.refused(counts)
    assert scale_all(pipeline, own, None) == 0
