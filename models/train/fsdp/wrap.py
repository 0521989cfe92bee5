"""Sharding one module tree: every decoder layer is a unit of its own, what is left over belongs to the root.

Invariants:
- parameters are fp32 shards; the forward pass gathers them in the precision of the policy; gradients are reduced in
  fp32;
- gradients are summed over all processes, never averaged: the step's denominator divides them;
- outside forward and backward passes every parameter is sharded, so that no gathered copy outlives an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from configs.schema.fsdp import FsdpConfig
from models.train.errors import UnsupportedModel
from models.train.fsdp.mesh import Mesh


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The modules that are gathered one at a time, in the order of the forward pass. Raises `UnsupportedModel`."""
    whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [
        list(module)
        for module in model.base_model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) and (not whole or type(module[0]).__name__ in whole)
    ]
    layers = max(lists, key=_elements, default=[])
    if not layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has no list of decoder layers to shard; use --train-backend torch"
        )
    return layers


def _elements(layers: list[torch.nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


class Sharding:
    """How modules of this run are sharded."""

    def __init__(self, config: FsdpConfig, mesh: Mesh, precision: torch.dtype | None) -> None:
        """`precision`: of the forward pass; None = fp32."""
        self.mesh = mesh
        self.precision = precision
        self.reshard_after_forward = config.fsdp_reshard_after_forward
        self.compiled = config.fsdp_compile
        # On a CPU there is nowhere to offload to.
        self.offloads = config.fsdp_cpu_offload and mesh.device.type != "cpu"

    def apply(self, module: torch.nn.Module, *, root: bool = False, precise: bool = False, keep: bool = True) -> None:
        """Shard what no submodule has sharded before.

        `precise`: compute in fp32 whatever the run's precision; `keep`: as the configuration says, parameters may stay
        gathered after the forward pass, which is of no use where no backward pass follows.
        """
        offload: OffloadPolicy = CPUOffloadPolicy() if self.offloads else OffloadPolicy()
        fully_shard(
            module,
            mesh=self.mesh.parameters,
            # The head is needed again as soon as the forward pass ends.
            reshard_after_forward=False if root else self.reshard_after_forward or not keep,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if precise else self.precision,
                reduce_dtype=torch.float32,
                cast_forward_inputs=not precise,
            ),
            offload_policy=offload,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # Without it, a factor becomes a reduction that gloo does not have.
        module.set_force_sum_reduction_for_comms(True)


def units(root: torch.nn.Module) -> Iterator[FSDPModule]:
    """The modules that are sharded on their own."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def reshard(root: torch.nn.Module) -> None:
    """Give back all gathered parameters: after passes without a backward pass, which would do it."""
    for module in units(root):
        module.reshard()
