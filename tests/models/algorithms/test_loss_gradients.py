"""Gradients of every loss against finite differences in float64, with what is detached held fixed.

The oracle is written down here independently of the code: for each loss, the value as a function of theta, in which
detached factors are those of the point where the gradient is taken.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.correction import Correction
from models.algorithms.losses import policy_loss_of
from models.algorithms.metrics import step_statistics
from models.algorithms.objective import policy_objective

STEP = 1e-6
ON_POLICY = Correction("onpolicy", False)
BYPASS = Correction("bypass", False)
STALENESS = torch.tensor([1, 1, 1, 0, 0, 2, 2, 3])

LOSSES = {
    "ppo": AlgorithmConfig(policy_loss="ppo", eps_clip=0.2, eps_clip_high=0.28),
    "ppo dual": AlgorithmConfig(policy_loss="ppo", eps_clip=0.2, eps_clip_c=1.5),
    "gspo": AlgorithmConfig(policy_loss="gspo", eps_clip=0.2),
    "cispo": AlgorithmConfig(policy_loss="cispo", eps_clip=1.0, eps_clip_high=0.5),
    "kimi": AlgorithmConfig(policy_loss="kimi"),
    "dppo": AlgorithmConfig(policy_loss="dppo"),
    "topr": AlgorithmConfig(policy_loss="topr"),
    "topr_sequence": AlgorithmConfig(policy_loss="topr_sequence"),
    "aipo": AlgorithmConfig(policy_loss="aipo"),
    "m2po": AlgorithmConfig(policy_loss="m2po", m2po_threshold=0.05),
}


def frozen_losses(f, config: AlgorithmConfig) -> Callable[[Tensor], Tensor]:  # type: ignore[no-untyped-def]
    """Sum of the loss over the trainable tokens as a function of theta, detached factors taken at fixture F."""
    a, m, eps = f.advantages, f.mask, 0.2
    high = eps if config.eps_clip_high is None else config.eps_clip_high
    r0, rho0 = (f.theta - f.old).exp(), (f.theta - f.mu).exp()
    groups = [slice(0, 5), slice(5, 8)]

    def ppo_like(ratio: Tensor) -> Tensor:
        values = torch.maximum(-ratio * a, -ratio.clamp(1 - eps, 1 + high) * a)
        if config.eps_clip_c is not None:
            values = torch.where(a < 0, torch.minimum(values, -config.eps_clip_c * a), values)
        return values

    def gspo(theta: Tensor) -> Tensor:
        means = [((theta - f.old)[g] * m[g]).sum() / m[g].sum() for g in groups]
        return ppo_like(torch.cat([means[0].exp().repeat(5), means[1].exp().repeat(3)]))

    product = torch.cat([((f.theta - f.mu)[g] * m[g]).sum().exp().repeat(g.stop - g.start) for g in groups])
    far = (f.theta.exp() - f.mu.exp()).abs() > 0.15
    wrong_way = ((f.theta > f.mu) & (a > 0)) | ((f.theta < f.mu) & (a <= 0))
    table: dict[str, Callable[[Tensor], Tensor]] = {
        "ppo": lambda t: ppo_like((t - f.old).exp()),
        "gspo": gspo,
        "cispo": lambda t: -r0.clamp(max=1.5) * a * t,
        "kimi": lambda t: -a * t + 0.05 * (t - f.old).square(),
        "dppo": lambda t: torch.where(far & wrong_way, 0.0, -(t - f.mu).exp() * a) + 1e-3 * (t - f.mu).square(),
        "topr": lambda t: -torch.where(a > 0, 1.0, rho0.clamp(max=1)) * a * t,
        "topr_sequence": lambda t: -torch.where(a > 0, 1.0, product.clamp(max=1)) * a * t,
        "aipo": lambda t: -rho0.clamp(max=2) * a * t,
        "m2po": lambda t: torch.where((f.theta - f.mu).square() > 0.1, 0.0, -(t - f.mu).exp() * a),
    }
    return lambda theta: (table[config.policy_loss](theta) * m).sum()


def central_differences(f, function: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[no-untyped-def]
    out = torch.zeros(8, dtype=torch.float64)
    for index in range(8):
        move = torch.zeros(8, dtype=torch.float64)
        move[index] = STEP
        out[index] = (function(f.theta + move) - function(f.theta - move)) / (2 * STEP)
    return out


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_loss(f, name: str) -> None:  # type: ignore[no-untyped-def]
    config = LOSSES[name]
    statistics = step_statistics(f.tokens(), config, BYPASS)
    oracle = frozen_losses(f, config)
    theta = f.theta.clone().requires_grad_()
    loss = policy_loss_of(config.policy_loss)(f.tokens(theta, statistics=statistics), config).loss
    assert float(loss.detach().sum()) == pytest.approx(float(oracle(f.theta)), abs=1e-12)
    loss.sum().backward()
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad, central_differences(f, oracle), atol=1e-8, rtol=1e-7)


CORRECTIONS = {
    "on-policy": ON_POLICY,
    "token": Correction("decoupled", True, tis_clip_low=0.1, tis_clip=1.2),
    "sequence": Correction("decoupled", True, tis_level="sequence"),
    "geometric": Correction("decoupled", True, tis_level="geometric"),
    "icepop": Correction("decoupled", True, tis_clip_low=0.75, tis_clip=1.3, tis_mode="icepop"),
    "seq_mask": Correction("decoupled", True, tis_mode="seq_mask"),
    "decay": Correction("decoupled", True, tis_clip=1.5, tis_clip_decay=0.5),
    "batch-normalised": Correction("decoupled", True, tis_clip=1.2, tis_batch_normalize=True),
    "rejection": Correction("decoupled", True, rollout_rs=("token_k1=0.8_1.25",)),
    "veto": Correction("decoupled", False, rs_veto=0.75),
    "opsm": Correction("onpolicy", False, use_opsm=True, opsm_delta=0.03),
}


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "kimi"])
@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_corrections_scale_the_gradient_and_have_none(f, loss: str, name: str) -> None:  # type: ignore[no-untyped-def]
    """Against a fixed anchor no weight depends on theta, so plain differences of the whole loss must agree."""
    config, correction = LOSSES[loss], CORRECTIONS[name]
    stale = STALENESS
    statistics = step_statistics(f.tokens(staleness=stale), config, correction)
    function = policy_loss_of(config.policy_loss)

    def gradient(chosen: Correction) -> Tensor:
        theta = f.theta.clone().requires_grad_()
        policy_objective(
            f.tokens(theta, staleness=stale, statistics=statistics), config, chosen, function
        ).loss.sum().backward()
        assert theta.grad is not None
        return theta.grad

    def value(theta: Tensor) -> Tensor:
        return policy_objective(
            f.tokens(theta, staleness=stale, statistics=statistics), config, correction, function
        ).loss.sum()

    if loss != "cispo":  # its factor is detached and moves with theta
        torch.testing.assert_close(gradient(correction), central_differences(f, value), atol=1e-8, rtol=1e-7)
    if loss == "gspo":  # one ratio for all: a token's weight reaches the gradient of its neighbours
        return
    tokens = f.tokens(staleness=stale, statistics=statistics)
    base = function(tokens, config).loss
    whole = policy_objective(tokens, config, correction, function).loss
    factor = torch.where(base != 0, whole / torch.where(base != 0, base, 1.0), 0.0)
    torch.testing.assert_close(gradient(correction), factor * gradient(ON_POLICY))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize(
    "correction",
    [ON_POLICY, BYPASS, CORRECTIONS["token"], CORRECTIONS["geometric"]],
    ids=lambda c: f"{c.policy_mode}-{c.tis_level}",
)
def test_unbiased_kl_keeps_the_gradient_of_its_ratio(f, kind: str, correction: Correction) -> None:  # type: ignore[no-untyped-def]
    config = AlgorithmConfig(
        policy_loss="ppo", use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind, use_unbiased_kl=True
    )
    silent = f.advantages * 0

    def value(theta: Tensor) -> Tensor:
        tokens = f.tokens(theta, advantages=silent)
        return policy_objective(tokens, config, correction, policy_loss_of("ppo")).loss.sum()

    theta = f.theta.clone().requires_grad_()
    value(theta).backward()
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad, central_differences(f, value), atol=1e-7, rtol=1e-6)
    difference = f.theta - f.ref
    sampler = f.old if correction.policy_mode == "onpolicy" else f.mu
    by_hand = (f.theta - sampler).exp()
    if correction.policy_mode == "bypass":
        by_hand = by_hand.clamp(max=correction.tis_clip)
    elif correction.policy_mode == "decoupled":
        deltas = f.old - f.mu
        if correction.tis_level == "geometric":
            means = [(deltas * f.mask)[:5].sum() / 4, deltas[5:].mean()]
            weight = torch.cat([means[0].exp().repeat(5), means[1].exp().repeat(3)])
        else:
            weight = deltas.exp().clamp(0.1, 1.2)
        by_hand = (f.theta - f.old).exp() * weight
    k3 = (-difference).exp() - 1 + difference
    estimate = {"k1": difference, "k2": difference.square() / 2, "k3": k3, "low_var_kl": k3}[kind]
    assert float(value(f.theta)) == pytest.approx(float((by_hand * estimate * f.mask).sum()), abs=1e-12)


def test_the_log_linear_anchor_is_detached(f) -> None:  # type: ignore[no-untyped-def]
    correction = Correction("decoupled", True, tis_clip=2.0, prox="loglinear")
    config = LOSSES["kimi"]
    theta = f.theta.clone().requires_grad_()
    tokens = f.tokens(theta, staleness=STALENESS)
    policy_objective(tokens, config, correction, policy_loss_of("kimi")).loss.sum().backward()
    assert theta.grad is not None
    share = STALENESS.double() / (STALENESS + 1)
    anchor = f.mu + share * (f.theta - f.mu)
    weight = (anchor - f.mu).exp().clamp(max=2.0)
    expected = weight * (-f.advantages + 0.1 * (f.theta - anchor)) * f.mask
    torch.testing.assert_close(theta.grad, expected, atol=1e-12, rtol=1e-9)
