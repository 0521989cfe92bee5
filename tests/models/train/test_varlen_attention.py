"""All sequences of a row in one call of torch's kernel, which no CPU has: its place is taken by its definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attention import BRANCHED, CPU, LENGTH, PACKED, apart, checkpoint, results, scorer_of, shared
from torch import Tensor

from models.train.huggingface import attention
from models.train.step.micro_batches import PackedRows

__all__ = ["checkpoint"]


class Kernel:
    """Causal attention of each sequence, its last token beside the last that it sees; or its first beside the first."""

    def __init__(self, *, from_the_end: bool = True) -> None:
        self.from_the_end = from_the_end
        self.calls = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        seen: Tensor,
        most: int,
        most_seen: int,
        *,
        scale: Any,
    ) -> Tensor:
        self.calls += 1
        sizes, seen_sizes = ends.diff().tolist(), seen.diff().tolist()
        assert (max(sizes), max(seen_sizes)) == (most, most_seen)
        assert ends.dtype == seen.dtype == torch.int32
        parts = zip(query.split(sizes), key.split(seen_sizes), value.split(seen_sizes), strict=True)
        return torch.cat([self._one(*(part.transpose(0, 1) for part in three), scale) for three in parts])

    def _one(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        size, seen = query.shape[1], key.shape[1]
        mask = torch.ones(size, seen, dtype=torch.bool).tril(seen - size if self.from_the_end else 0)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(attention, "_kernel", lambda: made)
    monkeypatch.setattr(attention, "has_varlen", lambda device, dtype: True)
    return made


SMALL = [apart(150, 90, 70, length=400), shared(70, 1, 80, prompt=60, length=300)]


@pytest.mark.parametrize("rows", [PACKED, BRANCHED, *SMALL], ids=["apart", "shared prompt", "padding", "short"])
def test_one_call_a_layer_gives_the_numbers_of_the_mask(checkpoint: Path, kernel: Kernel, rows: PackedRows) -> None:
    score = scorer_of(checkpoint)
    kernel.calls = 0
    log_probs, gradients = results(score, rows)
    assert kernel.calls == score.model.config.num_hidden_layers
    expected, of_mask = results(scorer_of(checkpoint, mask_tokens=LENGTH), rows)
    torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)
    for name, gradient in gradients.items():
        scale = float(of_mask[name].abs().max())
        torch.testing.assert_close(gradient, of_mask[name], atol=1e-4 * scale, rtol=1e-3, msg=lambda m, n=name: n + m)


def test_the_kernel_is_used_where_it_was_tried_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is missing. One that lets responses see the beginning alone, as older kernels did, is not taken."""
    assert not attention.has_varlen(CPU, torch.bfloat16)
    assert not attention.varlen_agrees(CPU, torch.bfloat16)
    for kernel in (Kernel(), Kernel(from_the_end=False)):
        monkeypatch.setattr(attention, "_kernel", lambda kernel=kernel: kernel)
        assert attention.varlen_agrees(CPU, torch.float32) == kernel.from_the_end


@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_kernel_is_tried_in_a_pass_of_any_kind(monkeypatch: pytest.MonkeyPatch, within: Callable[[], Any]) -> None:
    """The first is usually one without gradients, for old log-probs."""
    monkeypatch.setattr(attention, "_kernel", Kernel)
    with within():
        assert attention.varlen_agrees(CPU, torch.float32)


@pytest.mark.parametrize("autocast", [torch.bfloat16, None], ids=["autocast", "sharded"])
def test_the_kernel_is_wanted_in_the_precision_of_the_pass(
    checkpoint: Path, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded models compute in bf16 without autocast."""
    score, wanted = scorer_of(checkpoint, autocast_dtype=autocast, mask_dtype=torch.bfloat16), []
    monkeypatch.setattr(attention, "has_varlen", lambda device, dtype: bool(wanted.append(dtype)))
    score(PACKED)
    assert wanted == [torch.bfloat16]


@pytest.mark.parametrize("sizes", [(264, 264), (12, 12), (16, 8)], ids=["too large", "no multiple of 8", "of values"])
def test_heads_that_the_kernel_cannot_do_are_attended_one_by_one(
    kernel: Kernel, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [torch.randn(1, 2, 9, size) for size in (sizes[0], *sizes)]
    found = (attention.Segment(5), attention.Segment(4, 0))
    attend: Callable[..., Any] = attention._attend
    module = torch.nn.Module()
    expected, _ = attend(module, *states, None, segments=found)
    actual, _ = attend(module, *states, None, segments=attention.as_varlen(found, CPU))
    assert kernel.calls == 0
    torch.testing.assert_close(actual, expected)
