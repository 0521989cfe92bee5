"""Static KV cache: one row of positions per slot, allocated once, with the three ways to attend to it.

Invariants:
- a slot's positions [0, length - 1) hold keys and values of its tokens; later positions are garbage that no mask shows;
- the last position of every row is scratch: padding and idle rows write there, so they cannot hurt a retained prefix;
- nothing outside keeps a reference to `k` and `v`, so that `free` gives their memory back;
- memory starts at zero (a masked NaN would still poison a softmax) and on a CPU is committed only when touched.
"""

from __future__ import annotations

import heapq
import math
import mmap
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from models.engines.core import Completion
from models.engines.embedded.transformer import Attend, ModelSpec

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
        """Allocate the memory, all zero."""
        spec = self.spec
        shape = (spec.shape.layers, self.slots, spec.shape.kv_heads, self.capacity, spec.shape.head)
        self.k, self.v = _zeros(shape, self.device, self.dtype), _zeros(shape, self.device, self.dtype)
        self._k_flat = self.k.view(spec.shape.layers, -1, spec.shape.head)
        self._v_flat = self.v.view(spec.shape.layers, -1, spec.shape.head)

    def free(self) -> None:
        """Release the memory until `allocate`. Nothing may be in the cache."""
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


# --------------------------------------------------------------------------------------------------
# Host side of the slots: who holds which, their tokens, and which prefixes can be used again. numpy, no torch.
#
# Invariants:
# - a slot is active (decoding), retained (finished, its KV still good for a prefix) or empty; never two of these;
# - `tokens[s, : length[s]]` is the whole context of slot s, and its first length - 1 positions have KV in the cache
#   (the newest token's is computed by the step that reads it);
# - a prefix is used again only under the weights generation and the extra key it was computed with: a slot whose
#   context spans a swap belongs to no generation but its first, and is never found again.


WORTHWHILE = 16  # tokens of prefix that always pay for the second kind of prefill


class SlotTable:
    """State of all slots; arrays are indexed by slot."""

    def __init__(self, slots: int, max_len: int, retain: bool) -> None:
        self.slots, self.retains = slots, retain
        self.tokens = np.zeros((slots, max_len), dtype=np.int32)
        self.log_probs = np.zeros((slots, max_len), dtype=np.float32)
        self.length = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)  # length at which a response is full
        self.floor = np.zeros(slots, dtype=np.int64)  # length below which nothing stops it
        self.stops = np.full((slots, 1), -1, dtype=np.int64)
        self.generation = np.full(slots, -1, dtype=np.int64)
        self.key = np.zeros(slots, dtype=np.int64)
        self.owners: dict[int, Completion] = {}
        self._keys: dict[str, int] = {}
        self._empty = list(range(slots))
        self._retained: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._active: npt.NDArray[np.int64] | None = None

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._retained)

    @property
    def active(self) -> npt.NDArray[np.int64]:
        """Active slots, ascending."""
        if self._active is None:
            self._active = np.sort(np.fromiter(self.owners, dtype=np.int64, count=len(self.owners)))
        return self._active

    @property
    def used_tokens(self) -> int:
        return int(self.length[self.active].sum())

    def find_prefix(
        self, context: npt.NDArray[np.int32], extra_key: str, generation: int, limit: int
    ) -> tuple[int, int]:
        """Slot and length of the longest prefix of `context` with KV to use again; (-1, 0) if none is worth it.

        At least one token is always left to compute, for its logits are needed; `limit` bounds the prefix further."""
        key = self._keys.get(extra_key, -1)
        usable = (self.generation == generation) & (self.key == key) & (self.tokens[:, 0] == context[0])
        candidates = np.flatnonzero(usable & (self.length > 1))
        longest = min(len(context) - 1, limit)
        if not self.retains or not candidates.size or not longest:
            return -1, 0
        known = np.minimum(self.length[candidates] - 1, longest)
        differs = self.tokens[candidates, :longest] != context[:longest]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), longest)
        shared = np.minimum(first, known)
        best = int(shared.argmax())
        length = int(shared[best])
        if length < WORTHWHILE and 2 * length < len(context):
            return -1, 0
        return int(candidates[best]), length

    def take(self, prefer: int) -> int:
        """A free slot: `prefer` if it is a retained one, else an empty one, else the longest unused retained one."""
        if prefer in self._retained:
            del self._retained[prefer]
            return prefer
        if self._empty:
            return heapq.heappop(self._empty)
        return self._retained.popitem(last=False)[0]

    def occupy(self, slot: int, completion: Completion, generation: int) -> None:
        """Make a slot active with the completion's prompt and output so far."""
        prompt, output = completion.prompt, completion.output_ids
        start, length = len(prompt), len(prompt) + len(output)
        self.tokens[slot, :start] = prompt
        self.tokens[slot, start:length] = output
        self.log_probs[slot, start:length] = completion.log_probs
        self.length[slot] = length
        self.limit[slot] = start + completion.max_new
        self.floor[slot] = start + completion.min_new
        self._set_stops(slot, completion.stop_ids)
        self.generation[slot] = generation
        self.key[slot] = self._keys.setdefault(completion.extra_key, len(self._keys))
        self.owners[slot] = completion
        self._active = None

    def release(self, slot: int) -> Completion:
        """End a slot's activity; its completion gets the output so far."""
        completion = self.owners.pop(slot)
        self._active = None
        start, length = completion.prompt_tokens, int(self.length[slot])
        completion.output_ids = self.tokens[slot, start:length].tolist()
        completion.log_probs = self.log_probs[slot, start:length].tolist()
        if self.retains and length > 1:
            self._retained[slot] = None
        else:
            self._forget(slot)
        return completion

    def append(
        self, slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], log_probs: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Add one token to each slot. Returns which hit a stop token and which are full."""
        at = self.length[slots]
        self.tokens[slots, at] = tokens
        self.log_probs[slots, at] = log_probs
        at += 1
        self.length[slots] = at
        stopped = (self.stops[slots] == tokens[:, None]).any(axis=1) & (at > self.floor[slots])
        return stopped, at >= self.limit[slots]

    def forbidden(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """(row, token) pairs that must not be drawn now because the response is still too short; None if none."""
        short = np.flatnonzero(self.length[slots] < self.floor[slots])
        if not short.size:
            return None
        stops = self.stops[slots[short]]
        rows, columns = np.nonzero(stops >= 0)
        return (short[rows], stops[rows, columns]) if rows.size else None

    def flush(self) -> None:
        """Forget all retained prefixes."""
        while self._retained:
            self._forget(self._retained.popitem()[0])

    def _forget(self, slot: int) -> None:
        self.length[slot] = 0
        self.generation[slot] = -1
        heapq.heappush(self._empty, slot)

    def _set_stops(self, slot: int, stops: Sequence[int]) -> None:
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.slots, len(stops)), -1, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
