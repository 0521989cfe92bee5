"""What the embedded engine serves: the shape of a model, from its `config.json`.

Invariant: `ModelSpec` refuses by name what the forward does not compute exactly (another activation, sliding windows,
quantised weights, other rotary embeddings), so that a served model never differs silently from its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from configs.schema.model_shapes import ModelShape, fp8_block, read_shape, refused_keys
from models.errors import CheckpointUnavailable, EngineStartError, UnsupportedModel
from models.families.source import read_hf_config

if TYPE_CHECKING:
    import torch

ARCHITECTURES: Final = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
# Values of config.json that this engine computes although the trainers do not, and those without influence on it.
COMPUTED: Final[Mapping[str, tuple[Any, ...] | None]] = {
    "mlp_bias": None,
    "attention_dropout": None,
    "hidden_dropout": None,
    "pretraining_tp": (1,),
}
ONLY: Final = {
    "hidden_act": "silu",
    "quantization_config": "unquantised weights, or float8 by blocks,",
    "layer_types": "full attention",
    "use_sliding_window": "full attention",
}


@dataclass(frozen=True)
class ModelSpec:
    """A decoder that the embedded engine serves."""

    architecture: str
    model_type: str
    shape: ModelShape
    max_positions: int
    norm_eps: float
    inverse_frequencies: tuple[float, ...]  # [head width / 2], radians per position
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, directory: Path) -> ModelSpec:
        """Raises `EngineStartError` if the checkpoint cannot be served."""
        try:
            config = read_hf_config(directory)
        except CheckpointUnavailable as error:
            raise EngineStartError(f"model_path={directory}: {error}") from error
        shape = served_shape(config, directory)
        return cls(
            architecture=config["architectures"][0],
            model_type=str(config.get("model_type", shape.family)),
            shape=shape,
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            inverse_frequencies=_inverse_frequencies(config, shape.head, directory),
            eos_ids=_eos_ids(config, directory),
        )

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token, all layers."""
        return self.shape.layers * self.shape.key_values * int(dtype.itemsize)


def served_shape(config: Mapping[str, Any], directory: Path) -> ModelShape:
    """Of the `config.json` in a directory. Raises `EngineStartError` if the engine does not compute this model."""
    architecture = str((config.get("architectures") or ["(none)"])[0])
    if architecture not in ARCHITECTURES:
        raise EngineStartError(
            f"architectures=['{architecture}'] of {directory} is not served by the embedded engine, which knows "
            f"{', '.join(ARCHITECTURES)}; serve this model with SGLang"
        )
    for key in refused_keys(config, COMPUTED):
        if key == "quantization_config" and fp8_block(config) is not None:
            continue
        raise EngineStartError(
            f"{key}={config.get(key)!r} of {directory}: only {ONLY.get(key, 'its default')} can be computed by the "
            "embedded engine; serve this model with SGLang"
        )
    try:
        return read_shape(config, ARCHITECTURES[architecture])
    except KeyError as error:
        raise EngineStartError(
            f"config.json of {directory} has no {error.args[0]}; give that which was published with the model"
        ) from error


def _inverse_frequencies(config: dict[str, Any], head_dim: int, directory: Path) -> tuple[float, ...]:
    from models.families.config_json import read_rope

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
