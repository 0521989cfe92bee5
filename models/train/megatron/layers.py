"""Specifications of a model's layers: which module does what, for the local layers and for Transformer Engine's.

Invariants: names of parameters are those of `families`, but for norms that Transformer Engine fuses into the linear
layer behind them (`weights.local_name` translates); distributed checkpoints have the same keys with both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from models.families.config_json import Rope
from models.families.decoder import Architecture
from models.train.megatron.inputs import LATENT_EPS, LatentRmsNorm, RmsNorm, SdpaCoreAttention

# --------------------------------------------------------------------------------------------------
# Rotary embeddings at given positions, for rows that hold several sequences.
#
# Megatron-core computes angles for positions 0..s-1 of a row. Here they are those of `position_ids`, so that a packed
# row gives the angles of its sequences apart, also where responses continue a common prompt.
#
# Invariants: angles are an argument of every layer, so that recomputation of one micro-batch during another's sees its
# own; the frequencies are those of `families.config_json`, in fp32.


class PositionRotary(torch.nn.Module):  # type: ignore[misc]
    """Angles [s, b, 1, dim] of `position_ids` [b, s], or [s, 1, 1, dim] of 0..s-1 outside `at`."""

    # The length of a row from the block's input: the same rule as Megatron-core's.
    get_rotary_seq_len = RotaryEmbedding.get_rotary_seq_len

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self._interleaved = rope.interleaved
        self._frequencies = rope.frequencies()  # no buffer: it must stay fp32 and out of checkpoints
        self._position_ids: Tensor | None = None

    @contextmanager
    def at(self, position_ids: Tensor | None) -> Iterator[None]:
        """Use these positions within."""
        self._position_ids = position_ids
        try:
            yield
        finally:
            self._position_ids = None

    def forward(self, length: int, packed_seq: bool = False, cp_group: Any = None, **_: Any) -> Tensor:
        """Of a row of `length` tokens if no positions are given; with context parallelism this process's part."""
        if self._position_ids is not None:
            return self.angles(self._position_ids)
        every = self.angles(torch.arange(length)[None])
        group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
        return every if group.size() == 1 or packed_seq else get_pos_emb_on_this_cp_rank(every, 0, group)

    def angles(self, position_ids: Tensor) -> Tensor:
        """[b, s] -> [s, b, 1, dim], fp32, on the device of the ids or of the model's process."""
        device = position_ids.device
        if device.type == "cpu" and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self._frequencies = self._frequencies.to(device)
        angles = position_ids.to(device).t()[..., None].float() * self._frequencies
        double = angles.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        return double[:, :, None]


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """MLA whose angles come with the call, as those of other attentions do. `attention_factor`: yarn's, of cos and sin.

    Megatron-core's computes them inside from the length of the row.
    """

    def __init__(self, *args: Any, attention_factor: float = 1.0, **kwargs: Any) -> None:
        if not isinstance(multi_latent_attention.TELinear, type):
            # Without Transformer Engine its wrappers are mocks, which Megatron-core takes for the real ones here.
            multi_latent_attention.HAVE_TE = False
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _GivenAngles(attention_factor if self.config.rope_type == "yarn" else None)
        self.linear_kv_down_proj.register_forward_hook(self._own_tokens)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Any, **rest: Any) -> Any:
        """As Megatron-core's; `rotary_pos_emb` [s, b, 1, dim]."""
        self.rotary_pos_emb.angles = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **rest)
        finally:
            self.rotary_pos_emb.angles = None

    def _own_tokens(self, _layer: Any, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """[s, b, part] of the columns -> [s / parts, b, all columns], as a layer that is held whole would give it.

        Given columns, Megatron-core lets every process use the rotated key of all tokens, and each keeps only the
        gradient from its own heads. Given tokens, it gathers them in a way that sums those gradients.
        """
        part, bias = output
        whole = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if part.shape[-1] == whole or not self.config.sequence_parallel:
            return output
        return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(part)), bias


class _GivenAngles(torch.nn.Module):  # type: ignore[misc]
    """Stands where MLA keeps its rotary embedding."""

    get_rotary_seq_len = RotaryEmbedding.get_rotary_seq_len

    def __init__(self, attention_factor: float | None) -> None:
        super().__init__()
        self.angles: Tensor | None = None
        self._factor = attention_factor

    def forward(self, length: int, **_: Any) -> Any:
        return self.angles if self._factor is None else (self.angles, self._factor)


@dataclass
class SandwichSubmodules(TransformerLayerSubmodules):  # type: ignore[misc]
    """Of a layer with norms after attention and after the MLP too."""

    post_self_attn_layernorm: Any = IdentityOp
    post_mlp_layernorm: Any = IdentityOp


class SandwichLayer(TransformerLayer):  # type: ignore[misc]
    """h += norm(attention(norm(h))); h += norm(mlp(norm(h))), as GLM-4-0414."""

    def __init__(self, config: Any, submodules: SandwichSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        for norm, add in (("post_self_attn_layernorm", "self_attn_bda"), ("post_mlp_layernorm", "mlp_bda")):
            kind, eps = getattr(submodules, norm), config.layernorm_epsilon
            setattr(self, norm, build_module(kind, config=config, hidden_size=config.hidden_size, eps=eps))
            setattr(self, add, _normed_add(norm, self))


def _normed_add(norm: str, layer: Any) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Megatron-core's bias, dropout and residual, of the normed output. `layer` is not held twice as a submodule."""

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)

        def normed(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            whole = output if bias is None else output + bias
            return add((getattr(layer, norm)(whole), None), residual, dropout)

        return normed

    return build


def layer_submodules(
    architecture: Architecture, config: Any, *, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and chunk, and the final norm."""
    make = _engine_layer if transformer_engine else _local_layer
    kinds = {moe: make(architecture, config, moe=moe) for moe in set(architecture.moe_layers)}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    own = architecture.moe_layers[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    final: Any = RmsNorm
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        final = TENorm
    return TransformerBlockSubmodules(layer_specs=[kinds[moe] for moe in own], layer_norm=final)


# ---------------------------------------------------------------------- local


def _local_layer(architecture: Architecture, config: Any, *, moe: bool) -> ModuleSpec:
    attention = _local_latent_attention(architecture) if architecture.latent_attention else _local_attention(config)
    if moe and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router reads this name, which only Transformer Engine defines
    mlp = get_mlp_module_spec_for_backend(
        backend=LocalSpecProvider(), num_experts=config.num_moe_experts if moe else None, moe_grouped_gemm=False
    )
    keys: dict[str, str] = {}  # of distributed checkpoints: those of Transformer Engine, which fuses these norms
    if not architecture.latent_attention:
        keys["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not moe:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    fields: dict[str, Any] = {
        "input_layernorm": RmsNorm,
        "self_attention": attention,
        "self_attn_bda": get_bias_dropout_add,
        "pre_mlp_layernorm": RmsNorm,
        "mlp": mlp,
        "mlp_bda": get_bias_dropout_add,
        "sharded_state_dict_keys_map": keys,
    }
    return _layer(architecture, fields, RmsNorm)


def _layer(architecture: Architecture, fields: dict[str, Any], norm: Any) -> ModuleSpec:
    if not architecture.sandwich_norms:
        return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**fields))
    after = {"post_self_attn_layernorm": norm, "post_mlp_layernorm": norm}
    return ModuleSpec(module=SandwichLayer, submodules=SandwichSubmodules(**fields, **after))


def _local_attention(config: Any) -> ModuleSpec:
    norm = RmsNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=SdpaCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _local_latent_attention(architecture: Architecture) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, "attention_factor": architecture.rope.attention_factor},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=SdpaCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=LatentRmsNorm,
            kv_layernorm=LatentRmsNorm,
        ),
    )


# ---------------------------------------------------------------------- Transformer Engine


def _engine_layer(architecture: Architecture, config: Any, *, moe: bool) -> ModuleSpec:
    """Megatron-core's own specification, with this repository's latent attention, masks and sandwich norms.

    Its classes are made here: the modules that they derive from exist only with Transformer Engine.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TEDotProductAttention, TENorm

    class MaskedEngineAttention(TEDotProductAttention):  # type: ignore[misc]
        """Honours `attention_mask` (bool [b, 1, s, s], True = masked), which the engine's causal attention ignores.

        Without a mask: causal, with FlashAttention or cuDNN; with `packed_seq_params`: causal within each sequence.
        """

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, attn_mask_type: Any, **rest: Any
        ) -> Any:
            if attention_mask is not None and rest.get("packed_seq_params") is None:
                attn_mask_type = AttnMaskType.arbitrary
            return super().forward(query, key, value, attention_mask, attn_mask_type, **rest)

    class LatentEngineNorm:
        """A norm of the engine with the eps of DeepSeek's latent attention."""

        def __new__(cls, config: Any, hidden_size: int, eps: float = LATENT_EPS) -> Any:
            return TENorm(config=config, hidden_size=hidden_size, eps=LATENT_EPS)

    latent = architecture.latent_attention
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm and not latent,
        multi_latent_attention=latent,
    )
    attention = spec.submodules.self_attention
    attention.submodules.core_attention = MaskedEngineAttention
    if latent:
        # Not fused with the projections behind them: their eps is their own.
        attention.module = LatentAttention
        attention.params = {**attention.params, "attention_factor": architecture.rope.attention_factor}
        attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentEngineNorm
        attention.submodules.linear_q_up_proj = TEColumnParallelLinear
        attention.submodules.linear_kv_up_proj = TEColumnParallelLinear
    if not architecture.sandwich_norms:
        return spec
    fields = {name: getattr(spec.submodules, name) for name in TransformerLayerSubmodules.__dataclass_fields__}
    return _layer(architecture, fields, TENorm)
