"""Worked numbers of fixture F to six digits: losses, gradients, weights, statistics, anchors, KL.

Everything goes the way of a run: configuration structs, resolved correction, statistics of the step, objective. `null`
is a masked token, which must be exactly 0 in loss and gradient.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig, CorrectionConfig, RejectionRule, needs
from models.algorithms.correction import Correction, alpha, log_weight_of, rejection_of, statistic, with_old_log_probs
from models.algorithms.losses import kl_to_reference, policy_loss_of
from models.algorithms.metrics import kept_scale, step_statistics
from models.algorithms.objective import policy_objective, sampling_ratio
from models.algorithms.tokens import PolicyTokens
from tests.models.corrections import corrected, weights_of

GOLDEN = json.loads((Path(__file__).parent / "golden" / "fixture_f.json").read_text())
MODES = ("rollout_mean", "token_mean", "constant")
DIGITS = 1e-6  # half a unit of the sixth digit, doubled for sums of rounded numbers
VERSIONS = torch.tensor([1, 1, 1, 0, 0, 2, 2, 2])


def flat(values: list[list[float | None]]) -> list[float]:
    return [0.0 if value is None else float(value) for part in values for value in part]


def correction_of(values: dict[str, Any], loss: str) -> Correction:
    config = CorrectionConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return corrected(config, max_staleness=0, policy_loss=loss)


def prepared(f, case: dict[str, Any], theta: Tensor, aggregation: str):  # type: ignore[no-untyped-def]
    """Tokens with the statistics of the step, configuration and correction of a case."""
    algorithm = AlgorithmConfig(**{"policy_loss": "ppo", **case["algorithm"]})
    correction = correction_of(case.get("correction", {}), algorithm.policy_loss)
    stale = torch.tensor([int(v) for v in flat(case["staleness"])]) if "staleness" in case else None
    columns: dict[str, Any] = {"staleness": stale}
    if needs(algorithm, correction) != "none":
        step = f.tokens(theta.detach(), **columns)
        columns["statistics"] = step_statistics(step, algorithm, correction)
        if correction.renormalize_after_rejection:
            columns["kept_scale"] = kept_scale(step, torch.tensor([7, 3]), aggregation, correction)
    return f.tokens(theta, **columns), algorithm, correction


@pytest.mark.parametrize("case", GOLDEN["policy"], ids=lambda case: case["name"])
def test_policy_losses(f, close, case: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    for mode in MODES:
        if mode not in case:
            continue
        theta = f.theta.clone().requires_grad_()
        tokens, algorithm, correction = prepared(f, case, theta, mode)
        loss = policy_objective(tokens, algorithm, correction, policy_loss_of(algorithm.policy_loss)).loss
        assert f.aggregate(loss.detach(), mode) == pytest.approx(case[mode], abs=DIGITS)
        (loss * f.mask).sum().backward()
        assert theta.grad is not None
        assert float(loss.detach()[2]) == 0.0
        assert float(theta.grad[2]) == 0.0
        if "loss" in case:
            close(loss, flat(case["loss"]))
        if "gradient" in case:
            close(theta.grad, flat(case["gradient"]))


@pytest.mark.parametrize("case", GOLDEN["weights"], ids=lambda case: case["name"])
def test_importance_weights(f, close, case: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    correction = correction_of({"use_tis": True, **case["correction"]}, "ppo")
    weight = weights_of(f.tokens(), correction).weight
    if "weight" in case:
        close(weight * f.mask, flat(case["weight"]))
    if "mean" in case:
        mean = step_statistics(f.tokens(), AlgorithmConfig(policy_loss="ppo"), correction).weight_mean
        assert mean == pytest.approx(case["mean"], abs=DIGITS)
        close(weight * f.mask / mean, flat(case["normalised"]))


@pytest.mark.parametrize("name", list(GOLDEN["statistics"]))
def test_statistics_of_rejection_rules(f, close, name: str) -> None:  # type: ignore[no-untyped-def]
    level, _, kind = name.rpartition("_")
    rule = RejectionRule(level, kind, 0.0, 0.0)  # type: ignore[arg-type]
    found = statistic(rule, log_weight_of(f.tokens(), Correction("decoupled", True)), f.tokens())
    expected = GOLDEN["statistics"][name]
    close(found, flat(expected) if level == "token" else expected)


@pytest.mark.parametrize("case", GOLDEN["rules"], ids=lambda case: "+".join(case["rules"]) or f"veto={case['veto']}")
def test_rejection_masks(f, case: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    correction = correction_of({"rollout_rs": case["rules"], "rs_veto": case.get("veto")}, "ppo")
    kept = rejection_of(f.tokens(), correction).kept
    assert kept.int().tolist() == [int(v) for v in flat(case["kept"])]


def test_log_linear_anchor(f, close) -> None:  # type: ignore[no-untyped-def]
    golden = GOLDEN["anchors"]
    correction = Correction("decoupled", True, prox="loglinear")
    tokens = with_old_log_probs(f.tokens(staleness=VERSIONS), correction)
    close(alpha(VERSIONS, "next_version"), flat(golden["alpha"]))
    close(tokens.old_log_probs, flat(golden["old"]))
    weight = weights_of(tokens, correction).weight * f.mask
    close(weight, flat(golden["weight"]))
    ratio = (tokens.log_probs - tokens.old_log_probs).exp() * f.mask
    close(ratio, flat(golden["ratio"]))
    rho = (f.theta - f.mu).exp() * f.mask
    torch.testing.assert_close(weight * ratio, rho)


@pytest.mark.parametrize("case", GOLDEN["kl"], ids=lambda case: f"{case['kind']}{'-unbiased' * ('unbiased' in case)}")
def test_kl_to_the_reference(f, close, case: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    on_policy = Correction("onpolicy", False)

    def kl(t: PolicyTokens) -> Tensor:
        ratio = sampling_ratio(t, on_policy, torch.ones(8)) if "unbiased" in case else None
        assert t.ref_log_probs is not None
        return kl_to_reference(case["kind"], t.log_probs, t.ref_log_probs, t.mask, ratio)

    values, gradient = f.loss_and_gradient(kl)
    assert f.aggregate(values, "rollout_mean") == pytest.approx(case["rollout_mean"], abs=DIGITS)
    close(gradient, flat(case["gradient"]))
