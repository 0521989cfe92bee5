"""Specifications of a model's layers: which module does what, for the local layers and for Transformer Engine's.

Invariants: names of parameters are those of `families`, but for norms that Transformer Engine fuses into the linear
layer behind them (`weights.local_name` translates); distributed checkpoints have the same keys with both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from models.families.decoder import Architecture
from models.train.megatron.attention import SdpaCoreAttention
from models.train.megatron.norm import LATENT_EPS, LatentRmsNorm, RmsNorm
from models.train.megatron.rotary import LatentAttention


@dataclass
class SandwichSubmodules(TransformerLayerSubmodules):  # type: ignore[misc]
    """Of a layer with norms after attention and after the MLP too."""

    post_self_attn_layernorm: Any = IdentityOp
    post_mlp_layernorm: Any = IdentityOp


class SandwichLayer(TransformerLayer):  # type: ignore[misc]
    """h += norm(attention(norm(h))); h += norm(mlp(norm(h))), as GLM-4-0414."""

    def __init__(self, config: Any, submodules: SandwichSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
            norm = build_module(
                getattr(submodules, name),
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )
            setattr(self, name, norm)
        self.self_attn_bda = _normed_add("post_self_attn_layernorm", self)
        self.mlp_bda = _normed_add("post_mlp_layernorm", self)


def _normed_add(norm: str, layer: Any) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Megatron-core's bias, dropout and residual, of the normed output. `layer` is not held twice as a submodule."""

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)

        def normed(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_and_bias
            added: Tensor = add(
                (getattr(layer, norm)(output if bias is None else output + bias), None), residual, dropout
            )
            return added

        return normed

    return build


def layer_submodules(
    architecture: Architecture, config: Any, *, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and chunk, and the final norm."""
    make = _engine_layer if transformer_engine else _local_layer
    kinds = {moe: make(architecture, config, moe=moe) for moe in set(architecture.moe_layers)}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    own = architecture.moe_layers[first : first + count]
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
    norm = LatentRmsNorm if architecture.latent_norm_eps == LATENT_EPS else RmsNorm
    return ModuleSpec(
        module=LatentAttention,
        params={
            "attn_mask_type": AttnMaskType.causal,
            "attention_factor": architecture.rope.attention_factor,
        },
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=SdpaCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


# ---------------------------------------------------------------------- Transformer Engine


def _engine_layer(architecture: Architecture, config: Any, *, moe: bool) -> ModuleSpec:
    """Megatron-core's own specification, with this repository's latent attention, masks and sandwich norms."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    from models.train.megatron.engine_modules import LatentEngineNorm, MaskedEngineAttention

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
        norm = LatentEngineNorm if architecture.latent_norm_eps == LATENT_EPS else TENorm
        attention.module = LatentAttention
        attention.params = {**attention.params, "attention_factor": architecture.rope.attention_factor}
        attention.submodules.q_layernorm = attention.submodules.kv_layernorm = norm
        attention.submodules.linear_q_up_proj = TEColumnParallelLinear
        attention.submodules.linear_kv_up_proj = TEColumnParallelLinear
    if not architecture.sandwich_norms:
        return spec
    fields = {name: getattr(spec.submodules, name) for name in TransformerLayerSubmodules.__dataclass_fields__}
    return _layer(architecture, fields, TENorm)
