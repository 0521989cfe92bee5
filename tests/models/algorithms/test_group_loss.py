"""Losses of one's own over whole groups, and preference optimisation as the worked example."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.dpo import dpo
from models.algorithms.metrics import MetricTotals
from models.algorithms.objective import GroupColumns, GroupLoss, group_loss_of, group_objective
from models.algorithms.tokens import PolicyTokens
from models.errors import AlgorithmError, MissingColumn, UnknownAlgorithm

DPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
PAIR = GroupColumns(
    group=torch.tensor([0, 0]), rollout=torch.tensor([0, 1]), reward=torch.tensor([1.0, 0.0]), n_groups=1, n_rollouts=2
)


def columns(group: list[int], rollout: list[int], reward: list[float]) -> GroupColumns:
    return GroupColumns(
        group=torch.tensor(group),
        rollout=torch.tensor(rollout),
        reward=torch.tensor(reward, dtype=torch.float64),
        n_groups=max(group) + 1,
        n_rollouts=max(rollout) + 1,
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


def test_the_documented_example_raises_the_best_of_each_group(f) -> None:  # type: ignore[no-untyped-def]
    loss = documented("custom_losses.md")(f.tokens(), PAIR, DPO)
    assert loss.tolist() == pytest.approx([-float((f.theta * f.mask)[f.sequence == 0].sum()), 0.0])


def test_losses_per_token_and_metrics(f, close) -> None:  # type: ignore[no-untyped-def]
    def own(tokens: PolicyTokens, groups: GroupColumns, config: AlgorithmConfig) -> GroupLoss:
        return GroupLoss(-tokens.log_probs, {"custom/reward": groups.reward, "custom/nll": -tokens.log_probs})

    theta = f.theta.clone().requires_grad_()
    tokens = f.tokens(theta, entropy=torch.ones(8, dtype=torch.float64))
    objective = group_objective(tokens, PAIR, DPO, own)
    close(objective.loss, torch.where(f.mask, -f.theta, 0.0).tolist())
    totals = MetricTotals()
    totals.add(objective.metrics, f.weights("token_mean")[0])
    expected = {"custom/reward": 4 / 7, "custom/nll": 0.952857, "train/loss": 0.952857, "train/entropy_loss": 1.0}
    assert totals.result(7.0) == pytest.approx(expected, abs=1e-6)


def test_a_wrong_shape_is_refused(f) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AlgorithmError, match=r"loss of the custom loss has shape \[3\].*per sequence \[2\].*\[8\]"):
        group_objective(f.tokens(), PAIR, DPO, lambda t, g, c: torch.zeros(3))
    wrong = GroupLoss(torch.zeros(2), {"custom/x": torch.zeros(())})
    with pytest.raises(AlgorithmError, match="metric custom/x of the custom loss has shape"):
        group_objective(f.tokens(), PAIR, DPO, lambda t, g, c: wrong)


def test_it_is_chosen_by_import_path() -> None:
    assert group_loss_of("models.algorithms.dpo:dpo") is dpo
    with pytest.raises(UnknownAlgorithm, match="has no 'ipo'"):
        group_loss_of("models.algorithms.dpo:ipo")


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
    totals = MetricTotals()
    totals.add(objective.metrics, f.weights("rollout_mean")[0])
    found = totals.result(2.0)
    assert found["custom/margin"] == pytest.approx(advance)
    assert found["custom/accuracy"] == pytest.approx(float(advance > 0))


def tokens_of(lengths: list[int]) -> PolicyTokens:
    n = sum(lengths)
    generator = torch.Generator().manual_seed(1)
    theta = -torch.rand(n, dtype=torch.float64, generator=generator)
    return PolicyTokens(
        log_probs=theta.requires_grad_(),
        old_log_probs=theta.detach(),
        rollout_log_probs=theta.detach(),
        advantages=torch.zeros(n, dtype=torch.float64),
        mask=torch.ones(n, dtype=torch.bool),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        n_sequences=len(lengths),
        ref_log_probs=-torch.rand(n, dtype=torch.float64, generator=generator),
    )


def test_groups_are_compared_each_on_its_own() -> None:
    """Group 0: rollouts 0 (two sequences), 1, 2; group 1: no difference; group 2: rollouts 5, 6 in disorder."""
    lengths = [2, 3, 1, 2, 1, 3, 2, 2]
    groups = columns([0, 0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 2, 3, 4, 6, 5], [1, 1, 0.5, 0, 0.7, 0.7, -1, 4])
    tokens = tokens_of(lengths)
    result = dpo(tokens, groups, DPO)
    assert tokens.ref_log_probs is not None
    ratios = (tokens.log_probs - tokens.ref_log_probs).detach()
    per_sequence = torch.zeros(8, dtype=torch.float64).index_add(0, tokens.sequence, ratios)

    def pair(best: list[int], worst: list[int]) -> float:
        return math.log1p(math.exp(-0.1 * float(per_sequence[best].sum() - per_sequence[worst].sum())))

    first, last = pair([0, 1], [3]), pair([7], [6])
    assert result.loss.tolist() == pytest.approx([first * 1.5, first * 1.5, 0, first * 1.5, 0, 0, last, last])
    result.loss.sum().backward()
    gradient = tokens.log_probs.grad
    assert gradient is not None
    by_sequence = torch.zeros(8, dtype=torch.float64).index_add(0, tokens.sequence, gradient.sign())
    assert by_sequence.tolist() == [-2, -3, 0, 2, 0, 0, 2, -2]


def test_no_pair_has_a_graph_all_the_same() -> None:
    tokens = tokens_of([2, 2])
    loss = dpo(tokens, columns([0, 0], [0, 1], [1, 1]), DPO).loss
    assert loss.tolist() == [0, 0]
    loss.sum().backward()
    assert tokens.log_probs.grad is not None
    assert (tokens.log_probs.grad == 0).all()


def test_order_of_sequences_does_not_matter() -> None:
    tokens = tokens_of([2, 3, 1, 2])
    groups = columns([0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 3, 2])
    straight = dpo(tokens, groups, DPO).loss
    order = torch.tensor([2, 0, 3, 1])  # new name of each sequence
    back = order.argsort()
    moved = PolicyTokens(**{**tokens.__dict__, "sequence": order[tokens.sequence]})
    shuffled = GroupColumns(
        group=groups.group[back], rollout=groups.rollout[back], reward=groups.reward[back], n_groups=2, n_rollouts=4
    )
    torch.testing.assert_close(dpo(moved, shuffled, DPO).loss, straight[back])


def test_reference_and_beta_are_needed(f) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MissingColumn, match="--use-kl-loss"):
        dpo(f.tokens(ref_log_probs=None), PAIR, DPO)
    with pytest.raises(MissingColumn, match="--kl-loss-coef above 0"):
        dpo(f.tokens(), PAIR, AlgorithmConfig())
