"""Shape of a served model, read from a checkpoint's `config.json`.

Invariant: whatever the forward does not compute exactly (another activation, sliding windows, quantised weights, other
rotary embeddings) is refused here by name, so that a served model never differs silently from its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from models.engines.errors import EngineStartError
from models.errors import UnsupportedModel
from models.families.rope import read_rope

ARCHITECTURES: Final = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder. `qkv_bias`, `o_bias`, `mlp_bias` and `qk_norm` say which optional parameters exist."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    inverse_frequencies: tuple[float, ...]  # [head_dim / 2], radians per position
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, directory: Path) -> ModelSpec:
        """Raises `EngineStartError` if the checkpoint cannot be served."""
        path = directory / "config.json"
        if not path.is_file():
            raise EngineStartError(
                f"model_path={directory} has no config.json; give a Hugging Face checkpoint directory"
            )
        config: dict[str, Any] = json.loads(path.read_text())
        names = config.get("architectures") or ["(none)"]
        architecture = str(names[0])
        if architecture not in ARCHITECTURES:
            raise EngineStartError(
                f"architectures=['{architecture}'] of {directory} is not served by the embedded engine, which knows "
                f"{', '.join(ARCHITECTURES)}; serve this model with SGLang"
            )
        _refuse_unsupported(config, directory)
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        family = ARCHITECTURES[architecture]
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            model_type=str(config.get("model_type", family)),
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            intermediate_size=int(config["intermediate_size"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            inverse_frequencies=_inverse_frequencies(config, head_dim, directory),
            eos_ids=_eos_ids(config, directory),
        )

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * int(dtype.itemsize)


def _refuse_unsupported(config: dict[str, Any], directory: Path) -> None:
    rules = (
        ("hidden_act", config.get("hidden_act", "silu") == "silu", "only silu is computed"),
        ("use_sliding_window", not config.get("use_sliding_window"), "only full attention is computed"),
        ("quantization_config", not config.get("quantization_config"), "only unquantised weights are read"),
        ("layer_types", set(config.get("layer_types") or ()) <= {"full_attention"}, "only full attention is computed"),
        ("pretraining_tp", config.get("pretraining_tp", 1) == 1, "only 1 is computed"),
    )
    for key, supported, rule in rules:
        if not supported:
            raise EngineStartError(
                f"{key}={config.get(key)!r} of {directory}: {rule} by the embedded engine; serve this model with SGLang"
            )


def _inverse_frequencies(config: dict[str, Any], head_dim: int, directory: Path) -> tuple[float, ...]:
    rope = None
    with contextlib.suppress(UnsupportedModel):
        rope = read_rope(config, head_width=head_dim)
    if rope is None or rope.kind not in ("default", "linear", "llama3") or rope.dim != head_dim:
        given = config.get("rope_parameters") or config.get("rope_scaling")
        raise EngineStartError(
            f"rope_parameters={given} of {directory}: the embedded engine computes default, linear and llama3 rotary "
            "embeddings over whole heads; serve this model with SGLang"
        )
    return tuple(rope.frequencies().tolist())


def _eos_ids(config: dict[str, Any], directory: Path) -> frozenset[int]:
    found: set[int] = set()
    path = directory / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    for source in (config, generation):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(int(token) for token in found)
