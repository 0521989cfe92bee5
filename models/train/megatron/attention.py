"""Attention and norms that need no Transformer Engine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.errors import UnsupportedModel

# --------------------------------------------------------------------------------------------------
# RMSNorm for the local layers: torch's own, in a shape that Megatron-core's specifications can build.
#
# Megatron-core's wrapper of torch's norm refuses sequence parallelism; this one marks its weight, so that the gradients
# of the parts of a sequence are summed over the tensor-parallel processes.


LATENT_EPS = 1e-6  # DeepSeek's norms inside latent attention keep their class's default


class RmsNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """x / rms(x) * weight over the last dimension [..., hidden_size]. Extra arguments of specifications are ignored."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Squares are summed in fp32, as transformers does; the weight is multiplied in the precision of x."""
        if x.dtype == torch.float32:
            exact: torch.Tensor = super().forward(x)
            return exact
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class LatentRmsNorm(RmsNorm):
    """Of latent attention: its eps is fixed, whatever the model's is."""

    def __init__(self, config: Any, hidden_size: int, eps: float = LATENT_EPS, **_: Any) -> None:
        super().__init__(config, hidden_size, LATENT_EPS)


# --------------------------------------------------------------------------------------------------
# Core attention of the local layers on torch's scaled_dot_product_attention.
#
# Megatron-core's own asserts one process of context parallelism as this one does, but has no mask for packed rows,
# keeps the whole score matrix, and wants values as wide as keys.


class SdpaCoreAttention(torch.nn.Module):  # type: ignore[misc]
    """softmax(q k^T * scale) v for the heads of one process.

    query [s, b, n, d], key [s, b, g, d], value [s, b, g, v], n a multiple of g -> [s, b, n * v].
    `attention_mask`: None = causal; else bool [b, 1, s, s] (or [1, 1, s, s]), True = masked.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise UnsupportedModel(
                f"context_parallel_size={config.context_parallel_size} needs Transformer Engine's attention; set "
                "--transformer-impl transformer_engine, or --context-parallel-size 1"
            )
        width = config.kv_channels if k_channels is None else k_channels
        self.softmax_scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        if packed_seq_params is not None or attention_bias is not None:
            raise UnsupportedModel(
                "the local attention takes packed rows as an attention_mask, not as cu_seqlens, and no bias; "
                "use --transformer-impl transformer_engine for cu_seqlens"
            )
        length, rows, heads, _width = query.shape
        attended: Tensor = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=None if attention_mask is None else ~attention_mask,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != heads,
        )
        return attended.permute(2, 0, 1, 3).reshape(length, rows, heads * value.shape[-1])

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}
