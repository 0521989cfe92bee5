"""GLM-4.5, 4.6 and 4.7 (`glm4_moe`): part of each head is rotated, q and k norms in the large ones, shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.reading import check_keys, renamed
from models.families.rope import read_rope
from models.families.routing import dense_before, prediction_layers, sigmoid_routing


def glm4_moe(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    config = renamed(config, num_local_experts="n_routed_experts")
    check_keys(config, parts.COMMON_KEYS | parts.MOE_KEYS | {"partial_rotary_factor", "use_qk_norm"})
    bias, qk_norm = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    fields = parts.transformer(config, qkv_bias=bias, qk_norm=qk_norm) | sigmoid_routing(config)
    rules = (
        *parts.attention(config, qkv_bias=bias, qk_norm=qk_norm),
        *parts.mlp(dense_only=True),
        *parts.experts(router_bias=True, shared=bool(config.get("n_shared_experts"))),
    )
    rope = read_rope(config, head_width=parts.head_width(config), partial=0.5)
    return parts.decoder(
        config, fields, rules, rope=rope, moe_layers=dense_before(config), left_out=prediction_layers(config)
    )
