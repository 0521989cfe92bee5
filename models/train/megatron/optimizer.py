"""The chunks of one trained model: gradients summed over data-parallel ranks once a step, and Megatron's AdamW.

Invariants:
- gradients arrive as sums of numerators; they are summed over all processes and divided by the step's denominator
  here, once;
- a gradient that is not finite changes neither parameters nor optimizer state, in any process;
- the learning rate depends only on the number of updates made, and on the factor that the caller gives;
- whoever reads parameters outside a forward pass asks for `settle` first: with overlap_param_gather they are old until
  then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.schema.train import TrainConfig
from models.errors import TrainConfigInvalid
from models.train.huggingface.optimizer import gradient_scale
from models.train.megatron.settings.options import split_options
from models.train.model_set import UpdateResult
from models.train.spec import TrainSpec, learning_rate


class TrainedChunks:
    """This process's chunks of one model, with their optimizer."""

    def __init__(self, chunks: Sequence[Any], train: TrainConfig, spec: TrainSpec, total_steps: int | None) -> None:
        """`chunks`: bare, with their weights. `train`: the optimizer's options of this model.

        Raises `TrainConfigInvalid`.
        """
        self._train = train
        self._total_steps = total_steps
        self.chunks = list(chunks)
        for chunk in self.chunks:
            chunk.config.calculate_per_token_loss = True  # gradients are summed over replicas, not averaged
            chunk.train()
        self.wrapped = _wrapped(self.chunks, spec)
        self.optimizer = _optimizer(self.wrapped, train, spec)
        self._gathers_late = spec.megatron.overlap_param_gather
        self._stale = False
        self.updates = 0
        self.clear()

    def update(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Sum the gradients over the processes, divide, clip, update; or refuse. Clears the gradients. Collective."""
        from megatron.core.distributed import finalize_model_grads

        lr = learning_rate(self.updates, self._train, self._total_steps) * lr_scale
        # Over data-parallel ranks; norms of queries and keys, and what is cut along the sequence, over tensor ranks
        # too; a tied embedding over the first and the last stage.
        finalize_model_grads(self.wrapped)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm()) / denominator
        if not math.isfinite(norm):  # the same in all processes: it is summed over them
            self.clear()
            return UpdateResult(applied=False, grad_norm=norm, lr=lr)
        gradients = self._gradients()
        if gradients:
            torch._foreach_mul_(gradients, gradient_scale(norm, denominator, self._train.clip_grad))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._train.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self._stale = self._gathers_late
        self.updates += 1
        self.clear()
        return UpdateResult(applied=True, grad_norm=norm, lr=lr)

    def refuse(self) -> UpdateResult:
        """Make no update: there is nothing to learn from."""
        self.clear()
        return UpdateResult(
            applied=False, grad_norm=0.0, lr=learning_rate(self.updates, self._train, self._total_steps)
        )

    def clear(self) -> None:
        """Drop all gradients."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Make all parameters those of the last update. Collective."""
        if self._stale:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)
            self._stale = False

    def _gradients(self) -> list[Tensor]:
        """Of the optimizer's own parameters, which may be shards of the model's."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        found = [getattr(one, "decoupled_grad", None) if one.grad is None else one.grad for one in parameters]
        return [gradient for gradient in found if gradient is not None]


def check_optimizer(spec: TrainSpec) -> None:
    """Raise `TrainConfigInvalid` for options of the optimizer that do not fit this machine."""
    if spec.megatron.optimizer_cpu_offload and not torch.cuda.is_available():
        raise TrainConfigInvalid(
            "optimizer_cpu_offload moves the optimizer from a GPU to the host, but this process sees no GPU; leave "
            "--optimizer-cpu-offload out"
        )


def _wrapped(chunks: Sequence[Any], spec: TrainSpec) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    m = spec.megatron
    own = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": m.use_distributed_optimizer,
        "overlap_grad_reduce": m.overlap_grad_reduce,
        "overlap_param_gather": m.overlap_param_gather,
        "check_for_nan_in_grad": False,  # refused by `update`, in all processes together
        "average_in_collective": False,
    }
    config = DistributedDataParallelConfig(**{**own, **split_options(m.megatron_args).ddp})
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _optimizer(wrapped: list[Any], train: TrainConfig, spec: TrainSpec) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    m = spec.megatron
    config = wrapped[0].config
    own = {
        "optimizer": "adam",
        "lr": train.lr,
        "min_lr": 0.0,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_eps": train.adam_eps,
        "decoupled_weight_decay": True,
        "clip_grad": 0.0,  # `update` clips
        "bf16": config.params_dtype == torch.bfloat16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": m.use_distributed_optimizer,
        "overlap_param_gather": m.overlap_param_gather,
        "optimizer_cpu_offload": m.optimizer_cpu_offload,
        "use_precision_aware_optimizer": m.optimizer_cpu_offload,  # its main parameters are on the host as well
        "optimizer_offload_fraction": m.optimizer_offload_fraction if m.optimizer_cpu_offload else 0.0,
    }
    return get_megatron_optimizer(OptimizerConfig(**{**own, **split_options(m.megatron_args).optimizer}), wrapped)
