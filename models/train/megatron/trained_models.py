"""The models of a Megatron run: chunks with their optimizer, the critic of PPO, and the reference policy on the host.

Invariants of `TrainedChunks`:
- those of `Updates`;
- call `settle` before parameters are read outside a forward pass: with overlap_param_gather they are old until then.

Invariants of `SwappedReference`, whose weights take the place of the policy's while the reference scores (a second
model would cost as much memory of the accelerator as the first):
- outside `in_place` the model holds the policy, whatever happened inside; the exchange changes no bit;
- the reference is never trained; with `ref_update_interval` it is part of the checkpoint, since no other file holds it.

Invariants of `MegatronCritic`, a second GPT in the layout of the policy with a head of one output:
- the head is fp32 whatever the model's precision, stands on the last stage, and is the same in all tensor ranks;
- values are not divided by the temperature; the policy and the critic share no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from configs.schema.train import TrainConfig, has_transformer_engine
from models.errors import TrainConfigInvalid
from models.train.dp_group import Float32Array
from models.train.huggingface.hf_files import model_tensors
from models.train.megatron.forward import Pipeline, chosen_hidden, of_all_tokens
from models.train.megatron.inputs import ModelInputs
from models.train.megatron.options import options_of
from models.train.spec import TrainSpec, Updates
from models.train.step.critic import CriticModel, ValueHead
from models.train.step.micro_batches import MicroBatch


class TrainedChunks(Updates):
    """This process's chunks of one model, with their optimizer."""

    def __init__(self, chunks: Sequence[Any], train: TrainConfig, spec: TrainSpec, total_steps: int | None) -> None:
        """`chunks`: bare, with their weights. `train`: the optimizer's options of this model.

        Raises `TrainConfigInvalid`.
        """
        super().__init__(train, total_steps)
        self.chunks = list(chunks)
        for chunk in self.chunks:
            chunk.config.calculate_per_token_loss = True  # gradients are summed over replicas, not averaged
            chunk.train()
        self.wrapped = _wrapped(self.chunks, spec)
        self.optimizer = _optimizer(self.wrapped, train, spec)
        self._gathers_late = spec.megatron.overlap_param_gather
        self._stale = self.begun = False  # begun: there are gradients of a step
        self.clear()

    def _summed(self) -> tuple[float, list[Tensor]]:
        from megatron.core.distributed import finalize_model_grads

        # Over data-parallel ranks; norms of queries and keys, and what is cut along the sequence, over tensor ranks
        # too; a tied embedding over the first and the last stage.
        finalize_model_grads(self.wrapped)
        self.optimizer.prepare_grads()
        # Of the optimizer's own parameters, which may be shards of the model's.
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        found = [getattr(one, "decoupled_grad", None) if one.grad is None else one.grad for one in parameters]
        return float(self.optimizer.get_grad_norm()), [gradient for gradient in found if gradient is not None]

    def _step(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self._train.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self._stale = self._gathers_late

    def clear(self) -> None:
        """Drop all gradients."""
        self.begun = False
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_tensors(self) -> list[Tensor]:
        """What the optimizer updates, and its state."""
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        inside = [one.optimizer for one in chained if one.optimizer is not None]  # a process may hold no shard
        mains = [parameter for one in inside for group in one.param_groups for parameter in group["params"]]
        states = [value for one in inside for state in one.state.values() for value in state.values()]
        return [value for value in mains + states if torch.is_tensor(value)]

    def device_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and the optimizer's tensors; gradient buffers, which `clear` has emptied."""
        kept = [tensor for chunk in self.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        cleared = [
            buffer.grad_data for chunk in self.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        return kept + self.optimizer_tensors(), cleared

    def settle(self) -> None:
        """Make all parameters those of the last update. Collective."""
        if self._stale:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)
            self._stale = False


def check_optimizer(spec: TrainSpec) -> None:
    """Raise `TrainConfigInvalid` for options of the optimizer that do not fit this machine."""
    lack = "" if has_transformer_engine() else "Transformer Engine, which is not installed"
    lack = lack if torch.cuda.is_available() else "a GPU, and this process sees no GPU"
    if spec.megatron.optimizer_cpu_offload and lack:
        raise TrainConfigInvalid(
            f"optimizer_cpu_offload keeps Megatron-core's optimizer on the host, which takes {lack}; leave "
            "--optimizer-cpu-offload out, or take --train-backend fsdp --fsdp-cpu-offload"
        )


def _wrapped(chunks: Sequence[Any], spec: TrainSpec) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    m = spec.megatron
    taken = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    own = {
        **{name: getattr(m, name) for name in taken},
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,  # refused by `update`, in all processes together
        "average_in_collective": False,
    }
    config = DistributedDataParallelConfig(**{**own, **options_of(m.megatron_args, "ddp")})
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _optimizer(wrapped: list[Any], train: TrainConfig, spec: TrainSpec) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    m = spec.megatron
    config = wrapped[0].config
    of_train = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
    own = {
        **{name: getattr(train, name) for name in of_train},
        **{name: getattr(m, name) for name in ("use_distributed_optimizer", "overlap_param_gather")},
        "optimizer": "adam",
        "min_lr": 0.0,
        "decoupled_weight_decay": True,
        "clip_grad": 0.0,  # `update` clips
        "bf16": config.params_dtype == torch.bfloat16,
        "params_dtype": config.params_dtype,
        "optimizer_cpu_offload": m.optimizer_cpu_offload,
        "use_precision_aware_optimizer": m.optimizer_cpu_offload,  # its main parameters are on the host as well
        "optimizer_offload_fraction": m.optimizer_offload_fraction if m.optimizer_cpu_offload else 0.0,
    }
    return get_megatron_optimizer(OptimizerConfig(**{**own, **options_of(m.megatron_args, "optimizer")}), wrapped)


class SwappedReference:
    """Weights of the reference for this process's chunks."""

    def __init__(self, chunks: Sequence[Any], settle: Callable[[], None], *, renewed: bool) -> None:
        """The reference is what the chunks hold now. `settle`: makes their parameters current.

        `renewed`: whether it becomes the policy from time to time.
        """
        self._chunks = list(chunks)
        self._settle = settle
        self.renewed = renewed
        self.host: dict[str, Tensor] = {}  # this process's part of the weights, by chunk and name
        for name, tensor in self._live():
            pinned = tensor.device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self.host[name] = host.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the chunks are the reference. Collective."""
        self._settle()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def renew(self) -> None:
        """Become the policy as it is now. Collective."""
        self._settle()
        for name, tensor in self._live():
            self.host[name].copy_(tensor)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `host`; the checkpoint's names and shapes have been compared."""
        for name, host in self.host.items():
            host.copy_(tensors[name])

    def _exchange(self) -> None:
        """The copies follow one another on the device's stream; the host waits once, for all of them."""
        for name, tensor in self._live():
            host = self.host[name]
            of_policy = tensor.clone()  # one tensor at a time: the allocator gives its memory to the next
            tensor.copy_(host, non_blocking=True)
            host.copy_(of_policy, non_blocking=True)
        if any(tensor.device.type == "cuda" for _, tensor in self._live()):
            torch.cuda.synchronize()

    def _live(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, and what else of the chunks a checkpoint would hold."""
        for number, chunk in enumerate(self._chunks):
            yield from ((f"{number}.{name}", tensor) for name, tensor in model_tensors(chunk).items())


def into_critic(chunks: Sequence[Any], *, seed: int, device: torch.device) -> None:
    """Make the chunks of a language model those of a critic, in place."""
    for chunk in chunks:
        chunk.share_embeddings_and_output_weights = False  # the embedding is no output layer any more
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config.hidden_size, seed=seed).to(device)


class MegatronCritic(CriticModel):
    """`CriticModel` over the chunks of this process."""

    def __init__(self, trained: TrainedChunks, pipeline: Pipeline, *, value_clip: float, is_mp_src_rank: bool) -> None:
        super().__init__(value_clip, trained)
        self.trained, self._pipeline = trained, pipeline
        self._is_mp_src_rank = is_mp_src_rank

    def _values(self, hidden: Tensor, inputs: ModelInputs) -> Tensor:
        """V [N] before each chosen token, on the last stage; differentiable. Collective over its tensor ranks."""
        model = self._pipeline.last
        assert model is not None
        chosen = chosen_hidden(model, hidden, inputs, partial_gradients=False)
        return of_all_tokens(model.output_layer(chosen).squeeze(-1), inputs, model.pg_collection.cp)

    def values(self, batches: Sequence[MicroBatch]) -> list[Float32Array]:
        """V before each chosen token, one array [N] per micro-batch; nothing without `is_mp_src_rank`."""
        return self._pipeline.score(batches, self._values, keep=self._is_mp_src_rank)

    def backward(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the micro-batches' numerators, and their sums."""

        def numerator(number: int, hidden: Tensor, inputs: ModelInputs) -> Tensor:
            values = self._values(hidden, inputs)
            batch = batches[number]
            return values.sum() * 0.0 if batch.blank else self._numerator(batch.members, values)

        self._pipeline.train(batches, numerator)
