"""Learning-rate schedule and optimizer details."""

from __future__ import annotations

import pytest
import torch

from configs.schema.train import TrainConfig
from models.errors import TrainConfigInvalid
from models.train.huggingface.updates import Updater
from models.train.spec import check_schedule, learning_rate


def rates(total: int | None, steps: int, **fields: object) -> list[float]:
    train = TrainConfig(lr=1.0, **fields)  # type: ignore[arg-type]
    return [learning_rate(step, train, total) for step in range(steps)]


def test_warm_up_then_constant() -> None:
    assert rates(None, 6, lr_warmup_iters=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay() -> None:
    assert rates(6, 8, lr_decay_style="linear", lr_warmup_iters=2, min_lr=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine_decay() -> None:
    found = rates(4, 6, lr_decay_style="cosine", min_lr=0.1)
    assert found == pytest.approx([1.0, 0.1 + 0.9 * 0.853553, 0.55, 0.1 + 0.9 * 0.146447, 0.1, 0.1], abs=1e-5)


def test_a_decay_needs_an_end() -> None:
    with pytest.raises(TrainConfigInvalid, match=r"lr_decay_style=linear needs the number .*--num-rollout"):
        check_schedule(TrainConfig(lr_decay_style="linear"), None)
    with pytest.raises(TrainConfigInvalid, match="a decay cannot rise"):
        check_schedule(TrainConfig(lr_decay_style="cosine", lr=1e-6, min_lr=1e-5), 10)
    check_schedule(TrainConfig(), None)


def model_with_gradients(scale: float) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * scale
    return model


def test_gradients_are_divided_then_clipped() -> None:
    """Ten times the numerator over ten times the denominator is the same update; the norm is that of the quotient."""
    results = []
    for factor in (1.0, 10.0):
        model = model_with_gradients(factor)
        updater = Updater(model, TrainConfig(lr=0.1, clip_grad=0.5, adam_eps=1.0), None)
        result = updater.apply(factor)
        assert result.applied
        assert result.grad_norm == pytest.approx(8**0.5, rel=1e-5)
        assert all(parameter.grad is None for parameter in model.parameters())
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results)
    # First AdamW step: lr * g / (|g| + eps) with g the clipped gradient.
    clipped = 0.5 / 8**0.5
    before = model_with_gradients(1.0).weight
    torch.testing.assert_close(results[0], before - 0.1 * clipped / (clipped + 1.0))


def test_weight_decay_spares_vectors() -> None:
    model = model_with_gradients(0.0)
    bias, weight = model.bias.detach().clone(), model.weight.detach().clone()
    Updater(model, TrainConfig(lr=0.1, weight_decay=0.5), None).apply(1.0)
    torch.testing.assert_close(model.bias, bias)
    torch.testing.assert_close(model.weight, weight * 0.95)


def test_no_gradient_at_all_is_no_update() -> None:
    updater = Updater(torch.nn.Linear(2, 2), TrainConfig(), None)
    assert not updater.apply(1.0).applied
    assert updater.updates == 0


def test_updates_use_the_rate_of_the_schedule() -> None:
    """AdamW's first update moves each weight by the learning rate: lr * g / |g|."""
    for warm_up in (1, 4):
        model = model_with_gradients(1.0)
        before = model.weight.detach().clone()
        result = Updater(model, TrainConfig(lr=0.1, lr_warmup_iters=warm_up), None).apply(1.0)
        assert result.lr == pytest.approx(0.1 / warm_up)
        torch.testing.assert_close(model.weight.detach(), before - 0.1 / warm_up)
