"""Published models by name: `--model qwen3-8b` lays `configs/models/qwen3-8b.toml` under the recipe.

A preset holds the model's dimensions, its checkpoint, and a layout for one way to run it: with Megatron-core and
SGLang. Precedence: command line > recipe > preset of the model > preset of the mode > default.

Invariant: what a preset says for a backend or an engine that the run does not use, or for a size that the layers above
it changed, falls away; a preset alone never makes a configuration contradict itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from configs.flags import flags_by_key
from configs.layers import ConfigError, Layer
from configs.schema.did_you_mean import cure

MODELS: Final = Path(__file__).resolve().parent / "models"

# Section -> the key that says whether it is used, and the values with which it is.
_USED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "parallel": ("train.train_backend", ("fsdp", "megatron")),
    "fsdp": ("train.train_backend", ("fsdp",)),
    "lora": ("train.train_backend", ("fsdp",)),
    "megatron": ("train.train_backend", ("megatron",)),
    "sglang": ("engine.engine", ("sglang",)),
}
_TENSOR: Final = "megatron.tensor_model_parallel_size"
_PIPELINE: Final = "megatron.pipeline_model_parallel_size"
_CHECKPOINTS: Final = ("train.hf_checkpoint", "train.ref_load", "critic.critic_load", "model.architecture")
_RECOMPUTE: Final = ("megatron.recompute_granularity", "megatron.recompute_activations")


def preset_names() -> tuple[str, ...]:
    """Names that `--model` knows."""
    return tuple(sorted(path.stem for path in MODELS.glob("*.toml")))


def preset_path(name: str) -> Path:
    """The file of a preset. Raises `ConfigError`."""
    if name in preset_names():
        return MODELS / f"{name}.toml"
    hint = cure(name.lower(), preset_names(), form="--model {}")
    raise ConfigError(f"--model is {name!r}, but there is no such preset; {hint}")


def chosen_preset(layers: Sequence[Layer]) -> str | None:
    """The name that the highest layer gives; layers from the lowest to the highest.

    None if that is a recipe with an architecture of its own, such as a run's config.toml: the preset is in it already.
    """
    for layer in reversed(layers):
        if "model.model" in layer.values:
            complete = layer.origin == "recipe" and "model.architecture" in layer.values
            return None if complete else layer.values["model.model"]
    return None


def without_other_models(model: str, layers: Sequence[Layer]) -> list[Layer]:
    """The layers, from the lowest to the highest, without the checkpoints of other models than the chosen preset's.

    `--model` written over a recipe means that model, not the recipe's.
    """
    above = max(place for place, layer in enumerate(layers) if layer.values.get("model.model") == model)
    kept = []
    for place, layer in enumerate(layers):
        if place < above and layer.values.get("model.model") != model:
            values = {key: value for key, value in layer.values.items() if key not in _CHECKPOINTS}
            layer = msgspec.structs.replace(layer, values=values)
        kept.append(layer)
    return kept


def fitted(preset: Layer, above: Sequence[Layer]) -> Layer:
    """The preset without what does not apply under the layers above it, lowest first."""
    written: dict[str, Any] = {}
    for layer in above:
        written.update(layer.values)
    final = {**preset.values, **written}
    dropped = set(_unused(preset, final)) | set(_outranked(preset, written, final))
    kept = {key: value for key, value in preset.values.items() if key not in dropped}
    return Layer(origin="preset", values=kept, labels={key: preset.labels[key] for key in kept})


def _unused(preset: Layer, final: Mapping[str, Any]) -> Iterator[str]:
    """Keys of sections that this run does not read."""
    for key in preset.values:
        switch, used = _USED.get(key.partition(".")[0], ("", ()))
        if switch and final.get(switch, flags_by_key()[switch].default) not in used:
            yield key


def _outranked(preset: Layer, written: Mapping[str, Any], final: Mapping[str, Any]) -> Iterator[str]:
    """Keys that make sense only with a size or a choice that was changed above."""
    if final.get(_TENSOR, 1) == 1:
        yield "megatron.sequence_parallel"
    if _PIPELINE in written:
        yield "megatron.virtual_pipeline_model_parallel_size"
        yield "megatron.decoder_first_pipeline_num_layers"
        yield "megatron.decoder_last_pipeline_num_layers"
    if any(key in written for key in _RECOMPUTE):
        yield from ("megatron.recompute_granularity", "megatron.recompute_method", "megatron.recompute_num_layers")
        yield "train.gradient_checkpointing"
    if "sglang.rollout_external_engine_addrs" in written:
        yield "sglang.rollout_num_gpus"
    if "engine" in written.get("run.scale", {}):
        yield "sglang.rollout_num_gpus"
