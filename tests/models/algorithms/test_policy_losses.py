"""Golden values and gradients of the losses, and the detachment of weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import algorithm as schema
from configs.schema.algorithm import Aggregation, AlgorithmConfig, CorrectionConfig, needs
from configs.schema.rejection_rules import InvalidRule, RejectionRule
from models.algorithms.aggregation import StepSize, coefficients, denominator, metric_mode
from models.algorithms.correction import (
    Correction,
    alpha,
    correction_of,
    log_weight_of,
    rejection_of,
    statistic,
    with_old_log_probs,
)
from models.algorithms.losses import POLICY_LOSSES, k3, kl_to_reference, kl_values, policy_loss_of, ppo_clip, sft
from models.algorithms.metrics import kept_scale, step_statistics
from models.algorithms.objective import policy_objective, sampling_ratio, sft_objective
from models.algorithms.tokens import PolicyTokens
from models.errors import AlgorithmError, UnknownAlgorithm
from tests.models.corrections import corrected, weights_of


def test_every_name_of_the_configuration_is_built() -> None:
    assert sorted(POLICY_LOSSES) == sorted(schema.POLICY_LOSSES)
    assert policy_loss_of("ppo") is ppo_clip
    with pytest.raises(UnknownAlgorithm, match=r"policy_loss 'cispoo' is unknown.*did you mean 'cispo'"):
        policy_loss_of("cispoo")


def test_kl_of_a_wild_token_is_bounded() -> None:
    """The bound of low_var_kl comes after the ratio."""
    difference = torch.tensor([-2.0, -4.0, -4.0], dtype=torch.float64)  # k3 = 4.389056, 49.598150
    ratio = torch.tensor([3.0, 0.1, 0.3], dtype=torch.float64)
    assert k3(difference).tolist() == pytest.approx([4.389056, 49.598150, 49.598150], abs=1e-5)
    assert kl_values("low_var_kl", difference, ratio).tolist() == pytest.approx([10, 4.959815, 10], abs=1e-6)
    assert kl_values("low_var_kl", difference).tolist() == pytest.approx([4.389056, 10, 10], abs=1e-6)
    assert kl_values("k3", difference, ratio).tolist() == pytest.approx([13.167168, 4.959815, 14.879445], abs=1e-6)
    assert kl_values("k1", difference).tolist() == [-2, -4, -4]
    far = k3(torch.tensor([-1000.0, 1000.0], dtype=torch.float64))
    assert torch.isfinite(far).all()
    assert float(far[1]) == pytest.approx(999.0)  # the linear term keeps the true value


def test_sft(f, close) -> None:  # type: ignore[no-untyped-def]
    loss, gradient = f.loss_and_gradient(sft)
    assert f.aggregate(loss, "token_mean") == pytest.approx(0.952857, abs=1e-5)
    assert f.aggregate(loss, "rollout_mean") == pytest.approx(0.958750, abs=1e-5)
    close(gradient, [-1, -1, 0, -1, -1, -1, -1, -1])
    close(sft_objective(f.tokens()).loss, loss.tolist())


def test_terms_of_the_objective_add_up(f, close, on_policy) -> None:  # type: ignore[no-untyped-def]
    config = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coef=0.01)
    entropy = torch.linspace(0.1, 0.8, 8, dtype=torch.float64)
    correction = Correction(policy_mode="decoupled", use_tis=True, tis_clip=1.2)
    loss = policy_objective(f.tokens(entropy=entropy), config, correction, ppo_clip).loss
    weight = weights_of(f.tokens(), correction).weight
    kl = kl_to_reference("k2", f.theta, f.ref, f.mask)
    # The weight touches the policy term only.
    close(loss, (weight * ppo_clip(f.tokens(), config).loss + 0.1 * kl - 0.01 * entropy * f.mask).tolist())
    with pytest.raises(AlgorithmError, match="entropy_coef"):
        policy_objective(f.tokens(), config, on_policy, ppo_clip)
    with pytest.raises(AlgorithmError, match="reference policy"):
        policy_objective(f.tokens(entropy=entropy, ref_log_probs=None), config, on_policy, ppo_clip)


def test_a_file_of_its_own_brings_its_policy_loss(tmp_path, monkeypatch, f) -> None:  # type: ignore[no-untyped-def]
    import models.algorithms

    source = (
        "from models.algorithms.losses import PolicyLoss\n"
        "def advantages(rewards, *, normalize_std):\n    return rewards * 2\n"
        "def policy_loss(tokens, config):\n"
        "    none = tokens.mask & False\n"
        "    return PolicyLoss(loss=-tokens.log_probs * tokens.advantages, clipped_high=none, clipped_low=none)\n"
    )
    (tmp_path / "plain_gradient.py").write_text(source)
    monkeypatch.setattr(models.algorithms, "__path__", [*models.algorithms.__path__, str(tmp_path)])
    chosen = policy_loss_of("plain_gradient")
    assert float(chosen(f.tokens(), AlgorithmConfig()).loss[0]) == pytest.approx(0.7)
    from models.algorithms.advantages import advantages

    assert advantages("plain_gradient", [1, 2], [0, 1]).tolist() == [2, 4]


# The correction that a loss is given: decided, and refused where it is not.


@pytest.mark.parametrize(("values", "staleness", "loss", "mode", "tis"), [
    ({}, 0, "ppo", "onpolicy", False),
    ({}, 2, "ppo", "decoupled", True),
    ({"use_rollout_logprobs": True}, 2, "ppo", "bypass", False),
    ({"policy_mode": "bypass"}, 2, "ppo", "bypass", False),
    ({"allow_uncorrected": True}, 2, "ppo", "onpolicy", False),
    ({"rollout_rs": ("token_k3=1",), "use_tis": False}, 2, "ppo", "decoupled", False),
    ({"rs_veto": 1e-4}, 0, "ppo", "decoupled", False),
    ({"rs_veto": 1e-4, "use_rollout_logprobs": True}, 2, "ppo", "bypass", False),
    ({}, 2, "aipo", "bypass", False),
    ({}, 0, "m2po", "bypass", False),
    ({"use_tis": True}, 0, "gspo", "decoupled", True),
])  # fmt: skip
def test_modes(values: dict[str, object], staleness: int, loss: str, mode: str, tis: bool) -> None:
    config = msgspec.convert(values, CorrectionConfig)
    found = corrected(config, max_staleness=staleness, policy_loss=loss)
    assert (found.policy_mode, found.use_tis) == (mode, tis)


@pytest.mark.parametrize("config", [CorrectionConfig(), CorrectionConfig(use_tis=True), CorrectionConfig(rs_veto=0.1)])
def test_what_is_not_decided_is_refused(config: CorrectionConfig) -> None:
    with pytest.raises(AlgorithmError, match=r"policy_mode=auto .* are not decided; resolve the configuration first"):
        correction_of(config)


def test_a_wrong_rule_is_refused_when_it_is_resolved() -> None:
    with pytest.raises(InvalidRule, match="seq_max_k1"):
        corrected(CorrectionConfig(rollout_rs=("seq_max_k1=0.9_1.1",)))


# Reduction of token losses with the denominators of the whole step.


MODES: list[Aggregation] = ["rollout_mean", "token_mean", "seq_mean", "seq_mean_token_sum", "constant"]
Sequence_ = tuple[int, list[float], list[int]]  # rollout, losses, mask

GOLDEN: list[Sequence_] = [(0, [1, 2], [1, 1]), (0, [3, 4, 5], [1, 0, 1]), (1, [10], [1])]


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
    ("mode", "expected"),
    [("rollout_mean", 6.375), ("token_mean", 4.2), ("seq_mean", 5.166667), ("constant", 1.3125),
     ("seq_mean_token_sum", 7.0)],
)  # fmt: skip
def test_golden(mode: Aggregation, expected: float) -> None:
    assert reduce(mode, GOLDEN) == pytest.approx(expected, abs=1e-5)


sequences = st.integers(0, 7).flatmap(
    lambda n: st.tuples(
        st.integers(0, 3),
        st.lists(st.floats(-5, 5), min_size=n, max_size=n),
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
    )
)


@given(st.lists(sequences, min_size=1, max_size=8))
def test_a_mean_of_ones_counts_what_is_trained(step: list[Sequence_]) -> None:
    ones = [(r, [1.0] * len(losses), mask) for r, losses, mask in step]
    live = {r for r, _, mask in step if sum(mask)}
    everyone = {r for r, _, _ in step}
    assert reduce("rollout_mean", ones) == pytest.approx(len(live) / len(everyone))
    assert reduce("token_mean", ones) == pytest.approx(1.0 if live else 0.0)
    assert reduce("seq_mean", ones) == pytest.approx(np.mean([any(mask) for _, _, mask in step]))


def test_an_empty_step_is_divided_by_one_and_metrics_by_a_count_of_tokens() -> None:
    for mode in MODES:
        assert denominator(mode, StepSize(), max_response_len=8) >= 1
    assert metric_mode("constant") == metric_mode("seq_mean_token_sum") == "token_mean"
    assert metric_mode("seq_mean") == "seq_mean"


def test_the_gate_of_sapo_is_highest_on_policy_and_the_same_both_ways(f) -> None:  # type: ignore[no-untyped-def]
    """d loss / d r = -A sech^2(tau (r - 1) / 2): that of the plain ratio at 1, less on both sides."""
    theta = f.old.clone().requires_grad_()
    loss = policy_loss_of("sapo")(f.tokens(theta), AlgorithmConfig(tau_pos=3.0, tau_neg=7.0)).loss
    loss.sum().backward()
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx([-1, -1, 0, -1, -1, 0.8, 0.8, 0.8])


@pytest.mark.parametrize(("loss", "share", "chosen"), [
    ("kl_cov", 0.0, {7}), ("kl_cov", 0.3, {7, 4}), ("kl_cov", 1.0, {0, 1, 3, 4, 5, 6, 7}),
    ("clip_cov", 0.0, {4}), ("clip_cov", 0.3, {4, 1}), ("clip_cov", 1.0, {4, 1}), ("clip_cov to 0.6", 1.0, {1}),
])  # fmt: skip
def test_how_many_tokens_covariance_chooses(f, on_policy, loss: str, share: float, chosen: set[int]) -> None:  # type: ignore[no-untyped-def]
    """Covariances with the step's means 8/35 and -0.952857: 0.195, 0.156, -, -0.885, 0.642, -0.774, -0.363, 1.283.

    Clip-Cov draws from tokens 1 and 4: token 0 is clipped already, and so is 7.
    """
    loss, _, above = loss.partition(" to ")
    options: dict[str, float] = {"clip_cov_lb": 0.1, "clip_cov_ub": float(above or 1.0), f"{loss}_ratio": share}
    config = AlgorithmConfig(policy_loss=loss, **options)  # type: ignore[arg-type]
    facts = step_statistics(f.tokens(), config, on_policy)
    found = policy_loss_of(loss)(f.tokens(statistics=facts), config).loss
    plain = policy_loss_of("ppo" if loss == "clip_cov" else loss)(f.tokens(), AlgorithmConfig(ppo_kl_coef=0.0)).loss
    assert set(torch.nonzero(found != plain).flatten().tolist()) == chosen


# Worked numbers of fixture F to six digits: losses, gradients, weights, statistics, anchors, KL.
#
# Everything goes the way of a run: configuration structs, resolved correction, statistics of the step, objective.
# `null` is a masked token, which must be exactly 0 in loss and gradient.


WORKED = json.loads((Path(__file__).parent / "golden" / "fixture_f.json").read_text())
DIGITS = 1e-6  # half a unit of the sixth digit, doubled for sums of rounded numbers
VERSIONS = torch.tensor([1, 1, 1, 0, 0, 2, 2, 2])


def flat(values: list[list[float | None]]) -> list[float]:
    return [0.0 if value is None else float(value) for part in values for value in part]


def correction_in(values: dict[str, Any], loss: str) -> Correction:
    config = CorrectionConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return corrected(config, max_staleness=0, policy_loss=loss)


def prepared(f, case: dict[str, Any], theta: Tensor, aggregation: str):  # type: ignore[no-untyped-def]
    """Tokens with the statistics of the step, configuration and correction of a case."""
    algorithm = AlgorithmConfig(**{"policy_loss": "ppo", **case["algorithm"]})
    correction = correction_in(case.get("correction", {}), algorithm.policy_loss)
    stale = torch.tensor([int(v) for v in flat(case["staleness"])]) if "staleness" in case else None
    columns: dict[str, Any] = {"staleness": stale}
    if needs(algorithm, correction) != "none":
        step = f.tokens(theta.detach(), **columns)
        columns["statistics"] = step_statistics(step, algorithm, correction)
        if correction.renormalize_after_rejection:
            columns["kept_scale"] = kept_scale(step, torch.tensor([7, 3]), aggregation, correction)
    return f.tokens(theta, **columns), algorithm, correction


@pytest.mark.parametrize("case", WORKED["policy"], ids=lambda case: case["name"])
def test_policy_losses(f, close, case: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    for mode in ("rollout_mean", "token_mean", "constant"):
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


@pytest.mark.parametrize("case", WORKED["weights"], ids=lambda case: case["name"])
def test_importance_weights(f, close, case: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    correction = correction_in({"use_tis": True, **case["correction"]}, "ppo")
    weight = weights_of(f.tokens(), correction).weight
    if "weight" in case:
        close(weight * f.mask, flat(case["weight"]))
    if "mean" in case:
        mean = step_statistics(f.tokens(), AlgorithmConfig(policy_loss="ppo"), correction).weight_mean
        assert mean == pytest.approx(case["mean"], abs=DIGITS)
        close(weight * f.mask / mean, flat(case["normalised"]))


@pytest.mark.parametrize("name", list(WORKED["statistics"]))
def test_statistics_of_rejection_rules(f, close, name: str) -> None:  # type: ignore[no-untyped-def]
    level, _, kind = name.rpartition("_")
    rule = RejectionRule(level, kind, 0.0, 0.0)  # type: ignore[arg-type]
    found = statistic(rule, log_weight_of(f.tokens(), Correction("decoupled", True)), f.tokens())
    expected = WORKED["statistics"][name]
    close(found, flat(expected) if level == "token" else expected)


@pytest.mark.parametrize("case", WORKED["rules"], ids=lambda case: "+".join(case["rules"]) or f"veto={case['veto']}")
def test_rejection_masks(f, case: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    correction = correction_in({"rollout_rs": case["rules"], "rs_veto": case.get("veto")}, "ppo")
    kept = rejection_of(f.tokens(), correction).kept
    assert kept.int().tolist() == [int(v) for v in flat(case["kept"])]


def test_log_linear_anchor(f, close) -> None:  # type: ignore[no-untyped-def]
    golden = WORKED["anchors"]
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


@pytest.mark.parametrize("case", WORKED["kl"], ids=lambda case: f"{case['kind']}{'-unbiased' * ('unbiased' in case)}")
def test_kl_to_the_reference(f, close, case: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    on_policy = Correction("onpolicy", False)

    def kl(t: PolicyTokens) -> Tensor:
        ratio = sampling_ratio(t, on_policy, torch.ones(8)) if "unbiased" in case else None
        assert t.ref_log_probs is not None
        return kl_to_reference(case["kind"], t.log_probs, t.ref_log_probs, t.mask, ratio)

    values, gradient = f.loss_and_gradient(kl)
    assert f.aggregate(values, "rollout_mean") == pytest.approx(case["rollout_mean"], abs=DIGITS)
    close(gradient, flat(case["gradient"]))
