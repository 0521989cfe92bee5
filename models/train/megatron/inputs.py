"""Packed rows as tensors for one process of a Megatron layout, and the local attention and norms that read them.

Invariants:
- `micro_batches.py` decides who sees whom: responses after a common prompt, several units in a row, or one sequence;
- rows may grow to the right, to a length that divides over the processes; nothing looks at what is added;
- of the chosen tokens, a process knows which are predicted in its part of the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from models.errors import UnsupportedModel
from models.train.huggingface.attention import allowed_in, sequence_ends
from models.train.step.micro_batch_loss import to_device
from models.train.step.micro_batches import Int64Array, PackedRows, lengthened


@dataclass(frozen=True)
class RowForm:
    """How rows must look for a model and its layout."""

    device: torch.device
    multiple: int = 1  # row lengths are multiples of it
    flat: bool = False  # several sequences in one row are separated by their ends (THD of Transformer Engine)
    context_rank: int = 0
    context_size: int = 1  # processes that share the tokens of a row, each with a head and a tail chunk


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch of B rows of length L, of which this process computes S <= L positions each."""

    input_ids: Tensor  # [B, S]
    position_ids: Tensor | None  # [B, S]; None: those of the places in the row
    mask: Tensor | None  # bool [B, 1, L, L], True = hidden; None = causal
    ends: Tensor | None  # int32 [sequences + 1], cumulated lengths of a flat row
    longest: int  # sequence of a flat row
    places: Tensor  # [n] place in [S * B] (position first) whose output predicts a chosen token
    kept: Tensor | None  # [n] which of the N chosen tokens those are; None: all
    chosen: int  # N
    targets: Tensor  # [n] ids of those that are predicted in this process
    temperatures: Tensor | None  # [n] as in `PackedRows`


def model_inputs(rows: PackedRows, form: RowForm) -> ModelInputs:
    """The tensors of `rows`."""
    rows = lengthened(rows, form.multiple)
    height, length = rows.input_ids.shape
    columns = context_columns(length, form.context_rank, form.context_size)
    row, column = np.divmod(rows.source, length)
    kept, targets, temperatures = None, rows.targets, rows.temperatures
    if form.context_size > 1:
        at = np.full(length, -1, dtype=np.int64)
        at[columns] = np.arange(len(columns))
        found = np.flatnonzero(at[column] >= 0)
        kept, row, column = to_device(found, form.device), row[found], at[column[found]]
        targets, temperatures = targets[found], None if temperatures is None else temperatures[found]
    positions = rows.position_ids
    if positions is None and form.context_size > 1:
        positions = np.broadcast_to(np.arange(length, dtype=np.int64), (height, length))
    flat = form.flat and positions is not None
    ends = sequence_ends(rows) if flat else None
    if flat:
        positions = None  # counted from the ends
    return ModelInputs(
        input_ids=to_device(rows.input_ids[:, columns], form.device),
        position_ids=None if positions is None else to_device(positions[:, columns], form.device),
        mask=None if flat else hidden_mask(rows, form.device),
        ends=None if ends is None else to_device(ends.astype(np.int32), form.device),
        longest=0 if ends is None else int(np.diff(ends).max()),
        places=to_device(column * height + row, form.device),
        kept=kept,
        chosen=len(rows.targets),
        targets=to_device(targets, form.device),
        temperatures=None if temperatures is None else to_device(temperatures, form.device),
    )


def hidden_mask(rows: PackedRows, device: torch.device) -> Tensor | None:
    """Forbidden pairs of positions, bool [B, 1, L, L]; None where causal attention suffices."""
    return None if rows.position_ids is None else ~allowed_in(rows, device)


def context_columns(length: int, rank: int, size: int) -> Int64Array:
    """Positions of a row that a context-parallel process computes: chunk `rank` from the front and from the back.

    Causal attention costs the more the later a token stands; so each process has its share of both.
    """
    if size == 1:
        return np.arange(length, dtype=np.int64)
    chunks = np.arange(length, dtype=np.int64).reshape(2 * size, -1)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])


# --------------------------------------------------------------------------------------------------
# RMSNorm for the local layers: torch's own, in a shape that Megatron-core's specifications can build.
#
# Megatron-core's wrapper of torch's norm refuses sequence parallelism; this one marks its weight, so that the gradients
# of the parts of a sequence are summed over the tensor-parallel processes.


# transformers and the published code leave the eps of the norms inside latent attention at their class's default,
# whatever rms_norm_eps is.
LATENT_EPS = 1e-6


class RmsNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """x / rms(x) * weight over the last dimension [..., hidden_size]. Extra arguments of specifications are ignored."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Squares are summed in fp32, as transformers does; the weight is multiplied in the precision of x."""
        if x.dtype == torch.float32:
            return super().forward(x)
        return self.weight * rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype)


class LatentRmsNorm(RmsNorm):
    """Of latent attention: its eps is fixed, whatever the model's is."""

    def __init__(self, config: Any, hidden_size: int, eps: float = LATENT_EPS, **_: Any) -> None:
        super().__init__(config, hidden_size, LATENT_EPS)


# --------------------------------------------------------------------------------------------------
# Core attention of the local layers on torch's scaled_dot_product_attention.
#
# Megatron-core's own asserts one process of context parallelism as this one does, but has no mask for packed rows,
# keeps the whole score matrix, and wants values as wide as keys.


class SdpaCoreAttention(torch.nn.Module):  # type: ignore[misc]
    """softmax(q k^T * scale) v for the heads of one process.

    query [s, b, n, d], key [s, b, g, d], value [s, b, g, v], n a multiple of g -> [s, b, n * v].
    `attention_mask`: None = causal; else bool [b, 1, s, s] (or [1, 1, s, s]), True = masked.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise UnsupportedModel(
                f"context_parallel_size={config.context_parallel_size} needs Transformer Engine's attention; set "
                "--transformer-impl transformer_engine, or --context-parallel-size 1"
            )
        width = config.kv_channels if k_channels is None else k_channels
        self.softmax_scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        if packed_seq_params is not None or attention_bias is not None:
            raise UnsupportedModel(
                "the local attention takes packed rows as an attention_mask, not as cu_seqlens, and no bias; "
                "use --transformer-impl transformer_engine for cu_seqlens"
            )
        length, rows, heads, _width = query.shape
        if attention_mask is not None:  # with a mask some of torch's kernels take no shared heads, and keep all scores
            key, value = (one.repeat_interleave(heads // one.shape[2], dim=2) for one in (key, value))
        attended: Tensor = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=None if attention_mask is None else ~attention_mask,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != heads,
        )
        return attended.permute(2, 0, 1, 3).reshape(length, rows, heads * value.shape[-1])

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}
