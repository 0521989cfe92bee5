"""How the processes of the trainer divide a model and a batch. Pure.

    world = nodes * processes per node
    megatron   data = world / (TP * PP * CP), experts' data = world / (expert TP * EP * PP)
    fsdp       data = world / CP, and a model is spread over `shard` of the world's processes
    torch      data = world, every process holds the whole model

Invariants: only sizes; whether they divide is told by `configs.rules.parallel`, and here they are rounded down.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from configs.schema import Config

# Options of Megatron-core that divide layers by rules of their own.
_OWN_STAGES: Final = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


class Layout(Struct, frozen=True, kw_only=True):
    """Sizes of the groups of processes. `shard`: processes that hold one copy of the model between them (fsdp);
    `chunks`: model chunks of each pipeline stage."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1
    shard: int = 1
    sequence: bool = False

    @property
    def data(self) -> int:
        """Shares of a batch: processes, or groups of them, that compute different micro-batches."""
        return max(1, self.world // (self.tensor * self.pipeline * self.context))

    @property
    def expert_data(self) -> int:
        """Copies of an expert."""
        return max(1, self.world // (self.expert_tensor * self.expert * self.pipeline))

    def __str__(self) -> str:
        sizes = (
            ("TP", self.tensor),
            ("PP", self.pipeline),
            ("CP", self.context),
            ("EP", self.expert),
            ("expert TP", self.expert_tensor if self.expert > 1 or self.expert_tensor != self.tensor else 1),
            ("shard", self.shard),
            ("data", self.data),
        )
        return ", ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one process"


def layout_of(config: Config) -> Layout:
    """The layout of the configured backend; a simulated trainer is one process."""
    parallel, megatron, fsdp = config.parallel, config.megatron, config.fsdp
    world = parallel.actor_num_nodes * parallel.actor_num_gpus_per_node
    match config.train.train_backend:
        case "megatron":
            return Layout(
                world=world,
                tensor=megatron.tensor_model_parallel_size,
                pipeline=megatron.pipeline_model_parallel_size,
                context=megatron.context_parallel_size,
                expert=megatron.expert_model_parallel_size,
                expert_tensor=megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size,
                chunks=megatron.virtual_pipeline_model_parallel_size or 1,
                sequence=megatron.sequence_parallel,
            )
        case "fsdp":
            return Layout(world=world, context=fsdp.fsdp_context_parallel_size, shard=fsdp.fsdp_shard_size or world)
        case "torch":
            return Layout(world=world)
    return Layout(world=1)


def trainer_processes(config: Config) -> int:
    """Processes that train beside the stage's own; 0 where the stage does it itself."""
    world, backend = layout_of(config).world, config.train.train_backend
    return world if backend in ("fsdp", "megatron") or world > 1 else 0


def own_stages(config: Config) -> bool:
    """Whether `--megatron-<option>` asks for stages that only Megatron-core itself knows."""
    return any(name in config.megatron.megatron_args for name in _OWN_STAGES)


def stage_layers(config: Config, layers: int) -> tuple[int, ...] | None:
    """Layers of each pipeline stage; None if they cannot be divided so, or only Megatron-core knows."""
    megatron = config.megatron
    stages, chunks = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    if config.train.train_backend != "megatron" or stages == 1:
        return (layers,)
    if own_stages(config):
        return None
    first, last = megatron.decoder_first_pipeline_num_layers, megatron.decoder_last_pipeline_num_layers
    even = stages - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if even == 0:
        counts = [first or 0, last or 0]
        return tuple(counts) if rest == 0 else None
    if rest <= 0 or rest % even:
        return None
    counts = [rest // even] * even
    counts = [*([first] if first is not None else []), *counts, *([last] if last is not None else [])]
    return tuple(counts) if all(count % chunks == 0 for count in counts) else None
