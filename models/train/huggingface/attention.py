"""Who sees whom in packed rows, in the form that a model's attention takes. Made once per micro-batch, for all layers.

    attention           packed rows                                          memory
    sdpa_packed         where torch has a kernel for sequences of different  sum of L_i, and p + r for a response of r
                        lengths (CUDA, bf16): one call for all               tokens after a common prompt of p
                        else each sequence for itself, without a mask        the same, but r x (p + r) where the kernel
                                                                             knows no causal mask of that shape
    flash_attention_2   ends of the sequences (`cu_seq_lens_q`, ...)         sum of L_i
    sdpa, eager         a mask, made on the device                           L x L

`sdpa_packed` takes the place of `sdpa` in models all of whose layers may see all that a mask allows
(`loading.find_packing`). The kernel is `torch.nn.attention.varlen`, tried once on a device before it is used; else
it is torch's scaled_dot_product_attention, one sequence after the other. Rows of at most `MASK_TOKENS` get a mask there
too: many short sequences are one call then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.train.step.micro_batch_loss import to_device
from models.train.step.micro_batches import Int64Array, PackedRows

PACKED_SDPA: Final = "sdpa_packed"
FLASH_ATTENTION: Final = "flash_attention_2"
MASK_TOKENS: Final = 256  # of a row

log = logging.getLogger("sluice.attention")


def attention_allowed(unit: Tensor, branch: Tensor | None = None, columns: slice = slice(None)) -> Tensor:
    """Allowed attention, bool [B, 1, L, L]: earlier tokens of the same unit [B, L], of its prompt or of the same branch
    [B, L].

    `columns`: of the tokens that see. Padding sees earlier padding, so that no row of the mask is empty.
    """
    places = torch.arange(unit.shape[1], device=unit.device)
    allowed = unit[:, columns, None] == unit[:, None, :]
    if branch is not None:
        allowed &= (branch[:, None, :] == 0) | (branch[:, columns, None] == branch[:, None, :])
    allowed &= places[columns, None] >= places
    return allowed[:, None]


def allowed_in(rows: PackedRows, device: torch.device, columns: slice = slice(None)) -> Tensor:
    """`attention_allowed` of rows whose positions are given, on the device."""
    if rows.unit is not None and rows.branch is not None:
        return attention_allowed(to_device(rows.unit, device), to_device(rows.branch, device), columns)
    assert rows.position_ids is not None
    return attention_allowed(to_device(np.cumsum(rows.position_ids == 0, axis=1), device), None, columns)


class Segment(NamedTuple):
    """Consecutive tokens that see themselves, causally, and all of their prompt."""

    length: int
    prompt: int | None = None  # number of the segment that is its prompt


def segments(rows: PackedRows) -> tuple[Segment, ...]:
    """All [B * L] tokens of rows that hold several sequences. Padding is a segment too."""
    if rows.unit is None or rows.branch is None:
        return tuple(map(Segment, np.diff(sequence_ends(rows)).tolist()))
    unit, branch = rows.unit, rows.branch
    begins = (np.diff(unit, axis=1, prepend=-2) != 0) | (np.diff(branch, axis=1, prepend=-1) != 0)
    starts = np.flatnonzero(begins)
    found: list[Segment] = []
    prompt = 0
    lengths = np.diff(starts, append=unit.size).tolist()
    for length, of_branch in zip(lengths, branch.reshape(-1)[starts].tolist(), strict=True):
        prompt = prompt if of_branch else len(found)
        found.append(Segment(length, prompt if of_branch else None))
    return tuple(found)


class Varlen(NamedTuple):
    """Segments as a kernel for sequences of different lengths takes them: one call for all. On the device."""

    ends: Tensor  # int32 [segments + 1]: cumulated lengths
    seen_ends: Tensor  # the same of what they see
    longest: int
    longest_seen: int
    seen: Tensor | None  # int64: places of what they see, a prompt before its response; None: they see just themselves
    apart: Sequence[Segment]


def seen_by(rows: PackedRows, device: torch.device, dtype: torch.dtype) -> Varlen | tuple[Segment, ...]:
    """What attention wants to know of rows that hold several sequences, on a device and in a precision."""
    found = segments(rows)
    return as_varlen(found, device) if has_varlen(device, dtype) else found


def as_varlen(found: Sequence[Segment], device: torch.device) -> Varlen:
    ends = np.cumsum([0, *(segment.length for segment in found)])
    place = np.arange(ends[-1])
    own = [place[start:end] for start, end in pairwise(ends)]
    seen = [own[at] if of.prompt is None else np.append(own[of.prompt], own[at]) for at, of in enumerate(found)]
    seen_ends = np.cumsum([0, *map(len, seen)])
    arrays = (ends.astype(np.int32), seen_ends.astype(np.int32), np.concatenate(seen))
    own_ends, all_ends, places = (to_device(array, device) for array in arrays)
    longest, longest_seen = int(np.diff(ends).max()), int(np.diff(seen_ends).max())
    return Varlen(own_ends, all_ends, longest, longest_seen, places if len(place) < len(places) else None, found)


@lru_cache
def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has its kernel here, and it does what attention of one sequence after the other does."""
    if device.type != "cuda" or dtype == torch.float32:  # which it does not have
        return False
    agrees = varlen_agrees(device, dtype)
    if not agrees:
        log.warning(
            "torch.nn.attention.varlen is not usable here: packed rows are attended one sequence after the other"
        )
    return agrees


def varlen_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Try a prompt of 5 tokens with responses of 3 and 1, 4 heads in 2 groups: results and gradients."""
    found = (Segment(5), Segment(3, 0), Segment(1, 0))
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    made = torch.Generator().manual_seed(1)
    results = []
    # It is first asked for in a forward pass, of which kind whatever.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        drawn = [torch.randn(1, heads, 9, 16, generator=made) for heads in (4, 2, 2)]
        states = [tensor.to(device, dtype).requires_grad_() for tensor in drawn]
        for segments in (as_varlen(found, device), found):
            try:
                attended = _attend(module, states[0], states[1], states[2], None, segments=segments, scaling=0.25)[0]
                results.append([attended, *torch.autograd.grad(attended.square().sum(), states)])
            except (ImportError, RuntimeError, TypeError, ValueError):
                return False
        return all(torch.allclose(ours, known, rtol=0.05, atol=0.05) for ours, known in zip(*results, strict=True))


@lru_cache
def _kernel() -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    # Before torch 2.12: always.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return partial(varlen_attn, window_size=(-1, 0), **grouped)


def sequence_ends(rows: PackedRows) -> Int64Array:
    """Cumulated lengths [sequences + 1] of all rows without common prompts, one behind the other; padding is one more
    sequence, but in rows that hold one alone."""
    height, length = rows.input_ids.shape
    starts = np.arange(height) * length if rows.position_ids is None else np.flatnonzero(rows.position_ids == 0)
    return np.append(starts, height * length)


def flash_arguments(rows: PackedRows, device: torch.device) -> dict[str, Any]:
    """What FlashAttention's kernels for sequences of different lengths want: without it, transformers looks for the
    ends in every layer, and waits for the device each time."""
    ends = sequence_ends(rows)
    on_device = to_device(ends.astype(np.int32), device)
    longest = int(np.diff(ends).max())
    return {"cu_seq_lens_q": on_device, "cu_seq_lens_k": on_device, "max_length_q": longest, "max_length_k": longest}


def register_packed_sdpa() -> None:
    """Let models of transformers be set to `PACKED_SDPA`."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_SDPA, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Varlen | Sequence[Segment] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[B, L, heads, v] from query [B, heads, L, d], key and value [B, groups, L, d or v]; `segments` of the B rows."""
    from torch.nn.attention.bias import causal_lower_right
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if segments is None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return attended
    if isinstance(segments, Varlen):
        if query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0:  # what the kernel can do
            return _attend_at_once(query, key, value, segments, kwargs.get("scaling")), None
        segments = segments.apart
    # Split at one time: the gradient of a slice would be as large as the whole, for each of them.
    queries, keys, values = (_split(one, segments) for one in (query, key, value))
    parts = []
    for own_queries, seen_keys, seen_values, segment in zip(queries, keys, values, segments, strict=True):
        mask = None
        if segment.prompt is not None:
            seen_keys = torch.cat([keys[segment.prompt], seen_keys], dim=2)
            seen_values = torch.cat([values[segment.prompt], seen_values], dim=2)
            # A single token sees all; a mask would only keep it from the faster kernels.
            mask = causal_lower_right(segment.length, seen_keys.shape[2]) if segment.length > 1 else None
        parts.append(sdpa_attention_forward(module, own_queries, seen_keys, seen_values, mask, **kwargs)[0])
    return torch.cat(parts, dim=1).unflatten(1, (query.shape[0], query.shape[2]))[0], None


def _attend_at_once(query: Tensor, key: Tensor, value: Tensor, of: Varlen, scale: float | None) -> Tensor:
    """[B, L, heads, d], by a kernel whose causal order lets the last token of a segment see all of it."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1).to(dtype) for states in (query, key, value))
    if of.seen is not None:
        keys, values = keys.index_select(0, of.seen), values.index_select(0, of.seen)
    attended = _kernel()(queries, keys, values, of.ends, of.seen_ends, of.longest, of.longest_seen, scale=scale)
    return attended.unflatten(0, (query.shape[0], query.shape[2]))


def _split(states: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, ...]:
    """[B, heads, L, d] -> [1, heads, length, d] of each segment, in the precision that autocast gives attention."""
    if torch.is_autocast_enabled(states.device.type):  # it does not see into the kernel of `causal_lower_right`
        states = states.to(torch.get_autocast_dtype(states.device.type))
    row_after_row = states.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
    parts: tuple[Tensor, ...] = row_after_row.split([segment.length for segment in segments], dim=2)
    return parts
