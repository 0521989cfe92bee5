"""Rotary embeddings at given positions, for rows that hold several sequences.

Megatron-core computes angles for positions 0..s-1 of a row. Here they are those of `position_ids`, so that a packed row
gives the angles of its sequences apart, also where responses continue a common prompt.

Invariants: angles are an argument of every layer, so that recomputation of one micro-batch during another's sees its
own; the frequencies are those of `families.rope`, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from models.families.rope import Rope


class PositionRotary(torch.nn.Module):  # type: ignore[misc]
    """Angles [s, b, 1, dim] of `position_ids` [b, s], or [s, 1, 1, dim] of 0..s-1 outside `at`."""

    # The length of a row from the block's input: the same rule as Megatron-core's.
    get_rotary_seq_len = RotaryEmbedding.get_rotary_seq_len

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self._interleaved = rope.interleaved
        self._frequencies = rope.frequencies()  # no buffer: it must stay fp32 and out of checkpoints
        self._position_ids: Tensor | None = None

    @contextmanager
    def at(self, position_ids: Tensor | None) -> Iterator[None]:
        """Use these positions within."""
        self._position_ids = position_ids
        try:
            yield
        finally:
            self._position_ids = None

    def forward(self, length: int, packed_seq: bool = False, cp_group: Any = None, **_: Any) -> Tensor:
        """Of a row of `length` tokens if no positions are given; with context parallelism this process's part."""
        if self._position_ids is not None:
            return self.angles(self._position_ids)
        every = self.angles(torch.arange(length)[None])
        group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
        return every if group.size() == 1 or packed_seq else get_pos_emb_on_this_cp_rank(every, 0, group)

    def angles(self, position_ids: Tensor) -> Tensor:
        """[b, s] -> [s, b, 1, dim], fp32, on the device of the ids or of the model's process."""
        device = position_ids.device if position_ids.device.type != "cpu" else torch.device(_device())
        self._frequencies = self._frequencies.to(device)
        angles = position_ids.to(device).t()[..., None].float() * self._frequencies
        double = angles.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        return double[:, :, None]


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """MLA whose angles come with the call, as those of other attentions do. `attention_factor`: yarn's, of cos and sin.

    Megatron-core's computes them inside from the length of the row.
    """

    def __init__(self, *args: Any, attention_factor: float = 1.0, **kwargs: Any) -> None:
        if not isinstance(multi_latent_attention.TELinear, type):
            # Without Transformer Engine its wrappers are mocks, which Megatron-core takes for the real ones here.
            multi_latent_attention.HAVE_TE = False
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _GivenAngles(attention_factor if self.config.rope_type == "yarn" else None)
        self.linear_kv_down_proj.register_forward_hook(self._own_tokens)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Any, **rest: Any) -> Any:
        """As Megatron-core's; `rotary_pos_emb` [s, b, 1, dim]."""
        self.rotary_pos_emb.angles = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **rest)
        finally:
            self.rotary_pos_emb.angles = None

    def _own_tokens(self, _layer: Any, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """[s, b, part] of the columns -> [s / parts, b, all columns], as a layer that is held whole would give it.

        Given columns, Megatron-core lets every process use the rotated key of all tokens, and each keeps only the
        gradient from its own heads. Given tokens, it gathers them in a way that sums those gradients.
        """
        part, bias = output
        whole = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if part.shape[-1] == whole or not self.config.sequence_parallel:
            return output
        return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(part)), bias


class _GivenAngles(torch.nn.Module):  # type: ignore[misc]
    """Stands where MLA keeps its rotary embedding."""

    get_rotary_seq_len = RotaryEmbedding.get_rotary_seq_len

    def __init__(self, attention_factor: float | None) -> None:
        super().__init__()
        self.angles: Tensor | None = None
        self._factor = attention_factor

    def forward(self, length: int, **_: Any) -> Any:
        return self.angles if self._factor is None else (self.angles, self._factor)


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
