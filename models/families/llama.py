"""Llama 3, 3.1, 3.2 and 3.3, and what has the same architecture; from 3.1 on with scaled rotary frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.reading import check_keys, need
from models.families.rope import read_rope


def llama(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    # transformers puts a bias on the output projection too if attention_bias is set.
    check_keys(config, parts.COMMON_KEYS, attention_bias=(False,), pretraining_tp=(1,))
    fields = parts.transformer(config)
    tied = bool(config.get("tie_word_embeddings", False))
    return Architecture(
        family="llama",
        model_type=str(config["model_type"]),
        transformer=fields,
        vocab_size=int(need(config, "vocab_size")),
        max_length=int(need(config, "max_position_embeddings")),
        tied=tied,
        rope=read_rope(config, head_width=parts.head_width(config)),
        rules=(
            *parts.embedding(),
            *parts.norms(),
            *parts.attention(config),
            *parts.mlp(),
            *parts.head(tied=tied),
        ),
        moe_layers=(False,) * fields["num_layers"],
    )
