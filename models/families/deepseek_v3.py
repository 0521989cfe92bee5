"""DeepSeek-V3 and R1, Kimi K2 (`kimi_k2`) and Moonlight: latent attention (MLA), experts with a bias for their choice.

Kimi K2 and Moonlight are the same architecture in other sizes; Moonlight has no q_lora_rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from configs.schema.model_shapes import Latent, ModelShape
from models.families import decoder
from models.families.decoder import Architecture, prediction_layers, sigmoid_routing
from models.families.hugging_face_names import Rule, whole
from models.families.reading import check_keys, renamed, shape_of
from models.families.rope import Rope, read_rope

_KEYS = frozenset(
    "kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim".split()  # noqa: SIM905
)
# transformers and the published code leave the eps of these norms at their class's default, whatever rms_norm_eps is.
_LATENT_NORM_EPS = 1e-6


def deepseek_v3(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    config = renamed(config, num_local_experts="n_routed_experts")
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
    found = decoder.decoder(
        config, shape, _transformer(config, shape, latent, rope), rules, rope=rope, left_out=prediction_layers(config)
    )
    return replace(found, latent_attention=True, latent_norm_eps=_LATENT_NORM_EPS)


def _transformer(config: Mapping[str, Any], shape: ModelShape, latent: Latent, rope: Rope) -> dict[str, Any]:
    return (
        decoder.transformer(config, shape)
        | sigmoid_routing(config, shape)
        | {
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
    )


def _attention(latent: Latent) -> tuple[Rule, ...]:
    theirs, own = decoder.LAYER + "self_attn.", decoder.OWN + "self_attention."
    if latent.query_rank is None:
        query: tuple[Rule, ...] = (Rule(own + "linear_q_proj.weight", whole(theirs + "q_proj.weight"), split="rows"),)
    else:
        query = (
            Rule(
                own + "linear_q_down_proj.weight",
                whole(theirs + "q_a_proj.weight"),
                split="rows",
                replicated_rows=latent.query_rank,
            ),
            Rule(own + "q_layernorm.weight", whole(theirs + "q_a_layernorm.weight")),
            Rule(own + "linear_q_up_proj.weight", whole(theirs + "q_b_proj.weight"), split="rows"),
        )
    return (
        *query,
        Rule(
            own + "linear_kv_down_proj.weight",
            whole(theirs + "kv_a_proj_with_mqa.weight"),
            split="rows",
            replicated_rows=latent.key_rank + latent.rotary,
        ),
        Rule(own + "kv_layernorm.weight", whole(theirs + "kv_a_layernorm.weight")),
        Rule(own + "linear_kv_up_proj.weight", whole(theirs + "kv_b_proj.weight"), split="rows"),
        Rule(own + "linear_proj.weight", whole(theirs + "o_proj.weight"), split="columns"),
    )
