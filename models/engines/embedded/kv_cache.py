"""Static KV cache: one row of positions per slot, allocated once, with the three ways to attend to it.

Invariants:
- a slot's positions [0, length - 1) hold keys and values of its tokens; what lies behind is garbage that no mask shows;
- the last position of every row is scratch: padding and idle rows write there, so they cannot hurt a retained prefix;
- nothing outside keeps a reference to `k` and `v`, so that `free` gives their memory back;
- memory starts at zero (a masked NaN would still poison a softmax) and on a CPU is committed only when touched.
"""

from __future__ import annotations

import math
import mmap

import torch
import torch.nn.functional as F

from models.engines.embedded.spec import ModelSpec
from models.engines.embedded.transformer import Attend

KEY_BLOCK = 32  # key lengths are rounded up to this, so that few shapes occur


class KVCache:
    """Keys and values [layers, slots, kv_heads, capacity, head_dim]."""

    def __init__(self, spec: ModelSpec, slots: int, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.slots, self.device = slots, device
        self.scratch = max_len
        self.capacity = max_len + 1
        self.dtype = dtype
        self.allocate()
        self._heads = torch.arange(spec.shape.kv_heads, device=device)
        self._arange = torch.arange(self.capacity, device=device)
        self._scale = spec.shape.head**-0.5

    def allocate(self) -> None:
        """Take the memory, all zero."""
        spec = self.spec
        shape = (spec.shape.layers, self.slots, spec.shape.kv_heads, self.capacity, spec.shape.head)
        self.k, self.v = _zeros(shape, self.device, self.dtype), _zeros(shape, self.device, self.dtype)
        self._k_flat = self.k.view(spec.shape.layers, -1, spec.shape.head)
        self._v_flat = self.v.view(spec.shape.layers, -1, spec.shape.head)

    def free(self) -> None:
        """Give the memory back until `allocate`. Nothing may be in the cache."""
        self.k = self.v = self._k_flat = self._v_flat = torch.empty(0, device=self.device, dtype=self.dtype)

    def copy_prefix(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slots to other slots, all at once (a target may be a source too)."""
        src, dst = self._index(sources), self._index(targets)
        for cache in (self.k, self.v):
            cache[:, dst, :, :length] = cache[:, src, :, :length]

    def flat_index(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the flattened cache for (slot, position) pairs of equal shape [...]: [... * kv_heads]."""
        heads = slots.unsqueeze(-1) * self.spec.shape.kv_heads + self._heads
        return (heads * self.capacity + positions.unsqueeze(-1)).flatten()

    def prefill(self, flat: torch.Tensor) -> Attend:
        """Whole prompts from position 0: right-padded rows attend causally to themselves."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._store(layer, flat, k, v)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(2)

        return attend

    def extend(self, flat: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, longest: int) -> Attend:
        """Rows that begin behind a cached prefix: [R, T] new tokens attend to their slot up to their own position."""
        keys = min(-(-longest // KEY_BLOCK) * KEY_BLOCK, self.capacity)
        mask = (self._arange[:keys] <= positions.unsqueeze(-1)).unsqueeze(1)  # [R, 1, T, keys]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._store(layer, flat, k, v)
            seen_k = self.k[layer, :, :, :keys].index_select(0, slots)
            seen_v = self.v[layer, :, :, :keys].index_select(0, slots)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), seen_k, seen_v, attn_mask=mask, enable_gqa=True)
            return out.transpose(1, 2).flatten(2)

        return attend

    def decode(self, flat: torch.Tensor, slots: torch.Tensor | int, positions: torch.Tensor, longest: int) -> Attend:
        """One new token per row. `slots` as a number n means slots 0 to n - 1, which needs no gathering copy."""
        keys = min(-(-longest // KEY_BLOCK) * KEY_BLOCK, self.capacity)
        rows = positions.shape[0]
        kv_heads, width = self.spec.shape.kv_heads, self.spec.shape.head
        shares = self.spec.shape.heads // kv_heads
        hidden = self._arange[:keys] > positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, float("-inf")).view(rows, 1, 1, keys)
        on_cpu = self.device.type == "cpu"
        sdpa_mask = mask.to(self.k.dtype)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._store(layer, flat, k, v)
            seen_k, seen_v = self.k[layer, :, :, :keys], self.v[layer, :, :, :keys]
            if isinstance(slots, int):
                seen_k, seen_v = seen_k[:slots], seen_v[:slots]
            else:
                seen_k, seen_v = seen_k.index_select(0, slots), seen_v.index_select(0, slots)
            # Heads that share keys stand in the place of query positions: a batched product without copies of K.
            grouped = q.view(rows, kv_heads, shares, width)
            if not on_cpu:
                out = F.scaled_dot_product_attention(grouped, seen_k, seen_v, attn_mask=sdpa_mask)
                return out.reshape(rows, 1, kv_heads * shares * width)
            folded = (rows * kv_heads, shares, width)
            scores = torch.bmm(grouped.reshape(folded), seen_k.view(rows * kv_heads, keys, width).transpose(1, 2))
            scores = torch.add(mask, scores.view(rows, kv_heads, shares, keys), alpha=self._scale)
            weights = torch.softmax(scores, dim=-1).to(seen_v.dtype)
            out = torch.bmm(weights.view(rows * kv_heads, shares, keys), seen_v.view(rows * kv_heads, keys, width))
            return out.view(rows, 1, kv_heads * shares * width)

        return attend

    def _store(self, layer: int, flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._k_flat[layer].index_copy_(0, flat, k.reshape(-1, self.spec.shape.head))
        self._v_flat[layer].index_copy_(0, flat, v.reshape(-1, self.spec.shape.head))

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu" or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return torch.zeros(shape, device=device, dtype=dtype)
    # Anonymous memory is zero, and committed page by page when touched. Huge pages would undo that: requests use the
    # first positions of every row, which lie so far apart that nearly each huge page would be hit.
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
