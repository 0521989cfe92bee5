"""Metrics of a policy step: golden numbers and independence of the split."""

from __future__ import annotations

import math

import pytest
import torch

from models.algorithms.losses import ppo_clip
from models.algorithms.metrics import MetricTotals
from models.algorithms.modes import Correction
from models.algorithms.objective import policy_objective
from models.algorithms.tokens import PolicyTokens

TIS = Correction(mode="decoupled", use_tis=True, high=1.2)


def metrics(f, config, correction: Correction, mode: str) -> dict[str, float]:  # type: ignore[no-untyped-def]
    weights, divisor = f.weights(mode)
    totals = MetricTotals()
    totals.add(policy_objective(f.tokens(), config, correction, ppo_clip).metrics, weights)
    return totals.result(divisor)


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
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_golden_rollout_mean(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    found = metrics(f, clip_higher, TIS, "rollout_mean")
    assert found["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.189583, abs=1e-5)
    assert found["train/pg_clipfrac"] == pytest.approx(0.291667, abs=1e-5)
    assert found["train/pg_loss"] == pytest.approx(0.030878, abs=1e-5)


def test_mismatch_is_logged_in_every_mode(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    found = metrics(f, clip_higher, Correction(mode="onpolicy", use_tis=False), "token_mean")
    assert found["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.185714, abs=1e-5)
    assert "train/tis" not in found
    bypass = metrics(f, clip_higher, Correction(mode="bypass", use_tis=False), "token_mean")
    theta_minus_mu = ((f.theta - f.mu).abs() * f.mask).sum() / 7  # the anchor is mu itself there
    assert bypass["train/train_rollout_logprob_abs_diff"] == pytest.approx(float(theta_minus_mu), abs=1e-6)


def test_split_into_micro_batches_changes_nothing(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    weights, divisor = f.weights("rollout_mean")
    totals = MetricTotals()
    for which in (1, 0):
        part = f.sequence == which
        tokens = PolicyTokens(
            log_probs=f.theta[part],
            old_log_probs=f.old[part],
            rollout_log_probs=f.mu[part],
            advantages=f.advantages[part],
            mask=f.mask[part],
            sequence=torch.zeros(int(part.sum()), dtype=torch.int64),
            n_sequences=1,
        )
        totals.add(policy_objective(tokens, clip_higher, TIS, ppo_clip).metrics, weights[part])
    assert totals.result(divisor) == pytest.approx(metrics(f, clip_higher, TIS, "rollout_mean"), abs=1e-9)


def test_terms_of_the_loss_keep_the_denominator_of_the_loss(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    weights, divisor = f.weights("constant")
    totals = MetricTotals()
    totals.add(policy_objective(f.tokens(), clip_higher, TIS, ppo_clip).metrics, weights)
    found = totals.result(7.0, loss_denominator=divisor)
    assert found["train/pg_loss"] == pytest.approx(-0.123528 * 7 / 16, abs=1e-5)
    assert found["train/pg_clipfrac"] == pytest.approx(2 / 7)


def test_nothing_added_gives_nothing() -> None:
    assert MetricTotals().result(1.0) == {}
