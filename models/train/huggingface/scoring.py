"""Forward pass of a causal language model over packed rows, down to log-probs of chosen tokens.

Backbones and scorers are modules, so that one forward pass covers decoder, head and log-probs: frameworks that gather
sharded parameters hook into the forward pass of the outermost module.

Invariants:
- logits exist only for chosen tokens, a block at a time (`models.algorithms.tokens`), in both passes;
- logits are divided by the temperature in fp32, whatever the precision of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from models.algorithms.tokens import OutputLayer, token_log_probs
from models.errors import UnsupportedModel
from models.train.dp_group import Float32Array
from models.train.huggingface.attention import (
    FLASH_ATTENTION,
    MASK_TOKENS,
    PACKED_SDPA,
    allowed_in,
    flash_arguments,
    seen_by,
)
from models.train.step.micro_batch_loss import to_device
from models.train.step.micro_batches import Int64Array, PackedRows, lengthened
from models.train.step.packing import Packing

# --------------------------------------------------------------------------------------------------
# Context parallelism: the tokens of each row are divided among the processes of a group.
#
# Each process computes a run of consecutive tokens of every row. Before attention, keys and values of all runs are
# gathered (they are small where heads share them), and each process attends with its own queries under its part of the
# mask: exact for packed rows and shared prompts, on any device and backend. Log-probs and values are put together
# again, so that every process of the group computes the same loss; each passes back the gradient of its own tokens
# alone, and the sum over all processes, which sharding makes anyway, is the whole.
#
# torch.distributed.tensor.experimental.context_parallel is not used: its ring takes causal masks only, which rules
# packed rows out, and it has no CPU kernel.


ATTENTION: Final = "sdpa_gathered"


@dataclass(frozen=True)
class Part:
    """What one process computes of the rows of a micro-batch."""

    rows: PackedRows  # whole
    targets: Int64Array  # [n] of this process, out of [N]
    temperatures: Float32Array | None = None  # [n] of those
    own: Int64Array | None = None  # [n] which of the N chosen tokens are its own
    columns: slice | None = None  # of the padded rows
    source: Int64Array | None = None  # [n] flat positions in this process's part


class ContextParallel:
    """This process's place among those that share the tokens of its rows. `group`: None = it has them all."""

    def __init__(self, group: Any | None) -> None:
        self._group = group
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self._rank: int = 0 if group is None else dist.get_rank(group)

    def prepare(self, model: Any) -> None:
        """Let a model attend to gathered keys. Raises `UnsupportedModel`."""
        if self._group is None:
            return
        attention = getattr(model.config, "_attn_implementation", None)
        if attention not in ("sdpa", PACKED_SDPA):
            raise UnsupportedModel(
                f"--fsdp-context-parallel-size {self.size} is implemented for --attn-implementation sdpa, and "
                f"{type(model).__name__} runs with {attention}; set one of the two"
            )
        _register(self._group)
        model.set_attn_implementation(ATTENTION)

    def check(self, packing: Packing) -> None:
        """Raise `UnsupportedModel` if a model's attention takes no free choice of the mask."""
        if self._group is not None and not packing.share_prompts:
            raise UnsupportedModel(
                f"--fsdp-context-parallel-size {self.size} needs attention whose mask can be chosen (no sliding "
                "windows, no recurrent layers, --attn-implementation sdpa or auto); set it to 1 for this model"
            )

    def part(self, rows: PackedRows) -> Part:
        """What this process computes."""
        if self._group is None:
            return Part(rows, rows.targets, rows.temperatures)
        length = rows.input_ids.shape[1]
        run = -(-length // self.size)
        row, column = np.divmod(rows.source, length)
        owner, local = np.divmod(column, run)
        own = np.flatnonzero(owner == self._rank)
        return Part(
            rows,
            rows.targets[own],
            None if rows.temperatures is None else rows.temperatures[own],
            own,
            slice(self._rank * run, (self._rank + 1) * run),
            row[own] * run + local[own],
        )

    def joined(self, values: Tensor, part: Part) -> Tensor:
        """[N] out of the [n] of each process. The gradient passes to this process's own."""
        if part.own is None:
            return values
        own = to_device(part.own, values.device)
        spread: Tensor = Spread.apply(values, own, len(part.rows.targets), self._group)
        return spread

    def inputs(self, rows: PackedRows, columns: slice, device: torch.device) -> dict[str, Tensor]:
        """Ids and positions [B, l] of these columns, and whom they may see, bool [B, 1, l, L]; the size divides L."""
        rows = lengthened(rows, self.size)
        ids, positions = rows.input_ids, rows.position_ids
        if positions is None:
            positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        return {
            "input_ids": to_device(ids[:, columns], device),
            "position_ids": to_device(positions[:, columns], device),
            "attention_mask": allowed_in(replace(rows, position_ids=positions), device, columns),
        }


def _register(group: Any) -> None:
    """Under the name `ATTENTION`: scaled dot products with the keys of all processes of `group`."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        keys, values = _Gather.apply(key, group), _Gather.apply(value, group)
        return sdpa_attention_forward(module, query, keys, values, mask, **kwargs)

    AttentionInterface.register(ATTENTION, attend)


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """[B, heads, L / size, d] of each process -> [B, heads, L, d]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.width = group, part.shape[2]
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)  # which torch's compiler knows
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.narrow(2, dist.get_rank(ctx.group) * ctx.width, ctx.width), None


class Spread(torch.autograd.Function):  # type: ignore[misc]
    """Numbers of all `count` tokens, where each process of `group` has those at its `own` places.

    Each process puts its numbers in their places, and all get all. Backward, each takes the gradients of its own: every
    process computes the same loss, and none adds to another's numbers.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(own)
        every = values.new_zeros(count).index_copy(0, own, values)
        dist.all_reduce(every, group=group)
        return every

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradient.index_select(0, own), None, None, None


def output_layer(model: Any) -> OutputLayer:
    """The output embedding, with its weights of this moment, and what the model's configuration adds.

    Models scale or cap their logits in ways that only their own forward pass knows; `loading.check_head` compares.
    """
    projection = model.get_output_embeddings()
    linear = getattr(projection, "base_layer", projection)
    weight = linear.weight
    if linear is not projection and not projection.disable_adapters:  # LoRA of peft
        weight = weight + projection.get_delta_weight(projection.active_adapters[0])
    text = model.config.get_text_config()
    multiply = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    return OutputLayer(weight, linear.bias, multiply, getattr(text, "final_logit_softcapping", None))


@dataclass(frozen=True)
class Passes:
    """How forward passes run in this process."""

    device: torch.device
    autocast_dtype: torch.dtype | None = None
    mask_dtype: torch.dtype = torch.float32  # of attention: sharded models compute in it without autocast
    context: ContextParallel = field(default_factory=lambda: ContextParallel(None))  # who shares the tokens of a row
    mask_tokens: int = MASK_TOKENS  # longest rows that get a mask where sequences could be attended one by one


class Backbone(torch.nn.Module):  # type: ignore[misc]
    """Last hidden states of chosen tokens under one model. Whose module the decoder is, subclasses decide."""

    def __init__(self, model: Any, passes: Passes) -> None:
        """Raises `UnsupportedModel`."""
        super().__init__()
        passes.context.prepare(model)
        self._config = model.config
        self._decoder_unregistered = (model.base_model,)
        self._passes, self._context = passes, passes.context

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision context of the forward pass."""
        device, dtype = self._passes.device, self._passes.autocast_dtype
        context: AbstractContextManager[Any] = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
        return context

    def chosen_hidden(self, rows: PackedRows) -> Tensor:
        """Last hidden states [N, H] that predict the chosen tokens."""
        inputs = {"input_ids": self._to_device(rows.input_ids)}
        if rows.position_ids is not None:
            inputs["position_ids"] = self._to_device(rows.position_ids)
        return self.hidden_at({**inputs, **self._seen(rows)}, rows.source)

    def own_hidden(self, part: Part) -> Tensor:
        """Last hidden states [n, H] that predict this process's tokens."""
        if part.source is None or part.columns is None:
            return self.chosen_hidden(part.rows)
        return self.hidden_at(self._context.inputs(part.rows, part.columns, self._passes.device), part.source)

    def hidden_at(self, inputs: Mapping[str, Any], source: npt.NDArray[np.int64]) -> Tensor:
        """Last hidden states [n, H] at the flat positions `source` [n] of the decoder's inputs [B, L]."""
        hidden: Tensor = self._decoder_unregistered[0](**inputs, use_cache=False).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._to_device(source))

    def _seen(self, rows: PackedRows) -> dict[str, Any]:
        """Arguments of the decoder that say whom each token sees, unless that is all before it in its row."""
        attention = str(getattr(self._config, "_attn_implementation", "eager"))
        if attention == FLASH_ATTENTION:
            return flash_arguments(rows, self._passes.device)
        if rows.position_ids is None:
            return {}
        packed = attention == PACKED_SDPA
        if packed and rows.input_ids.shape[1] > self._passes.mask_tokens:
            return {"segments": seen_by(rows, self._passes.device, self._passes.mask_dtype)}
        if rows.unit is None and not packed:
            return {}  # transformers' masks follow from the restarts of the positions
        mask = allowed_in(rows, self._passes.device)
        if attention.startswith("sdpa"):
            return {"attention_mask": mask}
        dtype = self._passes.mask_dtype
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return {"attention_mask": additive.masked_fill(~mask, torch.finfo(dtype).min)}

    def _to_device(self, array: Any) -> Tensor:
        return to_device(array, self._passes.device)


class Scorer(Backbone):
    """Log-probs and entropies of chosen tokens under one model, which is its only submodule."""

    def __init__(self, model: Any, passes: Passes, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__(model, passes)
        self.model = model
        self._temperature, self._chunk_tokens = temperature, chunk_tokens

    def forward(self, rows: PackedRows, *, entropy: str = "none") -> tuple[Tensor, Tensor | None]:
        """Log-probs [N] and, unless `entropy` is "none", entropies [N] of the chosen tokens of `rows`, in fp32.

        `entropy`: "value" without a graph, "graph" with one.
        """
        part = self._context.part(rows)
        with self.autocast():
            chosen = self.own_hidden(part)
            targets = self._to_device(part.targets)
            own, apart = self._temperature, part.temperatures
            log_probs, entropies = token_log_probs(
                chosen,
                output_layer(self.model),
                targets,
                temperature=own if apart is None else self._to_device(apart).nan_to_num(own),
                entropy=entropy,
                chunk_tokens=self._chunk_tokens,
            )
        return (
            self._context.joined(log_probs, part),
            None if entropies is None else self._context.joined(entropies, part),
        )
