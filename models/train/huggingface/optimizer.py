"""The optimizer of Hugging Face models: AdamW over fp32 master parameters.

Invariants of `Updater`, where every gradient becomes an update:
- gradients arrive as sums of numerators; they are divided by the step's denominator here, once;
- with sharded parameters, each process updates its shards; the norm of the gradient is that of all shards together, so
  that all processes clip alike, and refuse together;
- a gradient that is not finite changes neither parameters nor optimizer state;
- the learning rate depends only on the number of updates made, and on the factor that the caller gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from configs.schema.train import TrainConfig
from models.train.huggingface.hf_files import local
from models.train.model_set import UpdateResult
from models.train.spec import learning_rate


class Updater:
    """AdamW with warm-up, decay and gradient clipping (arXiv:1711.05101)."""

    def __init__(
        self,
        model: torch.nn.Module,
        train: TrainConfig,
        total_steps: int | None,
        sum_over_shards: Callable[[float], float] = float,
    ) -> None:
        """`sum_over_shards`: of one number per shard of the model; default: this process holds all of it."""
        self._train, self._total_steps = train, total_steps
        self._sum_over_shards = sum_over_shards
        self.named_parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # Norms and biases are not pulled to zero: their scale is not a measure of complexity.
        matrices = [p for _, p in self.named_parameters if p.ndim > 1]
        vectors = [p for _, p in self.named_parameters if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.lr,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps,
            fused=True,
        )
        self.updates = 0

    def apply(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Divide the summed gradients by `denominator`, clip, update; or refuse. Clears the gradients either way.

        Gradients are complete sums over all processes. `lr_scale`: factor of this update's learning rate.
        """
        lr = learning_rate(self.updates, self._train, self._total_steps) * lr_scale
        gradients = [local(p.grad) for _, p in self.named_parameters if p.grad is not None]
        norm = math.sqrt(self._sum_over_shards(_sum_of_squares(gradients))) / denominator
        if not gradients or not math.isfinite(norm):
            self.clear()
            return UpdateResult(applied=False, grad_norm=norm, lr=lr)
        torch._foreach_mul_(gradients, gradient_scale(norm, denominator, self._train.clip_grad))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.updates += 1
        self.clear()
        return UpdateResult(applied=True, grad_norm=norm, lr=lr)

    def refuse(self) -> UpdateResult:
        """Make no update: there is nothing to learn from."""
        self.clear()
        lr = learning_rate(self.updates, self._train, self._total_steps)
        return UpdateResult(applied=False, grad_norm=0.0, lr=lr)

    def clear(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state as flat tensors, `<parameter>/<entry>`."""
        out: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters:
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                out[f"{name}/{entry}"] = value.detach()
        return out


def gradient_scale(norm: float, denominator: float, clip_grad: float) -> float:
    """What summed gradients are multiplied by: divided by the step's denominator, and clipped to `clip_grad` (0: not).

    `norm`: of the gradient after the division.
    """
    return (clip_grad / norm if clip_grad > 0 and norm > clip_grad else 1.0) / denominator


def _sum_of_squares(gradients: list[torch.Tensor]) -> float:
    """Over all gradients; summed in fp64 so that many parameters do not overflow."""
    if not gradients:
        return 0.0
    return float(torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square().sum())
