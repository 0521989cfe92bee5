"""Options that belong to one training backend, LoRA, checkpoints: what would be read by nobody is told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from configs.cli.flags import Flag, flags
from configs.layers import value_at
from configs.schema import Config

_OWNERS: Final = {"fsdp": "fsdp", "megatron": "megatron"}  # section -> the backend that reads it
_PLACE: Final = re.compile(r"\{[^{}]*\}")


def _changed(config: Config, section: str) -> list[Flag]:
    """Options of a section that are not at their defaults."""
    return [
        flag for flag in flags() if flag.key.startswith(f"{section}.") and value_at(config, flag.key) != flag.default
    ]


def section_faults(config: Config) -> Iterator[str]:
    """Options of a backend that the run does not use."""
    backend = config.train.train_backend
    for section, owner in _OWNERS.items():
        names = _names(config, section) if backend != owner else []
        if names:
            is_, it = ("is", "it") if len(names) == 1 else ("are", "them")
            yield (
                f"{', '.join(names)} {is_} read only by --train-backend {owner}, but that is {backend}; add "
                f"--train-backend {owner}, or leave {it} out"
            )
    if backend == "simulated" and (names := _names(config, "parallel")):
        is_, it = ("is", "it") if len(names) == 1 else ("are", "them")
        yield (
            f"{', '.join(names)} {is_} of no use to --train-backend simulated, which is one process that sleeps; "
            f"choose torch, fsdp or megatron, or leave {it} out"
        )


def _names(config: Config, section: str) -> list[str]:
    """Changed options as the user writes them; those that are passed on stand in one object."""
    names: list[str] = []
    for flag in _changed(config, section):
        if flag.key == "megatron.megatron_args":
            names += [f"--megatron-{name.replace('_', '-')}" for name in config.megatron.megatron_args]
        else:
            names.append(flag.label)
    return names


def lora_faults(config: Config) -> Iterator[str]:
    """Adapters are trained by one backend."""
    backend, lora = config.train.train_backend, config.lora
    if lora.lora_rank and backend != "fsdp":
        why = {
            "torch": "which trains all weights (fsdp does it in one process too)",
            "megatron": "whose layers get no adapters",
        }.get(backend, "which trains nothing")
        yield (
            f"--lora-rank is {lora.lora_rank}, but --train-backend is {backend}, {why}; use --train-backend fsdp, or "
            "leave --lora-rank out"
        )
    if not lora.lora_rank and (changed := _changed(config, "lora")):
        yield (
            f"{' and '.join(flag.label for flag in changed)} shape LoRA's adapters, but --lora-rank is 0, so that "
            "there are none; add for example --lora-rank 16"
        )
    if lora.lora_rank and config.algorithm.ref_update_interval is not None:
        yield (
            f"--ref-update-interval is {config.algorithm.ref_update_interval}, but with --lora-rank {lora.lora_rank} "
            "the reference is the model without adapters, which no update changes; leave --ref-update-interval out"
        )
    if lora.lora_rank and not lora.lora_target_modules:
        yield "--lora-target-modules is empty, but adapters need a place; write all-linear, or names such as q_proj"


def micro_batch_faults(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.use_dynamic_batch_size and parallel.micro_batch_size != 1:
        yield (
            f"--micro-batch-size is {parallel.micro_batch_size}, but micro-batches are filled up to "
            f"--max-tokens-per-gpu {config.train.max_tokens_per_gpu}; add --no-use-dynamic-batch-size, or leave it out"
        )


def checkpoint_faults(config: Config) -> Iterator[str]:
    """Checkpoints of sharded backends, and their copies in Hugging Face format."""
    checkpoint, backend = config.checkpoint, config.train.train_backend
    if checkpoint.async_save and backend not in ("fsdp", "megatron"):
        yield (
            f"--async-save writes sharded checkpoints in the background, but --train-backend is {backend}, which "
            "writes whole ones; choose fsdp or megatron, or leave --async-save out"
        )
    target = checkpoint.save_hf
    if target is None:
        return
    if backend == "simulated":
        yield "--save-hf writes weights, but --train-backend simulated has none; leave it out"
    unknown = sorted(set(_PLACE.findall(target)) - {"{step}"})
    if unknown:
        yield f"--save-hf is {target!r}, but the only name in braces is {{step}}, not {unknown[0]}; write {{step}}"


def warnings(config: Config) -> Iterator[str]:
    checkpoint, train = config.checkpoint, config.train
    if checkpoint.save_interval is None:
        for label, given in (("--async-save", checkpoint.async_save), ("--save-hf", checkpoint.save_hf is not None)):
            if given:
                yield f"{label} has no effect: the run writes no checkpoints; add --save-interval"
    elif checkpoint.save_hf is not None and "{step}" not in checkpoint.save_hf:
        yield (
            f"--save-hf {checkpoint.save_hf} has no {{step}} in it: each checkpoint replaces the weights of the one "
            "before"
        )
    if train.train_backend == "megatron" and train.attn_implementation != "auto":
        yield "--attn-implementation has no effect: --train-backend megatron has attention of its own"
