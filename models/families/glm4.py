"""GLM-4-0414 and GLM-Z1 (`glm4`), and GLM-4-9B as transformers publishes it (`glm`).

Biases on q, k and v; half of each head is rotated, in neighbouring pairs; gate and up projection are one tensor. `glm4`
has norms after attention and after the MLP too (sandwich norms).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.hugging_face_names import Rule, whole
from models.families.reading import check_keys, shape_of
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
    return replace(_architecture(config, after), sandwich_norms=True)


def glm(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`, without them. Raises `UnsupportedModel`."""
    return _architecture(config, ())


def _architecture(config: Mapping[str, Any], norms_after: tuple[Rule, ...]) -> Architecture:
    check_keys(config, parts.COMMON_KEYS | {"partial_rotary_factor"})
    shape = shape_of(config)
    rope = read_rope(config, head_width=shape.head, partial=0.5, interleaved=True)
    rules = (*norms_after, *parts.attention(shape), *parts.mlp(fused=True))
    return parts.decoder(config, shape, parts.transformer(config, shape), rules, rope=rope)
