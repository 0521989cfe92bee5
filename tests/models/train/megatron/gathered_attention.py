"""Attention over the tokens of all context-parallel processes, for a test without Transformer Engine.

It stands in the place of an engine that a machine without a GPU lacks; what is tested is all around it: which tokens a
process computes, their positions, and whose gradients go where.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.train.megatron.inputs import context_columns


class GatheredAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal softmax(q k^T / sqrt(d)) v; q, k, v [s / cp, b, heads, d]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Tensor:
        assert attention_mask is None
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        length = query.shape[0] * size
        of_all = torch.cat([torch.from_numpy(context_columns(length, one, size)) for one in range(size)])
        own = torch.from_numpy(context_columns(length, rank, size))
        attended = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            _Gathered.apply(key).permute(1, 2, 0, 3),
            _Gathered.apply(value).permute(1, 2, 0, 3),
            attn_mask=own[:, None] >= of_all[None, :],
            enable_gqa=True,
        )
        return attended.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=group)
        return gradient.chunk(group.size())[group.rank()]
