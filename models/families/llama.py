"""Llama 3, 3.1, 3.2 and 3.3, and what has the same architecture, from 3.1 on with scaled rotary frequencies; and Qwen2
and Qwen2.5, which add biases on q, k and v. Small ones tie the output layer to the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.families import parts
from models.families.architecture import Architecture
from models.families.reading import check_keys


def llama(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    # transformers puts a bias on the output projection too if attention_bias is set.
    check_keys(config, parts.COMMON_KEYS, attention_bias=(False,), pretraining_tp=(1,))
    return parts.plain(config)


def qwen2(config: Mapping[str, Any]) -> Architecture:
    """Of `config.json`. Raises `UnsupportedModel`."""
    check_keys(config, parts.COMMON_KEYS - {"attention_bias"})
    return parts.plain(config)
