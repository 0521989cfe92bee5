"""The reference that takes the policy's place, and the head of the critic; no Megatron needed."""

from __future__ import annotations

import pytest
import torch

from models.errors import TrainStateUnreadable
from models.train.megatron.trained_models import SwappedReference, ValueHead
from models.train.step.critic import ValueModel


def chunk(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    made[0].weight.data.normal_()
    return made.to(torch.bfloat16)


def state(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in module.state_dict().values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(left, right, strict=True))


def swapped() -> tuple[SwappedReference, torch.nn.Module, list[torch.Tensor], list[str]]:
    """A reference, the chunk that then was trained, what it was before, and calls of `settle`."""
    module, calls = chunk(0), list[str]()
    reference = SwappedReference([module], lambda: calls.append("settled"), renewed=True)
    before = state(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    return reference, module, before, calls


def test_the_reference_takes_the_place_of_the_policy_bit_by_bit() -> None:
    reference, module, before, calls = swapped()
    policy = state(module)
    with reference.in_place():
        assert calls == ["settled"]
        assert same(state(module), before)
        assert not same(state(module), policy)
    assert same(state(module), policy)


def test_the_policy_comes_back_after_an_error() -> None:
    reference, module, before, _ = swapped()
    policy = state(module)
    with pytest.raises(RuntimeError, match="in the middle"), reference.in_place():
        raise RuntimeError("in the middle")
    assert same(state(module), policy)
    with reference.in_place():
        assert same(state(module), before)


def test_a_renewed_reference_is_the_policy() -> None:
    reference, module, _, calls = swapped()
    reference.renew()
    assert calls == ["settled"]
    policy = state(module)
    with reference.in_place():
        assert same(state(module), policy)


def test_a_reference_of_another_shape_is_refused() -> None:
    reference, *_ = swapped()
    saved = {name: tensor.clone() for name, tensor in reference.state_tensors().items()}
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    saved["0.0.weight"] = torch.zeros(5)
    with pytest.raises(TrainStateUnreadable, match="--ref-load"):
        reference.load_state_tensors(saved)
    assert all(torch.equal(kept[name], tensor) for name, tensor in reference.state_tensors().items())


def test_the_value_head_begins_as_that_of_torch() -> None:
    own = ValueHead(8, seed=3, device=torch.device("cpu"))
    other = ValueModel(torch.nn.Identity(), 8, seed=3).value_head
    assert torch.equal(own.weight, other.weight)
    hidden = torch.randn(4, 8)
    torch.testing.assert_close(own(hidden.to(torch.bfloat16)), other(hidden.to(torch.bfloat16).float()).squeeze(-1))
