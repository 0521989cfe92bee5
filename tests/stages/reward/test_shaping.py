"""Overlong shaping and masking: golden numbers, and what may never happen to a reward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.reward.shaping import PART, Overlong, shaped
from tests.stages.stage_rig import make_sample

GOLDEN = Overlong(limit=100, buffer=20, factor=1.0)


@pytest.mark.parametrize(("length", "penalty"), [(50, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0)])
def test_overlong_golden_numbers(length: int, penalty: float) -> None:
    assert GOLDEN.penalty(length) == pytest.approx(penalty, abs=1e-12)
    assert Overlong(100, 20, 0.5).penalty(length) == pytest.approx(0.5 * penalty, abs=1e-12)


def test_beyond_the_limit_the_penalty_stays() -> None:
    """Several turns together may be longer than the limit of one."""
    assert GOLDEN.penalty(101) == GOLDEN.penalty(1000) == -1.0


@given(
    st.integers(1, 4000), st.integers(1, 2000), st.floats(0, 4), st.lists(st.integers(0, 9000), min_size=2, max_size=9)
)
def test_the_penalty_only_grows_with_the_length(limit: int, buffer: int, factor: float, lengths: list[int]) -> None:
    overlong = Overlong(limit, buffer, factor)
    penalties = [overlong.penalty(length) for length in sorted(lengths)]
    assert penalties == sorted(penalties, reverse=True)
    assert all(-factor <= penalty <= 0 for penalty in penalties)
    assert overlong.penalty(limit - buffer) == 0


def test_the_raw_reward_is_kept_where_shaping_changed_it() -> None:
    sample = shaped(make_sample(reward=1.0), GOLDEN, 90, mask_truncated=False)
    assert (sample.reward, sample.raw_reward, sample.reward_parts) == (0.5, 1.0, {PART: -0.5})
    short = shaped(make_sample(reward=1.0), GOLDEN, 10, mask_truncated=False)
    assert (short.reward, short.raw_reward, short.reward_parts) == (1.0, None, {PART: 0.0})


def test_a_sample_is_shaped_once() -> None:
    once = shaped(make_sample(reward=1.0), GOLDEN, 90, mask_truncated=True)
    assert shaped(once, GOLDEN, 90, mask_truncated=True) is once


def test_off_and_ungraded_samples_stay_as_they_are() -> None:
    sample = make_sample(reward=1.0)
    assert shaped(sample, Overlong(100, 0, 1.0), 100, mask_truncated=True) is sample
    ungraded = make_sample()
    assert shaped(ungraded, GOLDEN, 100, mask_truncated=True) is ungraded


def test_truncated_samples_are_masked_but_keep_their_reward() -> None:
    sample = make_sample(reward=0.25, status="truncated")
    masked = shaped(sample, Overlong(100, 0, 1.0), 100, mask_truncated=True)
    assert (masked.remove_sample, masked.reward) == (True, 0.25)
    assert not shaped(sample, Overlong(100, 0, 1.0), 100, mask_truncated=False).remove_sample
