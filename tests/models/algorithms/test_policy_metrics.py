"""Metrics of a policy step: golden numbers and independence of the split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from configs.schema.algorithm import AlgorithmConfig, needs
from models.algorithms.correction import Correction
from models.algorithms.losses import ppo_clip
from models.algorithms.metrics import m2po_bound, step_statistics
from models.algorithms.objective import policy_objective
from tests.models.corrections import totals_of

TIS = Correction(policy_mode="decoupled", use_tis=True, tis_clip=1.2)


def metrics(f, config, correction: Correction, mode: str) -> dict[str, float]:  # type: ignore[no-untyped-def]
    return totals_of(policy_objective(f.tokens(), config, correction, ppo_clip), *f.weights(mode))


def test_golden_token_mean(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    found = metrics(f, clip_higher, TIS, "token_mean")
    expected = {
        "train/train_rollout_logprob_abs_diff": 0.185714,
        "train/train_rollout_logprob_abs_diff_max": 0.3,
        "train/kl_mu_old_k1": 0.042857,
        "train/kl_mu_old_k3": 0.022885,
        "train/ppo_kl": -0.032857,
        "train/kl_old_theta_k3": 0.141396,
        "train/chi2_token": 0.005710,
        "train/ess": 0.955001,
        "train/ess_truncated": 0.967554,
        "train/ess_theta": 0.767385,
        "train/ess_sequence": 0.990164,
        "train/tis": 6.860193 / 7,
        "train/tis_clipfrac": 0.285714,
        "train/pg_clipfrac": 2 / 7,
        "train/pg_clipfrac_high": 1 / 7,
        "train/pg_clipfrac_low": 1 / 7,
        "train/pg_loss": -0.123528,
        "train/loss": -0.123528,
        "train/advantage_mean": (4 - 2.4) / 7,
        "train/advantage_std": math.sqrt((4 + 3 * 0.64) / 7 - (1.6 / 7) ** 2),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_golden_rollout_mean(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    found = metrics(f, clip_higher, TIS, "rollout_mean")
    assert found["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.189583, abs=1e-6)
    assert found["train/pg_clipfrac"] == pytest.approx(0.291667, abs=1e-6)
    assert found["train/pg_loss"] == pytest.approx(0.030878, abs=1e-6)


def test_an_anchor_made_from_the_sampler_hides_no_mismatch(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    """The log-linear anchor of a fresh token is mu: a difference of kernels shows only in theta."""
    found = metrics(f, clip_higher, Correction("decoupled", True, prox="loglinear"), "token_mean")
    theta_minus_mu = ((f.theta - f.mu).abs() * f.mask).sum() / 7
    assert found["train/train_rollout_logprob_abs_diff"] == pytest.approx(float(theta_minus_mu))
    assert found["train/ess"] == pytest.approx(0.767385, abs=1e-6)
    assert found["train/tis"] == 1.0


def test_losses_with_a_second_bound_tell_how_often_it_holds(f) -> None:  # type: ignore[no-untyped-def]
    config = AlgorithmConfig(policy_loss="ppo", eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=1.5)
    found = metrics(f, config, TIS, "token_mean")
    assert found["train/dual_clipfrac"] == pytest.approx(2 / 7)
    assert found["train/pg_clipfrac"] == pytest.approx(2 / 7)


def test_buckets_of_staleness(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    """Ages 0 2 . 3 4 of the first sequence, 5 9 0 of the second; token 2 is masked."""
    tokens = f.tokens(staleness=torch.tensor([0, 2, 1, 3, 4, 5, 9, 0]))
    every = totals_of(policy_objective(tokens, clip_higher, TIS, ppo_clip), *f.weights("rollout_mean"))
    found = {name: value for name, value in every.items() if name.startswith("staleness/")}

    def ess(a: float, b: float) -> float:
        return (math.exp(a) + math.exp(b)) ** 2 / (2 * (math.exp(2 * a) + math.exp(2 * b)))

    assert found == pytest.approx(
        {
            "staleness/ess/0": ess(0.2, -0.05),
            "staleness/ess/2": 1.0,
            "staleness/ess/3-4": ess(-0.3, -0.05),
            "staleness/ess/5+": ess(-0.3, 0.3),
            "staleness/clipfrac/0": 1.0,
            "staleness/clipfrac/2": 0.0,
            "staleness/clipfrac/3-4": 0.0,
            "staleness/clipfrac/5+": 0.0,
            "staleness/abs_diff/0": 0.125,
            "staleness/abs_diff/2": 0.1,
            "staleness/abs_diff/3-4": 0.175,
            "staleness/abs_diff/5+": 0.3,
        }
    )
    assert not [name for name in metrics(f, clip_higher, TIS, "token_mean") if name.startswith("staleness/")]


# Facts of a whole step: what must be known before it, the mean of the weights, the bound of m2po.


PPO = AlgorithmConfig(policy_loss="ppo")
M2PO = AlgorithmConfig(policy_loss="m2po", m2po_threshold=0.05)
RULES = {"rollout_rs": ("seq_mean_k1=0.9_1.1",)}


NORMALISED = {"tis_batch_normalize": True}


@pytest.mark.parametrize(("algorithm", "mode", "tis", "fields", "expected"), [
    (PPO, "decoupled", True, {}, "none"),
    (PPO, "bypass", False, {}, "none"),
    (M2PO, "bypass", False, {}, "current"),
    (PPO, "decoupled", True, NORMALISED, "old"),
    (PPO, "decoupled", False, NORMALISED, "none"),
    (PPO, "decoupled", True, NORMALISED | {"correction_ratio": "current"}, "current"),
    (PPO, "decoupled", True, NORMALISED | {"prox": "loglinear"}, "current"),
    (PPO, "decoupled", True, NORMALISED | {"custom_tis_function_path": "my.weights:f"}, "current"),
    (PPO, "decoupled", True, RULES, "none"),
    (PPO, "decoupled", True, RULES | {"rs_unit": "rollout"}, "old"),
    (PPO, "bypass", False, RULES | {"rs_unit": "rollout"}, "current"),
    (PPO, "decoupled", True, {"rs_unit": "rollout", "renormalize_after_rejection": True}, "none"),
    (PPO, "decoupled", True, {"rs_veto": 0.1, "renormalize_after_rejection": True}, "old"),
])  # fmt: skip
def test_needs(algorithm: AlgorithmConfig, mode: Any, tis: bool, fields: dict[str, Any], expected: str) -> None:
    assert needs(algorithm, Correction(mode, tis, **fields)) == expected


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


def test_m2po_bound_does_not_round_onto_the_first_value_that_is_dropped() -> None:
    """Neighbours in float32: their middle rounds up, where the bound is compared."""
    squares = torch.tensor([1 + 2**-23, 1 + 2**-22], dtype=torch.float32)
    assert (squares <= m2po_bound(squares, 0.01)).tolist() == [True, False]
