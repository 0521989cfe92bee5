"""Functional forward of Llama-like decoders (Llama, Qwen2, Qwen3) over live weights.

No modules, no cache objects: weights are read at every call, so a swap in place shows in the next one. Where keys and
values go, and what attends to what, is the caller's (`attend`); the rest is the same for prefill and decode.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from models.engines.embedded.spec import ModelSpec
from models.engines.embedded.weights import LayerWeights, LiveWeights


class Attend(Protocol):
    """Stores keys and values of a layer and returns the attention's output [R, T, heads * head_dim]."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q` [R, T, heads, head_dim], `k` and `v` [R, T, kv_heads, head_dim], positions already rotated in."""


class Transformer:
    """Forward of one model. `positions` limits the rotary tables, in tokens."""

    def __init__(self, spec: ModelSpec, weights: LiveWeights, positions: int) -> None:
        self.spec = spec
        self.weights = weights
        device, dtype = weights.embed.device, weights.embed.dtype
        frequencies = torch.tensor(spec.inverse_frequencies, dtype=torch.float32)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(device, dtype)  # [positions, head_dim]
        # The sign of "rotate half" is in the table, which leaves a plain swap of halves to the forward.
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(device, dtype)

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Final hidden states [R, T, hidden] of token ids [R, T] at `positions` [R, T]."""
        x = F.embedding(tokens, self.weights.embed)
        cos, sin = self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)
        for index, layer in enumerate(self.weights.layers):
            q, k, v = self._project(self._norm(x, layer.input_norm), layer, cos, sin)
            x = x + F.linear(attend(index, q, k, v), layer.o, layer.o_bias)
            gate, up = F.linear(self._norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [N, vocabulary] of hidden states [N, hidden]."""
        return F.linear(hidden, self.weights.head).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def _project(
        self, x: torch.Tensor, layer: LayerWeights, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, length = x.shape[:2]
        heads, kv_heads, width = self.spec.shape.heads, self.spec.shape.kv_heads, self.spec.shape.head
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(rows, length, heads + 2 * kv_heads, width)
        qk = qkv[:, :, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (width,), None, self.spec.norm_eps) * layer.qk_norm
        swapped = torch.cat((qk[..., width // 2 :], qk[..., : width // 2]), dim=-1)
        qk = torch.addcmul(qk * cos, swapped, sin)
        return qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, heads + kv_heads :]
