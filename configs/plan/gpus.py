"""How the processes of a run are laid out: the parallel layout of the trainer, and GPUs of each part. No I/O."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from configs.graph import evaluation_engines, replicas
from configs.schema import Config

# --------------------------------------------------------------------------------------------------
# How the processes of the trainer divide a model and a batch.
#
#     world = nodes * processes per node
#     megatron   data = world / (TP * PP * CP), experts' data = world / (expert TP * EP * PP)
#     fsdp       data = world / CP, and a model is spread over `shard` of the world's processes
#     torch      data = world, every process holds the whole model
#
# Sizes are rounded down here; `configs.rules.parallel` refuses sizes that do not divide.


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
    before, behind = ([] if count is None else [count] for count in (first, last))
    even, rest = stages - len(before + behind), layers - sum(before + behind)
    if even == 0:
        return (*before, *behind) if rest == 0 else None
    if rest <= 0 or rest % even:
        return None
    counts = (*before, *[rest // even] * even, *behind)
    return counts if all(count % chunks == 0 for count in counts) else None


# --------------------------------------------------------------------------------------------------
# How many GPUs a run needs, and on how many nodes. The start of the run checks whether this machine has them.


NODE_GPUS: Final = 8  # of the nodes that layouts are written for


class Gpus(Struct, frozen=True, kw_only=True):
    """GPUs of the trainer's processes and of all engines. `shared`: they take turns on the same ones;
    `trainer_nodes`: on which the trainer is spread."""

    trainer: int
    engines: int
    trainer_nodes: int = 1
    shared: bool = False

    @property
    def total(self) -> int:
        return max(self.trainer, self.engines) if self.shared else self.trainer + self.engines

    @property
    def nodes(self) -> int:
        """Nodes of 8 GPUs. Those of a trainer on several nodes are its own."""
        if self.trainer_nodes > 1:
            return self.trainer_nodes + (0 if self.shared else -(-self.engines // NODE_GPUS))
        return max(1, -(-self.total // NODE_GPUS))

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {NODE_GPUS}"
        if self.shared:
            return f"{self.total} in all, on which trainer and engines take turns: {nodes}"
        return f"{self.total} in all, {self.trainer} of the trainer and {self.engines} of engines: {nodes}"


def gpus_of(config: Config) -> Gpus:
    """What is trained or generated on a CPU, or elsewhere, needs none."""
    trains = config.train.train_backend != "simulated" and config.train.train_device != "cpu"
    return Gpus(
        trainer=layout_of(config).world if trains else 0,
        engines=_engines(config),
        trainer_nodes=config.parallel.actor_num_nodes,
        shared=config.asynchrony.colocate,
    )


def _engines(config: Config) -> int:
    count = 0 if config.sglang.rollout_external_engine_addrs else replicas(config).get("engine", 0)
    count += evaluation_engines(config).count("")
    match config.engine.engine:
        case "sglang":
            return count * config.sglang.rollout_num_gpus_per_engine
        case "embedded":
            return count if config.engine.engine_device != "cpu" else 0
    return 0
