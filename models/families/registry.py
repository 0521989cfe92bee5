"""Which family a `model_type` of `config.json` belongs to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from configs.schema.did_you_mean import did_you_mean
from models.errors import CheckpointUnavailable, UnsupportedModel
from models.families.architecture import Architecture
from models.families.deepseek_v3 import deepseek_v3
from models.families.glm4 import glm, glm4
from models.families.glm4_moe import glm4_moe
from models.families.llama import llama, qwen2
from models.families.qwen3 import qwen3, qwen3_moe

FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any]], Architecture]]] = {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "llama": llama,
    "glm": glm,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
}


def architecture_of(hf_config: Mapping[str, Any]) -> Architecture:
    """Of the contents of a `config.json`. Raises `UnsupportedModel`, naming key, value and cure."""
    model_type = str(hf_config.get("model_type"))
    make = FAMILIES.get(model_type)
    if make is None:
        hint = did_you_mean(model_type, FAMILIES)
        raise UnsupportedModel(
            f"model_type={model_type!r} has no mapping to Megatron-core, only {', '.join(sorted(FAMILIES))} have{hint} "
            "Any causal language model of transformers trains with --train-backend fsdp"
        )
    return make(hf_config)


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint. Raises `CheckpointUnavailable`."""
    path = directory / "config.json"
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointUnavailable(
            f"{path} cannot be read ({error.strerror}); give a directory in Hugging Face format"
        ) from error
    except ValueError as error:
        raise CheckpointUnavailable(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(found, dict):
        raise CheckpointUnavailable(f"{path} holds no object; download the model again")
    return found
