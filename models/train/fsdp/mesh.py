"""Which processes hold parameters together, which the tokens of a sequence, and which hand in results.

Ranks are laid out as [data-parallel rank, context-parallel rank]: the processes of a context-parallel group follow each
other. Parameters are sharded over runs of `fsdp_shard_size` consecutive ranks; runs hold equal copies.

Invariant: every size divides what it must, or `TrainConfigInvalid` is raised before any process waits for another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.schema.train import FsdpConfig, ParallelConfig
from models.errors import TrainConfigInvalid
from models.train.dp_group import DistributedDpGroup, DpGroup


@dataclass(frozen=True)
class Sizes:
    """How many processes do what."""

    world: int
    shard: int  # hold one copy of the model together
    context: int  # share the tokens of a sequence

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.world // self.shard

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, each with micro-batches of its own."""
        return self.world // self.context


def sizes_of(config: FsdpConfig, world: int) -> Sizes:
    """Sizes for `world` processes. Raises `TrainConfigInvalid`."""
    shard = world if config.fsdp_shard_size is None else config.fsdp_shard_size
    context = config.fsdp_context_parallel_size
    for flag, size in (("--fsdp-shard-size", shard), ("--fsdp-context-parallel-size", context)):
        if world % size:
            raise TrainConfigInvalid(
                f"{flag} {size} does not divide the {world} processes of the trainer (--actor-num-nodes times "
                f"--actor-num-gpus-per-node); choose a divisor of {world}"
            )
    return Sizes(world, shard, context)


def ensure_group() -> None:
    """A default group of this process alone, if there is none."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def own_device(device: torch.device) -> torch.device:
    """This process's device: of several GPUs, the one named, else that of LOCAL_RANK, else the current one."""
    if device.type != "cuda":
        return device
    index = device.index
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class Mesh:
    """The processes of the default group, as FSDP2 and the trainer see them."""

    def __init__(self, config: FsdpConfig, parallel: ParallelConfig, device: torch.device) -> None:
        """Collective. Raises `TrainConfigInvalid`."""
        self.sizes = sizes = sizes_of(config, dist.get_world_size())
        self.device = device
        self.rank: int = dist.get_rank()
        self.gloo = _gloo_group(parallel)
        if sizes.shard == sizes.world:
            self.parameters: DeviceMesh = init_device_mesh(device.type, (sizes.world,), mesh_dim_names=("shard",))
        else:
            shape = (sizes.replicas, sizes.shard)
            self.parameters = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        self.context: Any | None = None  # the group that shares the tokens of this process's sequences
        if sizes.context > 1:
            shape = (sizes.dp_size, sizes.context)
            self.context = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp")).get_group("cp")
        self.dp_group: DpGroup = DistributedDpGroup(
            dp_rank=self.rank // sizes.context,
            dp_size=sizes.dp_size,
            is_mp_src_rank=self.rank % sizes.context == 0,
            gloo=self.gloo,
        )

    @property
    def first(self) -> bool:
        """Whether this is the first of all processes."""
        return self.rank == 0


def _gloo_group(parallel: ParallelConfig) -> Any | None:
    """A group of all processes for numbers on the CPU; None = the default group is one."""
    if dist.get_backend() == "gloo":
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=parallel.distributed_timeout_minutes))
