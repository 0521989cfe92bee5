"""Reduction of token losses with the denominators of the whole step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.algorithms.aggregation import Aggregation, StepSize, coefficients, denominator, metric_mode
from models.errors import AlgorithmError

MODES: list[Aggregation] = ["rollout_mean", "token_mean", "seq_mean", "constant"]
Sequence_ = tuple[int, list[float], list[int]]  # rollout, losses, mask

GOLDEN: list[Sequence_] = [(0, [1, 2], [1, 1]), (0, [3, 4, 5], [1, 0, 1]), (1, [10], [1])]
FULLY_MASKED: Sequence_ = (2, [7, 7], [0, 0])


def reduce(mode: Aggregation, step: Sequence[Sequence_], constant: int = 8) -> float:
    """Numerators sequence by sequence, each as if it were its own micro-batch; one division at the end."""
    own = [sum(mask) for _, _, mask in step]
    of_rollout = [sum(sum(mask) for other, _, mask in step if other == rollout) for rollout, _, _ in step]
    weights = coefficients(mode, own, of_rollout)
    numerator = 0.0
    for (_, losses, mask), weight in zip(step, weights, strict=True):
        numerator += weight * float(np.dot(losses, mask))
    size = StepSize(rollouts=len({rollout for rollout, _, _ in step}), sequences=len(step), tokens=sum(own))
    return numerator / denominator(mode, size, max_response_len=constant)


@pytest.mark.parametrize(
    ("mode", "expected"), [("rollout_mean", 6.375), ("token_mean", 4.2), ("seq_mean", 5.166667), ("constant", 1.3125)]
)
def test_golden(mode: Aggregation, expected: float) -> None:
    assert reduce(mode, GOLDEN) == pytest.approx(expected, abs=1e-5)


def test_fully_masked_rollouts_stay_in_the_denominator() -> None:
    assert reduce("rollout_mean", [*GOLDEN, FULLY_MASKED]) == pytest.approx(4.25)
    assert reduce("token_mean", [*GOLDEN, FULLY_MASKED]) == pytest.approx(4.2)
    assert reduce("seq_mean", [*GOLDEN, FULLY_MASKED]) == pytest.approx(5.166667 * 3 / 4, abs=1e-5)


def test_means_of_micro_batches_are_another_number() -> None:
    # What averaging per micro-batch would give for the splits {a,b},{c} and {a},{b,c}.
    token_mean = (reduce("token_mean", GOLDEN[:2]) + reduce("token_mean", GOLDEN[2:])) / 2
    assert token_mean == pytest.approx(6.375)
    assert reduce("token_mean", GOLDEN) != pytest.approx(token_mean)
    rollout_mean = (reduce("rollout_mean", GOLDEN[:1]) + reduce("rollout_mean", GOLDEN[1:])) / 2
    assert rollout_mean == pytest.approx(4.25)
    assert reduce("rollout_mean", GOLDEN) != pytest.approx(rollout_mean)


sequences = st.integers(0, 7).flatmap(
    lambda n: st.tuples(
        st.integers(0, 3),
        st.lists(st.floats(-5, 5), min_size=n, max_size=n),
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
    )
)


@given(st.lists(sequences, min_size=1, max_size=8), st.randoms())
def test_order_and_padding_do_not_matter(step: list[Sequence_], random: object) -> None:
    shuffled = [(r, [*losses, 99.0], [*mask, 0]) for r, losses, mask in step]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for mode in MODES:
        value = reduce(mode, step)
        assert np.isfinite(value)
        assert reduce(mode, shuffled) == pytest.approx(value, abs=1e-9)


@given(st.lists(sequences, min_size=1, max_size=8))
def test_a_mean_of_ones_counts_what_is_trained(step: list[Sequence_]) -> None:
    ones = [(r, [1.0] * len(losses), mask) for r, losses, mask in step]
    live = {r for r, _, mask in step if sum(mask)}
    everyone = {r for r, _, _ in step}
    assert reduce("rollout_mean", ones) == pytest.approx(len(live) / len(everyone))
    assert reduce("token_mean", ones) == pytest.approx(1.0 if live else 0.0)


def test_empty_step_and_wrong_name() -> None:
    for mode in MODES:
        assert denominator(mode, StepSize(), max_response_len=8) >= 1
    with pytest.raises(AlgorithmError, match="'mean' is unknown"):
        coefficients("mean", [1], [1])  # type: ignore[arg-type]
    with pytest.raises(AlgorithmError, match="choose rollout_mean"):
        denominator("mean", StepSize(), max_response_len=8)  # type: ignore[arg-type]
    assert metric_mode("constant") == "token_mean"
    assert metric_mode("seq_mean") == "seq_mean"
