"""Duplicate detection in bounded memory: by sequence number exactly, by key within a window of recent keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import xxhash


class SeqWindow:
    """Which sequence numbers of one producer were accepted: a watermark and the numbers above it.

    Invariant: the watermark has been accepted or voided with everything below it, so memory is the number of gaps.
    """

    __slots__ = ("_above", "low")

    def __init__(self, low_seq: int = 1) -> None:
        self.low = low_seq  # smallest number not yet accepted
        self._above: set[int] = set()

    def __contains__(self, seq: int) -> bool:
        return seq < self.low or seq in self._above

    def __len__(self) -> int:
        return len(self._above)

    def add(self, seq: int) -> None:
        self._above.add(seq)
        while self.low in self._above:
            self._above.discard(self.low)
            self.low += 1


class KeyMemory:
    """The most recent `capacity` keys as 128-bit digests. Older keys are forgotten first."""

    __slots__ = ("_capacity", "_digests")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._digests)

    def add(self, key: str) -> bool:
        """Remember the key; False if it was known."""
        digest = xxhash.xxh3_128_digest(key.encode())
        if digest in self._digests:
            return False
        self._digests[digest] = None
        if len(self._digests) > self._capacity:
            # Dropping in blocks keeps the dict from scanning over its own tombstones at each insertion.
            for old in list(islice(self._digests, max(1, self._capacity // 8))):
                del self._digests[old]
        return True

    def forget(self, key: str) -> None:
        self._digests.pop(xxhash.xxh3_128_digest(key.encode()), None)
