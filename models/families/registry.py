"""The family of each `model_type` of `config.json`: DeepSeek-V3, Llama, Qwen2, Qwen3, GLM-4 and their relatives.

A family knows the architecture that a `config.json` describes, and the names of its weights in Megatron-core and in
Hugging Face checkpoints. Nothing in this folder imports Megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from configs.schema.model_shapes import Latent
from configs.schema.notation import did_you_mean
from models.errors import UnsupportedModel
from models.families import decoder
from models.families.config_json import check_keys, need, read_rope, shape_of, with_published_name
from models.families.decoder import Architecture, sigmoid_routing
from models.families.hugging_face_names import Rule, Split, whole
from models.families.source import prediction_layers

# --------------------------------------------------------------------------------------------------
# DeepSeek-V3 and R1, Kimi K2 (`kimi_k2`) and Moonlight: latent attention (MLA), experts with a bias for their choice.
# Kimi K2 and Moonlight have the same architecture in other sizes; Moonlight has no q_lora_rank.


_KEYS = frozenset(
    "kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim".split()  # noqa: SIM905
)


def deepseek_v3(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    config = with_published_name(config, "n_routed_experts")
    check_keys(
        config,
        decoder.COMMON_KEYS | decoder.MOE_KEYS | _KEYS,
        attention_bias=(False,),
        rope_interleave=(True,),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
        moe_layer_freq=(1,),
    )
    shape = shape_of(config)
    latent = shape.latent
    assert latent is not None
    rope = read_rope(config, head_width=latent.rotary)
    rules = (
        *_attention(latent),
        *decoder.mlp(dense_only=True),
        *decoder.experts(router_bias=True, shared=shape.shared_ffn > 0),
    )
    fields = sigmoid_routing(config, shape) | {
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "kv_channels": None,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.rotary,
        "v_head_dim": latent.value,
        # Frequencies come from `rope`; Megatron-core needs the scaling for the scale of its softmax.
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.base,
        "rotary_scaling_factor": rope.factor if rope.kind == "yarn" else 1.0,
        "mscale": float(rope.scaling.get("mscale") or 1.0),
        "mscale_all_dim": float(rope.scaling.get("mscale_all_dim") or 0.0) if rope.kind == "yarn" else 0.0,
    }
    found = decoder.decoder(config, shape, rules, fields, rope=rope, left_out=prediction_layers(config))
    return replace(found, latent_attention=True)


def _attention(latent: Latent) -> tuple[Rule, ...]:
    def rule(own: str, published: str, split: Split, replicated_rows: int | None = None) -> Rule:
        name = f"{decoder.OWN}self_attention.{own}.weight"
        piece = whole(f"{decoder.LAYER}self_attn.{published}.weight")
        return Rule(name, piece, split=split, replicated_rows=replicated_rows)

    if latent.query_rank is None:
        query = [rule("linear_q_proj", "q_proj", "rows")]
    else:
        query = [
            rule("linear_q_down_proj", "q_a_proj", "rows", latent.query_rank),
            rule("q_layernorm", "q_a_layernorm", "none"),
            rule("linear_q_up_proj", "q_b_proj", "rows"),
        ]
    return (
        *query,
        rule("linear_kv_down_proj", "kv_a_proj_with_mqa", "rows", latent.key_rank + latent.rotary),
        rule("kv_layernorm", "kv_a_layernorm", "none"),
        rule("linear_kv_up_proj", "kv_b_proj", "rows"),
        rule("linear_proj", "o_proj", "columns"),
    )


# --------------------------------------------------------------------------------------------------
# Llama 3, 3.1, 3.2 and 3.3, and what has the same architecture, from 3.1 on with scaled rotary frequencies; and Qwen2
# and Qwen2.5, which add biases on q, k and v. Small ones tie the output layer to the embedding.


def plain(
    config: Mapping[str, Any], *, known: frozenset[str] = decoder.COMMON_KEYS, **off: tuple[Any, ...]
) -> Architecture:
    """Of the `config.json` of a decoder of attention with query groups and gated MLPs alone; arguments of `check_keys`.

    Raises `UnsupportedModel`.
    """
    check_keys(config, known, **off)
    shape = shape_of(config)
    return decoder.decoder(config, shape, (*decoder.attention(shape), *decoder.mlp()))


# transformers puts a bias on the output projection too if attention_bias is set.
llama = partial(plain, attention_bias=(False,), pretraining_tp=(1,))
qwen2 = partial(plain, known=decoder.COMMON_KEYS - {"attention_bias"})


# --------------------------------------------------------------------------------------------------
# Qwen3: norms on the heads of q and k; and Qwen3-MoE: softmax over the chosen experts, some layers may be dense.


_MOE_KEYS = frozenset(
    """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    """.split()  # noqa: SIM905 - a list would take a line for each
)


qwen3 = partial(plain, attention_bias=(False,))  # the dense ones


def qwen3_moe(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`, with experts. Raises `UnsupportedModel`."""
    config = with_published_name(config, "num_experts")
    check_keys(config, decoder.COMMON_KEYS | _MOE_KEYS, attention_bias=(False,))
    need(config, "num_experts")
    shape = shape_of(config)
    fields = {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.active_experts,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_score_function": "softmax",
        # The weights are a softmax over the chosen experts if they are normalised, else over all of them.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }
    rules = (*decoder.attention(shape), *decoder.mlp(dense_only=True), *decoder.experts())
    return decoder.decoder(config, shape, rules, fields)


# --------------------------------------------------------------------------------------------------
# GLM-4-0414 and GLM-Z1 (`glm4`), and GLM-4-9B as transformers publishes it (`glm`).
#
# Biases on q, k and v; half of each head is rotated, in neighbouring pairs; gate and up projection are one tensor.
# `glm4` has norms after attention and after the MLP too (sandwich norms).


def glm(config: Mapping[str, Any], *, sandwich: bool = False) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    check_keys(config, decoder.COMMON_KEYS | {"partial_rotary_factor"})
    shape = shape_of(config)
    names = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight") if sandwich else ()
    after = [Rule(decoder.OWN + name, whole(decoder.LAYER + name)) for name in names]
    rules = (*after, *decoder.attention(shape), *decoder.mlp(fused=True))
    rope = read_rope(config, head_width=shape.head, partial=0.5, interleaved=True)
    return replace(decoder.decoder(config, shape, rules, rope=rope), sandwich_norms=sandwich)


glm4 = partial(glm, sandwich=True)


# --------------------------------------------------------------------------------------------------
# GLM-4.5, 4.6 and 4.7 (`glm4_moe`): part of each head is rotated, q and k norms in the large ones, shared expert.


def glm4_moe(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    config = with_published_name(config, "n_routed_experts")
    check_keys(config, decoder.COMMON_KEYS | decoder.MOE_KEYS | {"partial_rotary_factor", "use_qk_norm"})
    shape = shape_of(config)
    rules = (
        *decoder.attention(shape),
        *decoder.mlp(dense_only=True),
        *decoder.experts(router_bias=True, shared=shape.shared_ffn > 0),
    )
    rope = read_rope(config, head_width=shape.head, partial=0.5)
    fields, left_out = sigmoid_routing(config, shape), prediction_layers(config)
    return decoder.decoder(config, shape, rules, fields, rope=rope, left_out=left_out)


# --------------------------------------------------------------------------------------------------
# Which family a `model_type` of `config.json` belongs to.


FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any]], Architecture]]] = {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "llama": llama,
    "glm": glm,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
}


def architecture_of(hf_config: Mapping[str, Any]) -> Architecture:
    """Of the contents of a `config.json`. Raises `UnsupportedModel`, naming key, value and cure."""
    model_type = str(hf_config.get("model_type"))
    make = FAMILIES.get(model_type)
    if make is None:
        hint = did_you_mean(model_type, FAMILIES)
        raise UnsupportedModel(
            f"model_type={model_type!r} has no mapping to Megatron-core, only {', '.join(sorted(FAMILIES))} have{hint} "
            "Any causal language model of transformers trains with --train-backend fsdp"
        )
    return make(hf_config)
