"""The optimizer over sharded parameters: each process updates its shards.

Invariants: those of `models.train.updates`; the norm of the gradient is that of all shards together, so that all
processes clip alike, and refuse together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.schema.train import TrainConfig
from models.train.fsdp.mesh import Mesh
from models.train.schedule import learning_rate
from models.train.updates import Updater, UpdateResult


class ShardedUpdater(Updater):
    """AdamW on shards. Gradients are complete sums when `apply` is called: FSDP2 reduces them."""

    def __init__(self, model: torch.nn.Module, train: TrainConfig, total_steps: int | None, mesh: Mesh) -> None:
        super().__init__(model, train, total_steps)
        self._mesh = mesh

    def apply(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Divide by `denominator`, clip by the norm over all shards, update; or refuse. Clears the gradients."""
        lr = learning_rate(self.updates, self._train, self._total_steps) * lr_scale
        gradients = [local(p.grad) for _, p in self.named_parameters if p.grad is not None]
        norm = math.sqrt(self._mesh.sum_over_shards(_squares(gradients))) / denominator
        if not gradients or not math.isfinite(norm):
            self.clear()
            return UpdateResult(applied=False, grad_norm=norm, lr=lr)
        scale = 1.0 / denominator
        if self._train.clip_grad > 0 and norm > self._train.clip_grad:
            scale *= self._train.clip_grad / norm
        torch._foreach_mul_(gradients, scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.updates += 1
        self.clear()
        return UpdateResult(applied=True, grad_norm=norm, lr=lr)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _squares(gradients: list[Tensor]) -> float:
    """Sum of squares; in fp64 over the tensors, so that many parameters do not overflow."""
    if not gradients:
        return 0.0
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
    return float(norms.square().sum())
