"""Forward pass of a causal language model over packed rows, down to log-probs of chosen tokens.

Invariants:
- logits exist only for chosen tokens and only `chunk_tokens` at a time; with several chunks the backward pass computes
  each chunk's logits again instead of keeping them;
- logits are divided by the temperature in fp32, whatever the precision of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.algorithms.entropy import token_log_probs
from models.train.packing import PackedRows

Head = Callable[[Tensor], Tensor]


def output_head(model: Any) -> Head:
    """Logits [N, V] from last hidden states [N, H]: the output embedding and what the model's configuration adds.

    Models scale or cap their logits in ways that only their own forward pass knows; `loading.check_head` compares.
    """
    projection = model.get_output_embeddings()
    text = model.config.get_text_config()
    multiply = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    cap = getattr(text, "final_logit_softcapping", None)

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = projection(hidden)
        if multiply != 1.0:
            logits = logits * multiply
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    return head


class Scorer:
    """Log-probs and entropies of chosen tokens under one model."""

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        temperature: float,
        chunk_tokens: int,
    ) -> None:
        self._model = model
        self._decoder = model.base_model
        self._head = output_head(model)
        self._device = device
        self._autocast_dtype = autocast_dtype
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision context of the forward pass."""
        if self._autocast_dtype is None:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.autocast(self._device.type, dtype=self._autocast_dtype)
        return context

    def __call__(self, rows: PackedRows, *, entropy: str = "none") -> tuple[Tensor, Tensor | None]:
        """Log-probs [N] and, unless `entropy` is "none", entropies [N] of the chosen tokens of `rows`, in fp32.

        `entropy`: "value" without a graph, "graph" with one.
        """
        with self.autocast():
            hidden = self.hidden(rows)
            source, targets = self._to_device(rows.source), self._to_device(rows.targets)
            chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, source)
            if len(targets) <= self._chunk_tokens:
                return self._chunk(chosen, targets, entropy)
            parts = [
                checkpoint(self._chunk, part, ids, entropy, use_reentrant=False, preserve_rng_state=False)
                if torch.is_grad_enabled()
                else self._chunk(part, ids, entropy)
                for part, ids in zip(chosen.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True)
            ]
        log_probs = torch.cat([part[0] for part in parts])
        return log_probs, None if entropy == "none" else torch.cat([part[1] for part in parts])

    def hidden(self, rows: PackedRows) -> Tensor:
        """Last hidden states [B, L, H]."""
        positions = None if rows.position_ids is None else self._to_device(rows.position_ids)
        output = self._decoder(input_ids=self._to_device(rows.input_ids), position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _chunk(self, hidden: Tensor, targets: Tensor, entropy: str) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(self._head(hidden), targets, temperature=self._temperature, entropy=entropy)

    def _to_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
