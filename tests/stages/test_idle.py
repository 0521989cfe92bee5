"""The idle share of an engine: from its own account, or from looks at it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.engines.load_watch import IdleMeter


def test_an_engine_that_counts_its_seconds_is_believed() -> None:
    meter = IdleMeter(looks=3)
    assert meter.saw(10.0, 1.0, 5) is None
    assert meter.saw(12.0, 2.5, 0) == pytest.approx(0.25)
    assert meter.saw(14.0, 2.5, 9) == pytest.approx(0.625)
    assert meter.saw(16.0, 2.5, 9) == pytest.approx(1.0), "the first look is forgotten"


def test_of_one_that_does_not_each_look_counts_for_the_time_before_it() -> None:
    meter = IdleMeter()
    assert [meter.saw(t, 0.0, n) for t, n in ((0.0, 3), (2.0, 1), (4.0, 0), (8.0, 0))] == [
        None,
        0.0,
        pytest.approx(0.5),
        pytest.approx(0.75),
    ]


def test_what_was_sampled_before_the_first_second_counted_does_not_mix_with_the_account() -> None:
    meter = IdleMeter()
    meter.saw(0.0, 0.0, 0)
    meter.saw(2.0, 0.0, 1)
    assert meter.saw(4.0, 0.5, 1) is None
    assert meter.saw(6.0, 1.5, 1) == pytest.approx(0.5)


def test_an_engine_that_was_started_anew_begins_anew() -> None:
    meter = IdleMeter()
    meter.saw(0.0, 100.0, 1)
    meter.saw(2.0, 102.0, 1)
    assert meter.saw(4.0, 1.0, 1) is None
    assert meter.saw(6.0, 3.0, 1) == 0.0
    meter.forget()
    assert meter.saw(8.0, 3.0, 1) is None


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 20.0), st.integers(0, 3)), max_size=30))
def test_a_share_is_a_share(looks: list[tuple[float, float, int]]) -> None:
    meter, now = IdleMeter(), 0.0
    for step, busy, running in looks:
        now += step
        share = meter.saw(now, busy, running)
        assert share is None or 0.0 <= share <= 1.0
