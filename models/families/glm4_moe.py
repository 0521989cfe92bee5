"""GLM-4.5, 4.6 and 4.7 (`glm4_moe`): part of each head is rotated, q and k norms in the large ones, shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.reading import check_keys, renamed, shape_of
from models.families.rope import read_rope
from models.families.routing import prediction_layers, sigmoid_routing


def glm4_moe(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    config = renamed(config, num_local_experts="n_routed_experts")
    check_keys(config, parts.COMMON_KEYS | parts.MOE_KEYS | {"partial_rotary_factor", "use_qk_norm"})
    shape = shape_of(config)
    fields = parts.transformer(config, shape) | sigmoid_routing(config, shape)
    rules = (
        *parts.attention(shape),
        *parts.mlp(dense_only=True),
        *parts.experts(router_bias=True, shared=shape.shared_ffn > 0),
    )
    rope = read_rope(config, head_width=shape.head, partial=0.5)
    return parts.decoder(config, shape, fields, rules, rope=rope, left_out=prediction_layers(config))
