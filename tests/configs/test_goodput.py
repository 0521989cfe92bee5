"""The simulation of goodput: against figures of an independent one, against arithmetic, and the choice of N."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.plan.goodput import (
    TOLERANCE,
    UNMEASURED_AHEAD,
    Workload,
    attainable,
    choose_ahead,
    chosen_line,
    lognormal_lengths,
    planned_workload,
)
from tests.configs.test_plan import planned

# A response at the cap of 3,200 tokens lives for 8 batches at full engines: 64 rollouts of 400 tokens, 64 slots.
LONG_TAIL = Workload(lengths=lognormal_lengths(460, 1.0, 3200), slots=64, groups=8, members=8)
MASKED = msgspec.structs.replace(LONG_TAIL, masked=True)


@pytest.mark.parametrize(
    ("work", "by_ahead"),
    [(LONG_TAIL, {1: 0.29, 2: 0.48, 4: 0.72, 6: 0.85, 8: 0.93}), (MASKED, {2: 0.42, 4: 0.72, 6: 0.90, 8: 0.97})],
    ids=["groups dropped", "tokens masked"],
)
def test_a_long_tail_attains_what_another_simulation_found(work: Workload, by_ahead: dict[int, float]) -> None:
    for ahead, goodput in by_ahead.items():
        assert attainable(work, ahead, batches=96).goodput == pytest.approx(goodput, abs=0.05), ahead


@pytest.mark.parametrize(
    ("ratio", "ahead", "share"),
    [(1.0, 0, 1 / 2), (0.5, 0, 1 / 1.5), (2.0, 0, 1 / 3), (0.5, 1, 1.0), (2.0, 1, 1 / 2), (4.0, 3, 1 / 4)],
)
def test_equal_lengths_attain_what_the_slower_side_allows(ratio: float, ahead: int, share: float) -> None:
    """Without a tail: W_g / (W_g + W_t) in turns, W_g / max(W_g, W_t) beside each other."""
    work = Workload(lengths=(100,), slots=64, groups=8, members=8, train_ratio=ratio)
    found = attainable(work, ahead)
    assert found.goodput == pytest.approx(share, abs=0.01)
    assert found.stale == 0


def test_slots_of_what_is_too_old_go_to_fresh_groups() -> None:
    """Most where the tail is long beside the bound; nothing where no group grows too old, or its rest is trained."""
    lengths = lognormal_lengths(1000, 1.0, 8000)
    single = Workload(lengths=lengths, slots=256, groups=64, members=1, train_ratio=0.5)
    assert attainable(msgspec.structs.replace(single, cancels=True), 4).goodput > attainable(single, 4).goodput + 0.04
    assert attainable(msgspec.structs.replace(MASKED, cancels=True), 2) == attainable(MASKED, 2)
    equal = Workload(lengths=(100,), slots=64, groups=8, members=8)
    assert attainable(msgspec.structs.replace(equal, cancels=True), 1) == attainable(equal, 1)


def test_versions_that_are_published_seldom_make_tokens_older() -> None:
    """By (K - 1) / 2 versions on average."""
    every = attainable(Workload(lengths=(100,), slots=64, groups=8, members=8), 1).staleness
    fourth = attainable(Workload(lengths=(100,), slots=64, groups=8, members=8, interval=4), 1).staleness
    assert fourth - every == pytest.approx(1.5, abs=0.3)


def test_fewer_running_rollouts_decode_faster_where_a_step_grows_with_them() -> None:
    alone = msgspec.structs.replace(LONG_TAIL, growth=0.5)
    assert attainable(alone, 1).goodput > attainable(LONG_TAIL, 1).goodput + 0.05


def test_a_trainer_that_begins_before_the_batch_is_complete_trains_more() -> None:
    streams = msgspec.structs.replace(LONG_TAIL, streams=True)
    for ahead in (1, 4):
        assert attainable(streams, ahead).goodput > attainable(LONG_TAIL, ahead).goodput + 0.03
    # Where one group is the batch there is nothing to begin with.
    single = Workload(lengths=(100,), slots=8, groups=1, members=8)
    assert attainable(msgspec.structs.replace(single, streams=True), 0) == attainable(single, 0)


def test_a_rollout_that_waits_holds_no_slot() -> None:
    """In turns the slowest of eight waits is waited for; with other groups beside it a wait costs nothing."""
    work = Workload(lengths=(100,), slots=8, groups=1, members=8, train_ratio=0.001)
    waits = msgspec.structs.replace(work, wait=100.0)
    assert attainable(waits, 0, batches=400).goodput == pytest.approx(1 / (1 + 2.72), rel=0.1)  # 1 + 1/2 + ... + 1/8
    assert attainable(waits, 15).goodput > 0.9


def test_filtered_groups_are_made_and_not_trained() -> None:
    work = Workload(lengths=(100,), slots=64, groups=8, members=8, filtered=0.4)
    assert attainable(work, 4, batches=200).goodput == pytest.approx(0.6, abs=0.03)


@settings(max_examples=25, deadline=None)
@given(
    work=st.builds(
        Workload,
        lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5).map(tuple),
        slots=st.integers(1, 96),
        groups=st.integers(1, 6),
        members=st.integers(1, 4),
        train_ratio=st.sampled_from([0.01, 0.5, 1.0, 3.0]),
        interval=st.integers(1, 2),
        masked=st.booleans(),
        wait=st.sampled_from([0.0, 50.0]),
        streams=st.booleans(),
    ),
    ahead=st.integers(0, 4),
)
def test_the_simulation_keeps_its_bounds(work: Workload, ahead: int) -> None:
    found = attainable(work, ahead, batches=24)
    interval = work.interval
    # Tokens are counted where they are trained, so what was made before the count began may add some batches.
    assert 0 < found.goodput <= 1 + (ahead + interval + 1) / 24
    assert 0 <= found.staleness <= ahead + interval - 1
    assert 0 <= found.stale < 1


def test_a_large_batch_is_simulated_by_a_part_of_it() -> None:
    large = msgspec.structs.replace(LONG_TAIL, groups=64, slots=512)
    for ahead in (1, 4, 8):
        assert attainable(large, ahead).goodput == pytest.approx(attainable(LONG_TAIL, ahead).goodput, abs=0.03)


def test_the_smallest_n_is_chosen_that_costs_next_to_nothing() -> None:
    ahead, found = choose_ahead(LONG_TAIL)
    best = max(one.goodput for one in found.values())
    assert found[ahead].goodput >= best - TOLERANCE
    assert all(found[less].goodput < best - TOLERANCE for less in range(1, ahead))
    easier = msgspec.structs.replace(MASKED, train_ratio=0.25)
    ahead, found = choose_ahead(easier)
    assert found[ahead].goodput < max(one.goodput for one in found.values()), "a little goodput for fresher tokens"
    assert choose_ahead(Workload(lengths=(100,), slots=64, groups=8, members=8))[0] == 1, "nothing is gained by more"


def test_a_running_run_changes_n_only_for_a_gain() -> None:
    ahead, found = choose_ahead(LONG_TAIL)
    line = chosen_line(LONG_TAIL, found, 2, ahead)
    assert line is not None
    assert f"N 2 to {ahead}, attainable goodput 0.4" in line
    assert chosen_line(LONG_TAIL, found, ahead, ahead) is None
    assert chosen_line(LONG_TAIL, found, 8, 2) is None, "it would cost half of the goodput"


def test_auto_starts_from_the_plan() -> None:
    config = planned("--async-buffer-size auto --engine simulated --rollout-max-response-len 3200 --engine-slots 64")
    ahead, _ = choose_ahead(planned_workload(config))
    assert config.asynchrony.async_buffer_size == "auto"
    assert config.asynchrony.max_staleness == ahead > 2
    # With interval K versions are published every K batches.
    slow = planned("--async-buffer-size auto --engine simulated --update-weights-interval 3")
    assert slow.asynchrony.max_staleness == choose_ahead(planned_workload(slow))[0] + 2
    assert planned("--async-buffer-size auto --max-staleness 3").asynchrony.max_staleness == 3


def test_auto_starts_low_where_lengths_are_guessed() -> None:
    guessed = planned("--async-buffer-size auto --rollout-max-response-len 3200 --engine-slots 64")
    assert choose_ahead(planned_workload(guessed))[0] > 2
    assert guessed.asynchrony.max_staleness == UNMEASURED_AHEAD == 2


def test_the_simulated_engine_says_how_its_steps_grow() -> None:
    work = planned_workload(planned("--engine simulated --engine-slots 32 --scale engine=2"))
    assert work.slots == 64
    assert work.growth == pytest.approx(0.1 * 32 / (8 + 0.1 * 32))
    assert sum(work.lengths) / len(work.lengths) < 400, "the longest are cut"
