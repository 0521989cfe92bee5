"""Qwen3: norms on the heads of q and k; and Qwen3-MoE: softmax over the chosen experts, some layers may be dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.reading import check_keys, need, renamed, shape_of

_MOE_KEYS = frozenset(
    """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    """.split()  # noqa: SIM905 - a list would take a line for each
)


def qwen3(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`, dense. Raises `UnsupportedModel`."""
    check_keys(config, parts.COMMON_KEYS, attention_bias=(False,))
    return parts.plain(config)


def qwen3_moe(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`, with experts. Raises `UnsupportedModel`."""
    config = renamed(config, num_local_experts="num_experts")
    check_keys(config, parts.COMMON_KEYS | _MOE_KEYS, attention_bias=(False,))
    need(config, "num_experts")
    shape = shape_of(config)
    fields = parts.transformer(config, shape) | {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.active_experts,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_score_function": "softmax",
        # The weights are a softmax over the chosen experts if they are normalised, else over all of them.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }
    return parts.decoder(
        config, shape, fields, (*parts.attention(shape), *parts.mlp(dense_only=True), *parts.experts())
    )
