"""Modules in the shape of Transformer Engine's, made of Megatron-core's own, to build its specification without it.

What they show: which modules the specification puts where, the names of fused norms, which projections are held whole.
They say nothing about the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from models.train.megatron import build
from models.train.megatron.inputs import RmsNorm, SdpaCoreAttention


class Norm:
    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        return RmsNorm(config, hidden_size, eps)


class NormedColumns(ColumnParallelLinear):
    """Its norm's weight is a parameter of its own."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **rest: Any) -> None:
        super().__init__(inputs, outputs, config=config, **rest)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(inputs))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.eps = config.layernorm_epsilon

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class Whole(torch.nn.Module):
    """Held whole by every tensor-parallel process."""

    def __init__(self, inputs: int, outputs: int, *, parallel_mode: str, config: Any, **_: Any) -> None:
        super().__init__()
        assert parallel_mode == "duplicated"
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> Any:
        return torch.nn.functional.linear(x, self.weight), None


class Columns(ColumnParallelLinear): ...


class Attention(SdpaCoreAttention):
    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        causal = attn_mask_type.name == "causal"
        assert causal == (attention_mask is None), "the engine passes over the mask of causal attention"
        return super().forward(query, key, value, attention_mask)


class Provider:
    """Which module does what, by the names that Megatron-core asks for."""

    def linear(self) -> Any:
        return Whole

    def column_parallel_linear(self) -> Any:
        return Columns

    def row_parallel_linear(self) -> Any:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> Any:
        return NormedColumns

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Any:
        return Norm

    def core_attention(self) -> Any:
        return Attention

    def grouped_mlp_modules(self, grouped: bool, legacy: bool) -> Any:
        return SequentialMLP, MLPSubmodules(linear_fc1=Columns, linear_fc2=RowParallelLinear)

    def activation_func(self) -> Any:
        return None


def install() -> None:
    """In this process, for good."""
    gpt_layer_specs.TESpecProvider = Provider
    gpt_layer_specs.TENorm = transformer_engine.TENorm = Norm
    transformer_engine.TEColumnParallelLinear = multi_latent_attention.TEColumnParallelLinear = Columns
    transformer_engine.TEDotProductAttention = Attention
    multi_latent_attention.TELinear = Whole
    build.uses_transformer_engine = lambda spec: True
