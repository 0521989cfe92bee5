"""The optimizer over sharded parameters: each process updates its shards.

Invariants: those of `models.train.huggingface.optimizer`; the norm of the gradient is that of all shards together, so
that all processes clip alike, and refuse together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.schema.train import TrainConfig
from models.train.fsdp.mesh import Mesh
from models.train.huggingface.optimizer import Updater, sum_of_squares


class ShardedUpdater(Updater):
    """AdamW on shards. Gradients are complete sums when `apply` is called: FSDP2 reduces them."""

    def __init__(self, model: torch.nn.Module, train: TrainConfig, total_steps: int | None, mesh: Mesh) -> None:
        super().__init__(model, train, total_steps)
        self._mesh = mesh

    def _gradients(self) -> list[Tensor]:
        return [local(gradient) for gradient in super()._gradients()]

    def _norm(self, gradients: list[Tensor]) -> float:
        return math.sqrt(self._mesh.sum_over_shards(sum_of_squares(gradients)))


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
