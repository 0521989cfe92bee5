"""Properties of the objective: detachment by finite differences, masking, permutation, bounds, empty input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.correction import token_tis
from models.algorithms.losses import clip_bounds, ppo_clip
from models.algorithms.metrics import MetricTotals
from models.algorithms.modes import Correction
from models.algorithms.objective import policy_objective
from models.algorithms.tokens import PolicyTokens

CONFIG = AlgorithmConfig(eps_clip=0.2, eps_clip_high=0.28, use_kl_loss=True, kl_loss_coef=0.05)
TIS = Correction(mode="decoupled", use_tis=True, low=0.1, high=1.5)
MODES = [TIS, Correction(mode="onpolicy", use_tis=False), Correction(mode="bypass", use_tis=False)]

log_prob = st.floats(-8, 0)


@st.composite
def token_sets(draw: st.DrawFn, *, min_size: int = 0) -> PolicyTokens:
    n = draw(st.integers(min_size, 7))

    def column(values: st.SearchStrategy[float]) -> Tensor:
        return torch.tensor(draw(st.lists(values, min_size=n, max_size=n)), dtype=torch.float64)

    return PolicyTokens(
        log_probs=column(log_prob),
        old_log_probs=column(log_prob),
        rollout_log_probs=column(log_prob),
        advantages=column(st.floats(-3, 3)),
        mask=torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool),
        sequence=torch.zeros(n, dtype=torch.int64),
        n_sequences=1,
        ref_log_probs=column(log_prob),
    )


def changed(tokens: PolicyTokens, **changes: Tensor) -> PolicyTokens:
    return PolicyTokens(**{**tokens.__dict__, **changes})


def loss_of(tokens: PolicyTokens, correction: Correction = TIS, config: AlgorithmConfig = CONFIG) -> Tensor:
    return policy_objective(tokens, config, correction, ppo_clip).loss


def gradient_of(tokens: PolicyTokens, correction: Correction = TIS) -> Tensor:
    theta = tokens.log_probs.clone().requires_grad_()
    loss_of(changed(tokens, log_probs=theta), correction).sum().backward()
    assert theta.grad is not None
    return theta.grad


@pytest.mark.parametrize("correction", MODES, ids=lambda c: c.mode)
def test_gradient_agrees_with_finite_differences(f, correction: Correction) -> None:  # type: ignore[no-untyped-def]
    """With anchor, weight and reference held fixed, which is what detaching them means."""
    anchor = f.mu if correction.mode == "bypass" else f.old
    tokens = f.tokens(old_log_probs=anchor)
    analytic = gradient_of(tokens, correction)
    step = 1e-6
    for index in range(8):
        values = []
        for sign in (1, -1):
            moved = f.theta.clone()
            moved[index] += sign * step
            values.append(float(loss_of(changed(tokens, log_probs=moved), correction).sum()))
        assert float(analytic[index]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-6)


def test_no_gradient_flows_through_weight_and_anchor() -> None:
    """One step per batch: the anchor is theta itself, detached; the weight changes with theta, without gradient."""
    theta = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([-1.3, -1.8], dtype=torch.float64)
    tokens = PolicyTokens(
        log_probs=theta,
        old_log_probs=theta.detach(),
        rollout_log_probs=mu,
        advantages=torch.tensor([1.0, -2.0], dtype=torch.float64),
        mask=torch.ones(2, dtype=torch.bool),
        sequence=torch.zeros(2, dtype=torch.int64),
        n_sequences=1,
    )
    loss_of(tokens, config=AlgorithmConfig()).sum().backward()
    weight = (theta.detach() - mu).exp().clamp(0.1, 1.5)
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad, -weight * tokens.advantages)
    attached = theta.clone().requires_grad_()
    assert not token_tis(attached, mu, tokens.mask, low=0.0, high=2.0).weight.requires_grad


@settings(max_examples=30)
@given(token_sets())
def test_masked_tokens_are_invisible(tokens: PolicyTokens) -> None:
    for poison in (float("nan"), float("inf"), -float("inf"), 1000.0, -1000.0):
        bad = torch.full_like(tokens.log_probs, poison)
        poisoned = changed(
            tokens,
            **{
                name: torch.where(tokens.mask, getattr(tokens, name), bad)
                for name in ("old_log_probs", "rollout_log_probs", "advantages", "ref_log_probs")
            },
        )
        for correction in MODES:
            loss = loss_of(poisoned, correction)
            assert torch.equal(loss, loss_of(tokens, correction))
            assert (loss[~tokens.mask] == 0).all()
            gradient = gradient_of(poisoned, correction)
            assert torch.equal(gradient, gradient_of(tokens, correction))
            assert (gradient[~tokens.mask] == 0).all()


@given(token_sets(min_size=1), st.randoms())
def test_permutation(tokens: PolicyTokens, random: object) -> None:
    order = list(range(len(tokens.mask)))
    random.shuffle(order)  # type: ignore[attr-defined]
    index = torch.tensor(order)
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "mask", "ref_log_probs")
    shuffled = changed(tokens, **{name: getattr(tokens, name)[index] for name in names})
    torch.testing.assert_close(loss_of(shuffled), loss_of(tokens)[index])


@given(token_sets())
def test_clip_is_a_pessimistic_bound(tokens: PolicyTokens) -> None:
    result = ppo_clip(tokens, CONFIG)
    low, high = clip_bounds(CONFIG)
    ratio = (tokens.log_probs - tokens.old_log_probs).exp()
    assert (result.loss >= -ratio * tokens.advantages * tokens.mask - 1e-9).all()
    assert not (result.clipped_high & result.clipped_low).any()
    assert (ratio[result.clipped_high] > high).all()
    assert (ratio[result.clipped_low] < low).all()
    gradient = gradient_of(changed(tokens, ref_log_probs=tokens.log_probs), Correction(mode="onpolicy", use_tis=False))
    held = result.clipped_high | result.clipped_low
    assert (gradient[held].abs() < 1e-9).all()


@given(token_sets(), st.floats(-1000, 1000))
def test_huge_log_ratios_stay_finite(tokens: PolicyTokens, shift: float) -> None:
    far = changed(tokens, rollout_log_probs=tokens.rollout_log_probs + shift)
    weights = token_tis(far.old_log_probs, far.rollout_log_probs, far.mask, low=0.1, high=1.5)
    assert (weights.weight >= 0.1).all()
    assert (weights.weight <= 1.5).all()
    for correction in MODES:
        anchored = changed(far, old_log_probs=far.rollout_log_probs) if correction.mode == "bypass" else far
        assert torch.isfinite(loss_of(anchored, correction)).all()
        assert torch.isfinite(gradient_of(anchored, correction)).all()


@given(token_sets())
def test_sign_of_the_gradient_follows_the_advantage(tokens: PolicyTokens) -> None:
    """On-policy, a positive advantage raises the token's probability."""
    fresh = changed(tokens, old_log_probs=tokens.log_probs, ref_log_probs=tokens.log_probs)
    gradient = gradient_of(fresh)
    live = tokens.mask & (tokens.advantages.abs() > 1e-6)
    assert (torch.sign(gradient[live]) == -torch.sign(tokens.advantages[live])).all()


@settings(max_examples=10)
@given(token_sets())
def test_fully_masked_and_empty_input(tokens: PolicyTokens) -> None:
    dark = changed(tokens, mask=torch.zeros_like(tokens.mask))
    objective = policy_objective(dark, CONFIG, TIS, ppo_clip)
    assert (objective.loss == 0).all()
    totals = MetricTotals()
    totals.add(objective.metrics, torch.zeros(len(tokens.mask), dtype=torch.float64))
    assert all(value in (0.0, 1.0) for value in totals.result(1.0).values())


@given(token_sets())
def test_modes_agree_where_nothing_is_stale(tokens: PolicyTokens) -> None:
    fresh = changed(tokens, old_log_probs=tokens.log_probs, rollout_log_probs=tokens.log_probs)
    first, *others = [gradient_of(fresh, correction) for correction in MODES]
    for other in others:
        torch.testing.assert_close(other, first)


@given(token_sets())
def test_inputs_are_not_changed_in_place(tokens: PolicyTokens) -> None:
    before = {name: value.clone() for name, value in tokens.__dict__.items() if isinstance(value, Tensor)}
    gradient_of(tokens)
    for name, value in before.items():
        assert torch.equal(getattr(tokens, name), value)
