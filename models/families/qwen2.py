"""Qwen2 and Qwen2.5: biases on q, k and v; small ones tie the output layer to the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.reading import check_keys, need
from models.families.rope import read_rope


def qwen2(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    check_keys(config, parts.COMMON_KEYS - {"attention_bias"})
    fields = parts.transformer(config, qkv_bias=True)
    tied = bool(config.get("tie_word_embeddings", False))
    return Architecture(
        family="qwen2",
        model_type=str(config["model_type"]),
        transformer=fields,
        vocab_size=int(need(config, "vocab_size")),
        max_length=int(need(config, "max_position_embeddings")),
        tied=tied,
        rope=read_rope(config, head_width=parts.head_width(config)),
        rules=(
            *parts.embedding(),
            *parts.norms(),
            *parts.attention(config, qkv_bias=True),
            *parts.mlp(),
            *parts.head(tied=tied),
        ),
        moe_layers=(False,) * fields["num_layers"],
    )
