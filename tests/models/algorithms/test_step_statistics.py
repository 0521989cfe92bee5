"""Facts of a whole step: what must be known before it, the mean of the weights, the bound of m2po."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.correction import Correction
from models.algorithms.metrics import m2po_bound, needs, step_statistics
from models.algorithms.tokens import StepStatistics

PPO = AlgorithmConfig(policy_loss="ppo")
M2PO = AlgorithmConfig(policy_loss="m2po", m2po_threshold=0.05)
TIS = Correction("decoupled", True)
RULES = ("seq_mean_k1=0.9_1.1",)


@pytest.mark.parametrize(
    ("algorithm", "correction", "expected"),
    [
        (PPO, TIS, "none"),
        (PPO, Correction("bypass", False), "none"),
        (M2PO, Correction("bypass", False), "current"),
        (PPO, Correction("decoupled", True, tis_batch_normalize=True), "old"),
        (PPO, Correction("decoupled", False, tis_batch_normalize=True), "none"),
        (PPO, Correction("decoupled", True, tis_batch_normalize=True, correction_ratio="current"), "current"),
        (PPO, Correction("decoupled", True, tis_batch_normalize=True, prox="loglinear"), "current"),
        (
            PPO,
            Correction("decoupled", True, tis_batch_normalize=True, custom_tis_function_path="my.weights:f"),
            "current",
        ),
        (PPO, Correction("decoupled", True, rollout_rs=RULES), "none"),
        (PPO, Correction("decoupled", True, rollout_rs=RULES, rs_unit="rollout"), "old"),
        (PPO, Correction("bypass", False, rollout_rs=RULES, rs_unit="rollout"), "current"),
        (PPO, Correction("decoupled", True, rs_unit="rollout", renormalize_after_rejection=True), "none"),
        (PPO, Correction("decoupled", True, rs_veto=0.1, renormalize_after_rejection=True), "old"),
    ],
)
def test_needs(algorithm: AlgorithmConfig, correction: Correction, expected: str) -> None:
    assert needs(algorithm, correction) == expected


def test_nothing_asked_for_gives_neutral_statistics(f) -> None:  # type: ignore[no-untyped-def]
    assert step_statistics(f.tokens(), PPO, TIS) == StepStatistics()


def test_mean_of_sequence_weights_is_over_sequences(f) -> None:  # type: ignore[no-untyped-def]
    correction = Correction("decoupled", True, tis_level="sequence", tis_batch_normalize=True)
    expected = (math.exp(-0.25) + math.exp(-0.05)) / 2
    assert step_statistics(f.tokens(), PPO, correction).weight_mean == pytest.approx(expected)
    # A row without a trainable token does not enter it.
    tokens = f.tokens(mask=f.mask & (f.sequence == 0), sequence=torch.tensor([0] * 5 + [2] * 3), n_sequences=4)
    assert step_statistics(tokens, PPO, correction).weight_mean == pytest.approx(math.exp(-0.25))


def test_weights_that_are_all_zero_are_not_normalised(f) -> None:  # type: ignore[no-untyped-def]
    correction = Correction(
        "decoupled", True, tis_clip_low=5.0, tis_clip=6.0, tis_mode="icepop", tis_batch_normalize=True
    )
    assert step_statistics(f.tokens(), PPO, correction).weight_mean == 1.0
    dark = f.tokens(mask=torch.zeros(8, dtype=torch.bool))
    assert step_statistics(dark, PPO, Correction("decoupled", True, tis_batch_normalize=True)).weight_mean == 1.0


def test_m2po_golden(f, close) -> None:  # type: ignore[no-untyped-def]
    squares = f.tokens().log_rho.square()
    close(squares, [0.25, 0.0625, 0, 0.01, 0.0004, 0.04, 0.81, 1.69])
    bound = m2po_bound(squares[f.mask], 0.05)
    kept = squares[f.mask][squares[f.mask] <= bound]
    assert kept.tolist() == pytest.approx([0.0625, 0.01, 0.0004, 0.04])
    assert float(kept.mean()) == pytest.approx(0.028225)
    assert bound == pytest.approx((0.0625 + 0.25) / 2)


def test_m2po_keeps_at_least_one_and_treats_equals_alike() -> None:
    def kept(values: list[float], threshold: float) -> list[float]:
        squares = torch.tensor(values)
        return squares[squares <= m2po_bound(squares, threshold)].tolist()

    assert kept([9.0, 4.0, 16.0], 0.01) == [4.0]
    assert kept([4.0, 9.0, 4.0], 0.01) == [4.0, 4.0]
    assert kept([0.0, 1.0, 1.0], 0.5) == [0.0]  # one of the two would fit, both do not
    assert kept([0.0, 1.0], 0.5) == [0.0, 1.0]
    assert kept([0.01, 0.02], 0.5) == pytest.approx([0.01, 0.02])
    assert m2po_bound(torch.zeros(0), 0.5) == math.inf


@given(st.lists(st.sampled_from([0.0, 0.01, 0.04, 0.09, 0.5, 2.0, 30.0]), min_size=1), st.floats(1e-3, 3))
def test_m2po_keeps_as_much_as_it_may(values: list[float], threshold: float) -> None:
    squares = torch.tensor(values, dtype=torch.float64)
    bound = m2po_bound(squares, threshold)
    kept = squares[squares <= bound]
    smallest = squares == squares.min()
    assert len(kept) >= int(smallest.sum())
    if len(kept) > int(smallest.sum()):
        assert float(kept.mean()) <= threshold + 1e-12
    dropped = squares[squares > bound]
    if len(dropped):
        more = squares[squares <= dropped.min()]
        assert float(more.mean()) > threshold - 1e-12


def test_m2po_bound_does_not_round_onto_the_first_value_that_is_dropped() -> None:
    """Neighbours in float32: their middle rounds up, where the bound is compared."""
    squares = torch.tensor([1 + 2**-23, 1 + 2**-22], dtype=torch.float32)
    assert (squares <= m2po_bound(squares, 0.01)).tolist() == [True, False]


@given(st.lists(st.floats(0, 4, width=32), min_size=2))
def test_m2po_bound_separates_float32_neighbours(values: list[float]) -> None:
    """The bound is compared in the precision of the loss: it must not round onto the first value that it drops."""
    squares = torch.tensor(values, dtype=torch.float32)
    exact = m2po_bound(squares.double(), 0.04)
    assert torch.equal(squares <= m2po_bound(squares, 0.04), squares.double() <= exact)
