"""Losses of one's own over whole groups, and preference optimisation as the worked example."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.correction import Correction
from models.algorithms.dpo import dpo
from models.algorithms.losses import policy_loss_of
from models.algorithms.objective import GroupColumns, GroupLoss, group_objective, policy_objective
from models.algorithms.tokens import PolicyTokens
from models.errors import AlgorithmError, MissingColumn
from tests.models.corrections import totals_of

DPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
PAIR = GroupColumns(
    group=torch.tensor([0, 0]), rollout=torch.tensor([0, 1]), reward=torch.tensor([1.0, 0.0]), n_groups=1, n_rollouts=2
)


def test_the_loss_of_a_sequence_is_that_of_each_of_its_tokens(f, close) -> None:  # type: ignore[no-untyped-def]
    def mean_reward(tokens: PolicyTokens, groups: GroupColumns, config: AlgorithmConfig) -> Tensor:
        return groups.reward.double() * 3 + 0 * tokens.log_probs.sum()

    objective = group_objective(f.tokens(), PAIR, DPO, mean_reward)
    close(objective.loss, [3, 3, 0, 3, 3, 0, 0, 0])
    assert f.aggregate(objective.loss, "rollout_mean") == pytest.approx(1.5)
    assert torch.equal(objective.kept, f.mask)


def documented(page: str) -> Any:
    """The example of a group loss on a page of docs/."""
    text = (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8")
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "groups" in one]
    (name,) = re.findall(r"--custom-loss-function-path my_project\.losses:(\w+)", text)
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope[name]


@pytest.mark.parametrize("function", [dpo, documented("custom_losses.md")], ids=["dpo", "docs/custom_losses.md"])
def test_an_example_stays_on_the_device_of_its_tensors_and_never_waits_for_it(f, function: Any) -> None:  # type: ignore[no-untyped-def]
    """On torch's device without contents, other devices and reading a value are errors, as they are slow on a GPU."""

    def moved(one: Any) -> Any:
        fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        tensors = {name: value.to("meta") for name, value in fields.items() if isinstance(value, Tensor)}
        return dataclasses.replace(one, **tensors)

    result = function(moved(f.tokens(f.theta.clone().requires_grad_())), moved(PAIR), DPO)
    loss = result.loss if isinstance(result, GroupLoss) else result
    assert loss.device.type == "meta"
    assert loss.requires_grad


def test_losses_per_token_and_metrics(f, close) -> None:  # type: ignore[no-untyped-def]
    def own(tokens: PolicyTokens, groups: GroupColumns, config: AlgorithmConfig) -> GroupLoss:
        return GroupLoss(-tokens.log_probs, {"custom/reward": groups.reward, "custom/nll": -tokens.log_probs})

    theta = f.theta.clone().requires_grad_()
    tokens = f.tokens(theta, entropy=torch.ones(8, dtype=torch.float64))
    objective = group_objective(tokens, PAIR, DPO, own)
    close(objective.loss, torch.where(f.mask, -f.theta, 0.0).tolist())
    expected = {"custom/reward": 4 / 7, "custom/nll": 0.952857, "train/loss": 0.952857, "train/entropy_loss": 1.0}
    assert totals_of(objective, *f.weights("token_mean")) == pytest.approx(expected, abs=1e-6)


def test_a_wrong_shape_is_refused(f) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AlgorithmError, match=r"loss of the custom loss has shape \[3\].*per sequence \[2\].*\[8\]"):
        group_objective(f.tokens(), PAIR, DPO, lambda t, g, c: torch.zeros(3))
    wrong = GroupLoss(torch.zeros(2), {"custom/x": torch.zeros(())})
    with pytest.raises(AlgorithmError, match="metric custom/x of the custom loss has shape"):
        group_objective(f.tokens(), PAIR, DPO, lambda t, g, c: wrong)


def test_preference_of_the_better_rollout(f) -> None:  # type: ignore[no-untyped-def]
    theta = f.theta.clone().requires_grad_()
    objective = group_objective(f.tokens(theta), PAIR, DPO, dpo)
    ratios = torch.where(f.mask, f.theta - f.ref, 0.0)
    advance = 0.1 * float(ratios[:5].sum() - ratios[5:].sum())
    expected = math.log1p(math.exp(-advance))
    mean = (objective.loss * f.weights("rollout_mean")[0]).sum() / 2
    assert float(mean.detach()) == pytest.approx(expected)  # the mean over rollouts is that over pairs
    mean.backward()
    slope = -0.1 / (1 + math.exp(advance))
    assert theta.grad is not None
    assert theta.grad.tolist() == pytest.approx([slope, slope, 0, slope, slope, -slope, -slope, -slope])
    found = totals_of(objective, *f.weights("rollout_mean"))
    assert found["custom/margin"] == pytest.approx(advance)
    assert found["custom/accuracy"] == pytest.approx(float(advance > 0))


def test_no_pair_has_a_graph_all_the_same(f) -> None:  # type: ignore[no-untyped-def]
    theta = f.theta.clone().requires_grad_()
    loss = dpo(f.tokens(theta), dataclasses.replace(PAIR, reward=torch.ones(2)), DPO).loss
    assert loss.tolist() == [0, 0]
    loss.sum().backward()
    assert theta.grad is not None
    assert (theta.grad == 0).all()


def test_reference_and_beta_are_needed(f) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MissingColumn, match="--use-kl-loss"):
        dpo(f.tokens(ref_log_probs=None), PAIR, DPO)
    with pytest.raises(MissingColumn, match="--kl-loss-coef above 0"):
        dpo(f.tokens(), PAIR, AlgorithmConfig())


# The KL to the reference that keeps the gradient of its ratio, against finite differences in float64.


STEP = 1e-6
ON_POLICY = Correction("onpolicy", False)
BYPASS = Correction("bypass", False)
BY_TOKEN = Correction("decoupled", True, tis_clip_low=0.1, tis_clip=1.2)
GEOMETRIC = Correction("decoupled", True, tis_level="geometric")


def central_differences(f, function: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[no-untyped-def]
    out = torch.zeros(8, dtype=torch.float64)
    for index in range(8):
        move = torch.zeros(8, dtype=torch.float64)
        move[index] = STEP
        out[index] = (function(f.theta + move) - function(f.theta - move)) / (2 * STEP)
    return out


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize(
    "correction", [ON_POLICY, BYPASS, BY_TOKEN, GEOMETRIC], ids=lambda c: f"{c.policy_mode}-{c.tis_level}"
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
