"""The preset of a published model against the checkpoint that is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from configs.flags import show
from configs.plan.architecture import FAMILIES, architecture
from configs.schema import Config
from configs.sources import BUILT_IN_MODELS, model_config

# Not part of what a model is made of: a checkpoint may have been extended to longer texts.
_FREE: Final = ("max_position_embeddings",)
# Other names of a key, by family or in general, as transformers writes it again.
_RENAMED: Final[Mapping[str, str]] = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
_SAME_FAMILY: Final[Mapping[str, str]] = {"kimi_k2": "deepseek_v3"}


def preset_faults(config: Config) -> Iterator[str]:
    """Whether `--hf-checkpoint` is the model that `--model` names."""
    model, train = config.model, config.train
    if not model.architecture:
        return
    label = f"--model {model.model}" if model.model is not None else "model.architecture"
    if train.hf_checkpoint in BUILT_IN_MODELS:
        yield (
            f"{label} describes a published model, but --hf-checkpoint is {train.hf_checkpoint!r}, a small built-in "
            "one; leave one of them out"
        )
        return
    found = model_config(train.hf_checkpoint)
    if found is None:
        return
    differing = [
        f"{key} ({show(found[name])}, not {show(value)})"
        for key, value in model.architecture.items()
        if key not in _FREE and (name := _name_in(found, key)) is not None and not _equal(key, found[name], value)
    ]
    if not differing and architecture(found) is not None:
        differing = _shape_differences(found, model.architecture)
    if differing:
        yield (
            f"--hf-checkpoint is {train.hf_checkpoint!r}, whose config.json differs from {label} in "
            f"{', '.join(differing)}; correct the directory, or leave {label} out"
        )


def _name_in(found: Mapping[str, Any], key: str) -> str | None:
    """Under which name the file has a key."""
    return next((name for name in (key, _RENAMED.get(key, key)) if name in found), None)


def _equal(key: str, found: object, expected: object) -> bool:
    if key == "model_type":
        return _SAME_FAMILY.get(str(found), found) == _SAME_FAMILY.get(str(expected), expected)
    return found == expected


def _shape_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Keys that only one of the two has, where they make another model."""
    there, wanted = architecture(found), architecture({**expected, "model_type": found.get("model_type")})
    if there is None or wanted is None:
        return []
    unread = ("positions", *(("head",) if there.latent else ()))  # latent attention has head sizes of its own
    return [
        f"{name} ({show(ours)}, not {show(theirs)})"
        for name in there.__struct_fields__
        if name not in unread and (ours := getattr(there, name)) != (theirs := getattr(wanted, name))
    ]


def warnings(config: Config) -> Iterator[str]:
    found = model_config(config.train.hf_checkpoint)
    kind = (found or {}).get("model_type")
    if found is not None and config.train.train_backend == "megatron" and kind not in FAMILIES:
        yield (
            f"the model is of type {kind!r}, of which neither memory nor operations are estimated; Megatron-core may "
            "not know it either, --train-backend fsdp takes any causal language model of transformers"
        )
