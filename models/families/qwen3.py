"""Qwen3: norms on the heads of q and k; and Qwen3-MoE: softmax over the chosen experts, some layers may be dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.reading import check_keys, need, renamed

_MOE_KEYS = frozenset(
    """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    """.split()  # noqa: SIM905 - a list would take a line for each
)


def qwen3(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`, dense. Raises `UnsupportedModel`."""
    check_keys(config, parts.COMMON_KEYS, attention_bias=(False,))
    rules = (*parts.attention(config, qk_norm=True), *parts.mlp())
    return parts.decoder(config, parts.transformer(config, qk_norm=True), rules)


def qwen3_moe(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`, with experts. Raises `UnsupportedModel`."""
    config = renamed(config, num_local_experts="num_experts")
    check_keys(config, parts.COMMON_KEYS | _MOE_KEYS, attention_bias=(False,))
    experts = int(need(config, "num_experts"))
    fields = parts.transformer(config, qk_norm=True)
    every, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    moe_layers = tuple(
        index not in dense and experts > 0 and (index + 1) % every == 0 for index in range(fields["num_layers"])
    )
    fields |= {
        "num_moe_experts": experts,
        "moe_router_topk": int(need(config, "num_experts_per_tok")),
        "moe_ffn_hidden_size": int(need(config, "moe_intermediate_size")),
        "moe_router_score_function": "softmax",
        # The weights are a softmax over the chosen experts if they are normalised, else over all of them.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }
    rules = (*parts.attention(config, qk_norm=True), *parts.mlp(dense_only=True), *parts.experts())
    return parts.decoder(config, fields, rules, moe_layers=moe_layers)
