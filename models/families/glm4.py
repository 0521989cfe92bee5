"""GLM-4-0414 and GLM-Z1 (`glm4`), and GLM-4-9B as transformers publishes it (`glm`).

Biases on q, k and v; half of each head is rotated, in neighbouring pairs; gate and up projection are one tensor. `glm4`
has norms after attention and after the MLP too (sandwich norms).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.hugging_face_names import Rule, whole
from models.families.reading import check_keys, need
from models.families.rope import read_rope


def glm4(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`, with sandwich norms. Raises `UnsupportedModel`."""
    after = (
        Rule(
            parts.OWN + "post_self_attn_layernorm.weight",
            whole(parts.LAYER + "post_self_attn_layernorm.weight"),
        ),
        Rule(parts.OWN + "post_mlp_layernorm.weight", whole(parts.LAYER + "post_mlp_layernorm.weight")),
    )
    return _architecture(config, "glm4", after)


def glm(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`, without them. Raises `UnsupportedModel`."""
    return _architecture(config, "glm", ())


def _architecture(config: Mapping[str, Any], family: str, norms_after: tuple[Rule, ...]) -> Architecture:
    check_keys(config, parts.COMMON_KEYS | {"partial_rotary_factor"})
    bias = bool(config.get("attention_bias", True))
    fields = parts.transformer(config, qkv_bias=bias) | {"rotary_interleaved": True}
    tied = bool(config.get("tie_word_embeddings", False))
    return Architecture(
        family=family,
        model_type=str(config["model_type"]),
        transformer=fields,
        vocab_size=int(need(config, "vocab_size")),
        max_length=int(need(config, "max_position_embeddings")),
        tied=tied,
        rope=read_rope(config, head_width=parts.head_width(config), partial=0.5, interleaved=True),
        rules=(
            *parts.embedding(),
            *parts.norms(),
            *norms_after,
            *parts.attention(config, qkv_bias=bias),
            *parts.mlp(fused=True),
            *parts.head(tied=tied),
        ),
        moe_layers=(False,) * fields["num_layers"],
        sandwich_norms=bool(norms_after),
    )
