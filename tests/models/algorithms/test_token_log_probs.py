"""Log-probs and entropies block by block: values, gradients, what is minus infinity, and the memory that they take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from configs.plan.memory import log_prob_pass
from models.algorithms import tokens as module
from models.algorithms.tokens import OutputLayer, token_log_probs
from tests.models.living import Living


@pytest.mark.parametrize("block", [1, 2, 16])
def test_a_logit_of_minus_infinity_has_no_share_in_values_and_gradients(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGPROB_CHUNK_IDS", block)
    hidden = torch.tensor([[0.4, -1.0]], dtype=torch.float64)
    rows = torch.tensor([[1.0, 0.3], [0.2, -0.7], [-1.0, 0.5], [0.1, 0.1]], dtype=torch.float64)
    blocked = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf], dtype=torch.float64)
    results = []
    for weight, bias in ((rows[:2], None), (rows, blocked)):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        log_probs, entropy = token_log_probs(
            inputs[0], OutputLayer(inputs[1], bias), torch.tensor([1]), temperature=0.7, entropy="graph"
        )
        assert entropy is not None
        (log_probs + 3.0 * entropy).sum().backward()
        gradients = [one.grad for one in inputs if one.grad is not None]
        assert not gradients[1][2:].any()
        results.append((log_probs, entropy, gradients[0], gradients[1][:2]))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


def test_a_logit_that_is_no_number_is_seen() -> None:
    hidden = torch.ones(2, 3, requires_grad=True)
    bias = torch.tensor([0.0, math.nan, 0.0, 0.0])
    log_probs, entropy = token_log_probs(
        hidden, OutputLayer(torch.ones(4, 3), bias), torch.tensor([0, 2]), entropy="graph"
    )
    assert log_probs.isnan().all()
    assert entropy is not None
    assert entropy.isnan().all()
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isnan().all()


def plain(hidden: Tensor, layer: OutputLayer, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """The same from all logits at once; `temperature` is that of all, or [N]."""
    divisor = temperature if isinstance(temperature, float) else temperature[:, None]
    log_probs = (layer(hidden) / divisor).log_softmax(-1)
    return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 9),
    st.integers(1, 23),
    st.integers(1, 4),
    st.integers(1, 25),
    st.sampled_from(["none", "value", "graph"]),
    st.sampled_from([(1.0, None), (0.5, None), (2.0, 1.5)]),
    st.booleans(),
    st.booleans(),
)
def test_blocks_change_nothing(
    count: int, ids: int, chunk: int, block: int, entropy: str, form: tuple[float, float | None], bias: bool, each: bool
) -> None:
    """Values and gradients are those of all logits at once, whatever is computed at one time, and also where each token
    has a temperature of its own."""
    temperature = torch.linspace(0.5, 3.0, count, dtype=torch.float64) if each else 0.7
    generator = torch.Generator().manual_seed(count * ids)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    hidden, weight, row_bias = made(count, 3), made(ids, 3), made(ids) if bias else None
    targets = torch.randint(ids, (count,), generator=generator)
    layer = OutputLayer(weight, row_bias, *form)
    inputs = [hidden, weight, *([] if row_bias is None else [row_bias])]
    weights = torch.linspace(0.5, 2.0, count, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOGPROB_CHUNK_IDS", block)
        log_probs, found = token_log_probs(
            hidden, layer, targets, temperature=temperature, entropy=entropy, chunk_tokens=chunk
        )
        loss = (log_probs * weights).sum()
        if entropy == "graph":
            assert found is not None
            loss = loss + (found * weights.flip(0)).sum()
        gradients = torch.autograd.grad(loss, inputs)
    expected_log_probs, expected_entropies = plain(hidden, layer, targets, temperature)
    expected = (expected_log_probs * weights).sum()
    if entropy == "graph":
        expected = expected + (expected_entropies * weights.flip(0)).sum()
    torch.testing.assert_close(log_probs, expected_log_probs)
    assert (found is None) == (entropy == "none")
    if found is not None:
        torch.testing.assert_close(found, expected_entropies)
        assert found.requires_grad == (entropy == "graph")
    for left, right in zip(gradients, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("half", [False, True])
def test_autocast_computes_logits_in_its_precision_and_sums_in_fp32(half: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    targets = torch.arange(20)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        found, _ = token_log_probs(hidden, OutputLayer(weight), targets, chunk_tokens=7)
    rounded = [one.detach().bfloat16().float() if half else one.detach() for one in (hidden, weight)]
    expected = plain(rounded[0], OutputLayer(rounded[1]), targets, 1.0)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.05 if half else 1e-5, rtol=0)
    found.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", ["none", "value", "graph"])
def test_the_pass_holds_one_block_of_logits_and_what_the_plan_says(entropy: str, dtype: torch.dtype) -> None:
    """At the vocabulary of Qwen3, of 152,000 ids: all logits of these 64 tokens would be 37 MiB, several times."""
    count, chunk, ids, width = 64, 16, 151_936, 2
    hidden = torch.randn(count, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(ids, width, dtype=dtype, requires_grad=True)
    living, targets = Living(hidden, weight), torch.randint(ids, (count,))
    with living:
        log_probs, found = token_log_probs(hidden, OutputLayer(weight), targets, entropy=entropy, chunk_tokens=chunk)
        loss = log_probs.sum() if found is None else log_probs.sum() + found.sum()
        loss.backward()
    planned = log_prob_pass(count, chunk, ids, width, dtype.itemsize)
    assert planned / 2 < living.peak <= planned
    assert living.peak < 0.1 * count * ids * 4


class LargeOperations(TorchDispatchMode):
    """Operations with an outcome of at least `numbers` numbers, in their order, and how many of them took new memory
    for it."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.names, self.allocations = numbers, list[str](), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel() >= self.numbers:
                self.names.append(str(function))
                self.allocations += tensor.untyped_storage()._cdata not in given
        return out


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("entropy", ["none", "value", "graph"])
def test_a_temperature_of_each_token_costs_no_pass_over_the_logits_more(entropy: str, cap: float | None) -> None:
    """Neither an operation on a block of logits nor memory for one more than one temperature for all."""
    count, chunk, ids, width = 24, 8, 4096, 3
    hidden = torch.randn(count, width, requires_grad=True)
    weight, targets = torch.randn(ids, width, requires_grad=True), torch.randint(ids, (count,))
    seen = []
    for temperature in (0.7, torch.full((count,), 0.7)):
        with LargeOperations(chunk * ids) as operations:
            log_probs, found = token_log_probs(
                hidden,
                OutputLayer(weight, cap=cap),
                targets,
                temperature=temperature,
                entropy=entropy,
                chunk_tokens=chunk,
            )
            (log_probs.sum() if found is None else log_probs.sum() + found.sum()).backward()
        # A number and a tensor are two overloads of one operation.
        seen.append(
            ([name.rpartition(".")[0] for name in operations.names], operations.allocations, log_probs.detach())
        )
    (names, allocations, values), (names_each, allocations_each, values_each) = seen
    assert len(names) >= 2 * count // chunk, "blocks were seen"
    assert (names_each, allocations_each) == (names, allocations)
    torch.testing.assert_close(values_each, values)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_come_in_fp32_where_the_device_makes_them(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states and weights in bf16, logits up to about 40: against the same numbers in fp64, log-probs from logits
    in bf16 are off by 0.01 and more, from logits in fp32 by nothing. The product is a stand-in: the CPU has none."""
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(64, 32, generator=generator)).bfloat16()
    weight, offset = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((50, 32), (50,)))
    targets = torch.arange(64) % 50
    layer = OutputLayer(weight, offset if bias else None)
    exact, _ = plain(hidden.double(), OutputLayer(weight.double(), offset.double() if bias else None), targets, 1.0)
    calls: list[torch.dtype] = []

    def product(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        calls.append(out_dtype)
        return left.to(out_dtype) @ right.to(out_dtype)

    monkeypatch.setattr(torch, "mm", product)
    rounded, _ = token_log_probs(hidden, layer, targets)
    assert not calls, "the CPU has no such product"
    monkeypatch.setattr(module, "_makes_float32", lambda device: True)
    monkeypatch.setattr(module, "LOGPROB_CHUNK_IDS", 25)
    hidden.requires_grad_()
    found, _ = token_log_probs(hidden, layer, targets, chunk_tokens=32)
    found.sum().backward()
    assert calls == [torch.float32] * 2 * 4, "in both passes, for each block"
    assert float((rounded - exact).detach().abs().max()) > 0.01
    assert float((found - exact).detach().abs().max()) < 1e-4
    _, _ = token_log_probs(hidden.detach().float(), OutputLayer(weight.float()), targets)
    assert len(calls) == 8, "what is in fp32 already needs none"


def test_gpus_of_cuda_make_products_in_fp32() -> None:
    assert [module._makes_float32(torch.device(name)) for name in ("cpu", "cuda", "mps")] == [False, True, False]
