"""pass@k and best@k against the golden numbers, and against drawing every subset."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.evaluate import best_at_k, estimates, pass_at_k, powers_of_two
from tests.stages.stage_rig import make_sample


@pytest.mark.parametrize(
    ("n", "correct", "k", "value"),
    [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (8, 2, 4, 0.785714), (8, 0, 8, 0.0), (8, 1, 8, 1.0), (1, 1, 1, 1.0)],
)
def test_pass_at_k_golden(n: int, correct: int, k: int, value: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(value, abs=1e-6)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_hit(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    draws = list(itertools.combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=7), st.data())
def test_best_at_k_is_the_mean_of_the_maxima_of_all_draws(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    draws = list(itertools.combinations(rewards, k))
    assert best_at_k(rewards, k) == pytest.approx(sum(map(max, draws)) / len(draws), abs=1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=16))
def test_best_at_k_of_verdicts_is_pass_at_k(correct: list[bool]) -> None:
    for k in powers_of_two(len(correct)):
        rewards = [float(c) for c in correct]
        assert best_at_k(rewards, k) == pytest.approx(pass_at_k(len(correct), sum(correct), k))


@pytest.mark.parametrize(("n", "k"), [(2, 3), (2, 0), (0, 1)])
def test_more_draws_than_rollouts_are_refused(n: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}, but only 1 to {n}"):
        pass_at_k(n, 0, k)


def test_powers_of_two() -> None:
    assert [powers_of_two(n) for n in (0, 1, 2, 3, 8, 9)] == [[], [1], [1, 2], [1, 2], [1, 2, 4, 8], [1, 2, 4, 8]]


def test_estimates_use_the_real_size_of_each_group() -> None:
    """A group that lost two of its four rollouts gives no pass@4, and its own n to the others."""
    whole = [make_sample(i, reward=0.0, is_correct=i == 0) for i in range(4)]
    rest = [make_sample(i, reward=0.0, is_correct=i == 0) for i in range(2)]
    found = estimates([whole, rest])
    assert found == pytest.approx(
        {"pass@1": (0.25 + 0.5) / 2, "pass@2": (0.5 + 1.0) / 2, "pass@4": 1.0, "mean@4": 0.375}
    )


def test_verdicts_win_over_rewards_and_their_scale() -> None:
    """Rewards of -1 and 1 are no probabilities; the verdict is."""
    group = [make_sample(0, reward=-1.0, is_correct=True), make_sample(1, reward=1.0, is_correct=False)]
    assert estimates([group]) == {"pass@1": 0.5, "pass@2": 1.0, "mean@2": 0.5}


def test_rewards_without_verdicts_give_best_at_k() -> None:
    group = [make_sample(i, reward=r) for i, r in enumerate([0.2, 0.8, 0.5, 0.1])]
    found = estimates([group])
    assert found == pytest.approx({"best@1": 0.4, "best@2": 3.6 / 6, "best@4": 0.8, "mean@4": 0.4})


def test_sequences_of_a_rollout_are_one_draw() -> None:
    group = [make_sample(0, is_correct=True, reward=1.0, sequence=k, sequences=3) for k in range(3)]
    group.append(make_sample(1, is_correct=False, reward=0.0))
    assert estimates([group]) == {"pass@1": 0.5, "pass@2": 1.0, "mean@2": 0.5}


def test_nothing_gives_nothing() -> None:
    assert estimates([]) == {}
    assert estimates([[]]) == {}
