"""Host side of the slots: who holds which, their tokens, and which prefixes can be used again. numpy, no torch.

Invariants:
- a slot is active (decoding), retained (finished, its KV still good for a prefix) or empty; never two of these;
- `tokens[s, : length[s]]` is the whole context of slot s, and its first length - 1 positions have KV in the cache (the
  newest token's is computed by the step that reads it);
- a prefix is used again only under the weights generation and the extra key it was computed with: a slot whose context
  spans a swap belongs to no generation but its first, and is never found again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from models.engines.core import Completion

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
