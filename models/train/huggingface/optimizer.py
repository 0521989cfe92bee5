"""The optimizer of Hugging Face models: AdamW over fp32 master parameters.

Invariant: with sharded parameters, each process updates its shards; the norm of the gradient is that of all shards
together, so that all processes clip alike, and refuse together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from configs.schema.train import TrainConfig
from models.train.huggingface.hf_files import local
from models.train.huggingface.loading import Placement
from models.train.spec import Updates


class Updater(Updates):
    """AdamW with warm-up, decay and gradient clipping (arXiv:1711.05101)."""

    def __init__(
        self, model: torch.nn.Module, train: TrainConfig, total_steps: int | None, placement: Placement
    ) -> None:
        super().__init__(train, total_steps)
        self._placement = placement
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

    def _summed(self) -> tuple[float, list[Tensor] | None]:
        parameters = [parameter for _, parameter in self.named_parameters]
        self._placement.sum_gradients(parameters)
        gradients = [local(one.grad) for one in parameters if one.grad is not None]
        squares = 0.0
        if gradients:  # summed in fp64 so that many parameters do not overflow
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
            squares = float(norms.square().sum())
        return math.sqrt(self._placement.sum_over_shards(squares)), gradients or None

    def _step(self) -> None:
        self.optimizer.step()

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
