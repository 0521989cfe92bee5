"""The built-in group filters: what each keeps and drops, how they are written, and what a wrong one is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.data import FilterConfig
from stages.errors import FilterError, FilterNameError
from stages.group.filters import FilterDecision, FilterState, filters_on, parse_filters, resolve_filter, zero_std
from stages.messages import RolloutSlice
from tests.stages.stage_rig import make_sample, make_slice


def graded(*rewards: float, **fields: Any) -> RolloutSlice:
    return make_slice(0, *(make_sample(i, reward=r) for i, r in enumerate(rewards)), **fields)


def judged(*correct: bool | None) -> RolloutSlice:
    return make_slice(0, *(make_sample(i, reward=0.0, is_correct=c) for i, c in enumerate(correct)))


def verdict(name: str, slice_: RolloutSlice, state: FilterState | None = None) -> str | None:
    """The reason of the filter's rejection, None if it keeps the group."""
    (rule,) = parse_filters([name], state)
    decision = rule(slice_)
    assert isinstance(decision, FilterDecision)
    return None if decision.keep else decision.reason


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1, 0, 0, 1], None),
        ([0.5, 0.50001], None),  # std 5e-6
        ([0.5, 0.5 + 1e-7], "zero_std_0.5"),  # noise of floats
        ([1, 1, 1], "zero_std_1.0"),
        ([0.5, 0.5], "zero_std_0.5"),
        ([-1, -1], "zero_std_-1.0"),
        ([1], "zero_std_1.0"),  # a single member
    ],
)
def test_nonzero_std(rewards: Sequence[float], reason: str | None) -> None:
    assert verdict("nonzero_std", graded(*rewards)) == reason


def test_nonzero_std_reads_the_rewards_before_shaping() -> None:
    """A length penalty gives an all-wrong group a spread; it teaches nothing about the task."""
    members = [make_sample(i, reward=-0.1 * i, raw_reward=0.0) for i in range(3)]
    assert verdict("nonzero_std", make_slice(0, *members)) == "zero_std_0.0"
    shaped_alike = [make_sample(0, reward=0.5, raw_reward=1.0), make_sample(1, reward=0.5, raw_reward=0.5)]
    assert verdict("nonzero_std", make_slice(0, *shaped_alike)) is None


def test_nonzero_std_counts_rollouts_and_not_their_sequences() -> None:
    """Two sequences of one rollout are one member: no group of one is kept because it has several."""
    parts = [make_sample(0, reward=1.0, sequence=k, sequences=2) for k in range(2)]
    assert verdict("nonzero_std", make_slice(0, *parts, n_samples=1)) == "zero_std_1.0"


@pytest.mark.parametrize(
    ("correct", "reason"),
    [
        ([True] * 3 + [False] * 5, None),
        ([True, False], None),
        ([False] * 8, "pass_rate_low"),
        ([True] * 8, "pass_rate_high"),
        ([True] + [False] * 9, None),  # 0.1: bounds are inclusive
    ],
)
def test_pass_rate_goes_by_the_verdict(correct: list[bool], reason: str | None) -> None:
    assert verdict("pass_rate:0.1_0.9", judged(*correct)) == reason


def test_pass_rate_without_verdicts_is_an_error_and_not_a_silence() -> None:
    with pytest.raises(FilterError, match="grader that says which responses are correct"):
        verdict("pass_rate:0.1_0.9", graded(1.0, 0.0))


@pytest.mark.parametrize(
    ("rewards", "reason"), [([0.0, 1.0], None), ([-3.0, 0.0], "reward_low"), ([2.0, 2.0], "reward_high")]
)
def test_reward_bounds_the_mean(rewards: list[float], reason: str | None) -> None:
    assert verdict("reward:-1_1.5", graded(*rewards)) == reason


def test_length_counts_trainable_tokens_of_whole_rollouts() -> None:
    short = make_slice(0, make_sample(0, n=4), make_sample(1, n=6, mask=[1, 1, 0, 0, 0, 0]))  # mean 3
    assert verdict("length:3_3", short) is None
    assert verdict("length:4_9", short) == "too_short"
    assert verdict("length:1_2", short) == "too_long"
    fanned = make_slice(0, *(make_sample(0, n=4, sequence=k, sequences=3) for k in range(3)), n_samples=1)
    assert verdict("length:12_12", fanned) is None


def test_staleness_compares_with_the_newest_published_weights() -> None:
    slice_ = make_slice(0, make_sample(0, runs=[(3, 2), (5, 2)]), make_sample(1, version=5))
    state = FilterState(version=5)
    assert verdict("staleness:2", slice_, state) is None
    state.version = 6
    assert verdict("staleness:2", slice_, state) == "too_stale"
    masked = make_slice(0, make_sample(0, runs=[(3, 2), (5, 2)], mask=[0, 0, 1, 1]), make_sample(1, version=5))
    assert verdict("staleness:2", masked, state) is None, "only trained tokens have an age"


@pytest.mark.parametrize(("members", "reason"), [(4, None), (3, None), (2, "failed_members")])
def test_max_failed_counts_the_members_that_are_missing(members: int, reason: str | None) -> None:
    slice_ = make_slice(0, *(make_sample(i) for i in range(members)), n_samples=4)
    assert verdict("max_failed:0.25", slice_) == reason


def test_a_prompt_text_is_trained_once_per_epoch() -> None:
    state = FilterState(remembers=True)
    first, second = make_slice(0), make_slice(1)  # the same text
    assert verdict("duplicate_prompt", first, state) is None
    assert verdict("duplicate_prompt", second, state) is None, "the first was not passed on"
    state.passes(first.group)
    assert verdict("duplicate_prompt", second, state) == "duplicate_prompt"
    assert verdict("duplicate_prompt", first, state) is None, "a redelivery of the group itself"
    assert verdict("duplicate_prompt", make_slice(2, requeued=1), state) is None, "asked again, as the first was stale"


def test_only_the_last_two_epochs_are_remembered() -> None:
    state = FilterState()
    parse_filters(["nonzero_std"], state)
    state.passes(make_slice(0).group)
    assert state.passed == {}, "nobody asks for them"
    parse_filters(["duplicate_prompt"], state)
    for epoch in range(5):
        state.passes(msgspec.structs.replace(make_slice(epoch).group, epoch=epoch))
    assert sorted(state.passed) == [3, 4]


def test_the_fallback_is_no_link_of_the_chain() -> None:
    """Such groups pass on to the trainer, which knows when they are needed."""
    assert parse_filters(["nonzero_std_fallback"]) == []
    assert filters_on(FilterConfig(dynamic_sampling_filter=("nonzero_std_fallback",)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonzero_sdt", "'nonzero_sdt' is unknown; did you mean nonzero_std"),
        ("xyz", "is unknown; choose one of nonzero_std, nonzero_std_fallback"),
        ("nonzero_std:1", "nonzero_std takes no argument; write nonzero_std"),
        ("pass_rate", "'' is no range; write pass_rate:LOW_HIGH, for example pass_rate:0.1_0.9"),
        ("pass_rate:0.9_0.1", "the lower bound 0.9 is above the upper bound 0.1; write pass_rate:LOW_HIGH"),
        ("pass_rate:0.1_1.5", "1.5 must be between 0 and 1; write"),
        ("reward:a_b", "'a' is no number; write reward:LOW_HIGH"),
        ("reward:nan_1", "nan must be finite"),
        ("length:-1_10", "-1 must be finite and at least 0; write length:MIN_MAX"),
        ("staleness:1.5", "1.5 is no whole number of versions; write staleness:N, for example staleness:2"),
        ("max_failed:2", "2 must be between 0 and 1; write max_failed:SHARE"),
    ],
)
def test_a_filter_that_cannot_be_read_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(FilterNameError, match="--dynamic-sampling-filter") as caught:
        parse_filters([name])
    assert words in str(caught.value)


@given(st.floats(-5, 5), st.floats(-5, 5), st.lists(st.floats(-6, 6), min_size=1, max_size=6))
def test_reward_keeps_exactly_the_means_within_its_bounds(a: float, b: float, rewards: list[float]) -> None:
    low, high = sorted((a, b))
    mean = float(sum(rewards) / len(rewards))
    if min(abs(mean - low), abs(mean - high)) < 1e-9:
        return
    kept = verdict(f"reward:{low!r}_{high!r}", graded(*rewards)) is None
    assert kept == (low <= mean <= high)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8))
def test_equal_rewards_are_what_zero_std_means(rewards: list[float]) -> None:
    assert (zero_std(graded(*rewards)) is None) == (len(set(rewards)) > 1)


def test_the_configured_chain_keeps_its_order() -> None:
    config = FilterConfig(
        dynamic_sampling_filter=("length:1_2", "nonzero_std"),
        dynamic_sampling_filter_path="tests.stages.custom_parts:divide",
    )
    chain = resolve_filter(config)
    assert len(chain) == 3
    answers = [rule(graded(1.0, 1.0)) for rule in chain[:2]]
    assert [a.reason for a in answers if isinstance(a, FilterDecision)] == ["too_long", "zero_std_1.0"]
