"""Static KV cache: one row of positions per slot, allocated once, with the three ways to attend to it.

Invariants:
- a slot's positions [0, length - 1) hold keys and values of its tokens; later positions are garbage that no mask shows;
- the last position of every row is scratch: padding and idle rows write there, so they cannot hurt a retained prefix;
- nothing outside keeps a reference to `kv`, so that `free` gives their memory back;
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
from models.engines.embedded.model_spec import ModelSpec
from models.engines.embedded.transformer import Attend

# Key lengths are rounded up to this, so that few shapes occur.
KEY_BLOCK = {"cpu": 16, "cuda": 128}


class KVCache:
    """Keys and values [layers, slots, 2 * kv_heads, capacity, head_dim]: those of a head lie together, keys first, as
    attention reads the keys of many tokens, one head after the other, for each token that it writes."""

    def __init__(self, spec: ModelSpec, slots: int, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.slots, self.device = slots, device
        self.scratch = max_len
        self.capacity = max_len + 1
        self.slot_stride = 2 * spec.shape.kv_heads * self.capacity  # places from one slot to the next
        self.dtype = dtype
        self.allocate()
        self._arange = torch.arange(self.capacity, device=device)
        self._heads = torch.arange(0, self.slot_stride, self.capacity, device=device)

    def allocate(self) -> None:
        """Allocate the memory, all zero."""
        shape = self.spec.shape
        sizes = (shape.layers, self.slots, 2 * shape.kv_heads, self.capacity, shape.head)
        self.kv = _zeros(sizes, self.device, self.dtype)
        # By layer: [slots * 2 * kv_heads * capacity, head_dim] to write; [slots, kv_heads, capacity, head_dim] to read.
        self._written = list(self.kv.flatten(1, 3).unbind())
        self._read = [tuple(layer.chunk(2, dim=1)) for layer in self.kv.unbind()]
        self._window = slice(0), 0
        self._windows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def free(self) -> None:
        """Release the memory until `allocate`. Nothing may be in the cache."""
        self.kv = torch.empty(0, device=self.device, dtype=self.dtype)
        self._written, self._read, self._windows = [], [], []

    def copy_prefix(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of slots to other slots, all at once (a target may be a source too)."""
        src, dst = torch.tensor((sources, targets), device=self.device)
        self.kv[:, dst, :, :length] = self.kv[:, src, :, :length]

    def prefill(self, places: torch.Tensor, rows: int) -> Attend:
        """Whole prompts from position 0: `rows` right-padded rows attend causally to themselves. `places` [N], here and
        below: where the tokens go, slot * slot_stride + position."""
        written = self._places_by_head(places)

        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            self._written[layer].index_copy_(0, written, kv.reshape(len(written), -1))
            k, v = _by_head(kv, rows).chunk(2, dim=1)
            out = F.scaled_dot_product_attention(_by_head(q, rows), k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(len(q), -1)

        return attend

    def extend(self, places: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, longest: int) -> Attend:
        """Rows that begin behind a cached prefix: [R, T] new tokens attend to their slot up to their own position."""
        written, keys = self._places_by_head(places), self.rounded(longest)
        mask = (self._arange[:keys] <= positions.unsqueeze(-1)).unsqueeze(1)  # [R, 1, T, keys]

        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            self._written[layer].index_copy_(0, written, kv.reshape(len(written), -1))
            k, v = (part[:, :, :keys].index_select(0, slots) for part in self._read[layer])
            out = F.scaled_dot_product_attention(_by_head(q, len(slots)), k, v, attn_mask=mask, enable_gqa=True)
            return out.transpose(1, 2).reshape(len(q), -1)

        return attend

    def decode(self, places: torch.Tensor, slots: torch.Tensor | slice, positions: torch.Tensor, keys: int) -> Attend:
        """One new token per row, which sees at most `keys` positions. A slice of the slots needs no gathering copy."""
        kv_heads, width, written = self.spec.shape.kv_heads, self.spec.shape.head, self._places_by_head(places)
        if isinstance(slots, slice) and self._window != (slots, keys):  # they stay the same for many steps
            self._window = slots, keys
            self._windows = [(k[slots, :, :keys], v[slots, :, :keys]) for k, v in self._read]
        hidden = self._arange[:keys] > positions.unsqueeze(-1)
        mask = torch.zeros_like(hidden, dtype=self.dtype).masked_fill_(hidden, float("-inf"))[:, None, None]

        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            self._written[layer].index_copy_(0, written, kv.reshape(len(written), -1))
            if isinstance(slots, slice):
                k, v = self._windows[layer]
            else:
                k, v = (part[:, :, :keys].index_select(0, slots) for part in self._read[layer])
            # Heads that share keys stand in the place of query positions: no key is read twice.
            grouped = q.view(len(q), kv_heads, -1, width)
            return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(len(q), -1)

        return attend

    def _places_by_head(self, places: torch.Tensor) -> torch.Tensor:
        """Where each head of the tokens goes, [N * 2 * kv_heads]."""
        return (places.unsqueeze(1) + self._heads).view(-1)

    def rounded(self, length: int) -> int:
        """So many keys that hold `length`."""
        block = KEY_BLOCK.get(self.device.type, 16)
        return min(-(-length // block) * block, self.capacity)


def _by_head(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, heads, T, head_dim] of [rows * T, heads, head_dim]."""
    return tensor.unflatten(0, (rows, -1)).transpose(1, 2)


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


# Tokens. A shorter prefix costs more to find, to copy and to prefill apart than to compute again. No longer than that
# of the canaries of `stages.engines.policy_proof`, which look for keys and values of earlier weights.
WORTHWHILE = 12


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
        longest = min(len(context) - 1, limit)
        if not self.retains or longest < WORTHWHILE:
            return -1, 0
        key = self._keys.get(extra_key, -1)
        usable = (self.generation == generation) & (self.key == key) & (self.tokens[:, 0] == context[0])
        candidates = np.flatnonzero(usable & (self.length > WORTHWHILE))
        if not candidates.size:
            return -1, 0
        known = np.minimum(self.length[candidates] - 1, longest)
        differs = self.tokens[candidates, :longest] != context[:longest]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), longest)
        shared = np.minimum(first, known)
        best = int(shared.argmax())
        length = int(shared[best])
        if length < WORTHWHILE:
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
        self.floor[slot] = start + completion.rule.min_new_tokens
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
