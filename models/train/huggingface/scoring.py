"""Forward pass of a causal language model over packed rows, down to log-probs of chosen tokens.

Backbones and scorers are modules, so that one forward pass covers decoder, head and log-probs: frameworks that gather
sharded parameters hook into the forward pass of the outermost module.

Invariants:
- logits exist only for chosen tokens, a block at a time (`models.algorithms.token_log_probs`), in both passes;
- logits are divided by the temperature in fp32, whatever the precision of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.algorithms.token_log_probs import OutputLayer, token_log_probs
from models.train.huggingface.context import ContextParallel, Part
from models.train.packing.rows import PackedRows, attention_allowed


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
    mask_dtype: torch.dtype = torch.float32  # of additive attention masks
    context: ContextParallel = field(default_factory=lambda: ContextParallel(None))  # who shares the tokens of a row


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
        inputs: dict[str, npt.NDArray[Any]] = {"input_ids": rows.input_ids}
        if rows.position_ids is not None:
            inputs["position_ids"] = rows.position_ids
        if rows.unit is not None and rows.branch is not None:
            inputs["attention_mask"] = attention_allowed(rows.unit, rows.branch)
        return self.hidden_at(inputs, rows.source)

    def own_hidden(self, part: Part) -> Tensor:
        """Last hidden states [n, H] that predict this process's tokens."""
        if part.source is None or part.columns is None:
            return self.chosen_hidden(part.rows)
        return self.hidden_at(self._context.inputs(part.rows, part.columns), part.source)

    def hidden_at(self, inputs: Mapping[str, npt.NDArray[Any]], source: npt.NDArray[np.int64]) -> Tensor:
        """Last hidden states [n, H] at the flat positions `source` [n] of the decoder's inputs [B, L].

        An `attention_mask` says who sees whom, boolean, [B, 1, L, keys].
        """
        tensors = {
            name: self._mask(array) if name == "attention_mask" else self._to_device(array)
            for name, array in inputs.items()
        }
        output = self._decoder_unregistered[0](**tensors, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._to_device(source))

    def _mask(self, allowed: npt.NDArray[np.bool_]) -> Tensor:
        """The mask [B, 1, L, L] in the form that the attention takes: boolean for sdpa, additive for eager."""
        mask = self._to_device(allowed)
        if str(getattr(self._config, "_attn_implementation", "eager")).startswith("sdpa"):
            return mask
        dtype = self._passes.mask_dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    def _to_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._passes.device, non_blocking=True)


class Scorer(Backbone):
    """Log-probs and entropies of chosen tokens under one model, which is its only submodule."""

    def __init__(self, model: Any, passes: Passes, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__(model, passes)
        self.model = model
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

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
