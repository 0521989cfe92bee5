"""The counters of a stream: credit, and duplicate detection in bounded memory.

Credit is absolute: "you may have sent up to item number n and byte number b". A grant may be lost, repeated or
overtaken without harm, because the larger grant always holds. Duplicates are detected exactly by sequence number, and
by key within a window of recent keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import xxhash


@dataclass(slots=True)
class SendCredit:
    """The sender's half of one leg."""

    limit_items: int = 0
    limit_bytes: int = 0
    sent_items: int = 0
    sent_bytes: int = 0

    def grant(self, items: int, size: int) -> None:
        """Take over the receiver's limits; never goes back."""
        self.limit_items = max(self.limit_items, items)
        self.limit_bytes = max(self.limit_bytes, size)

    @property
    def free_items(self) -> int:
        return max(0, self.limit_items - self.sent_items)

    def fits(self, size: int, alone: bool) -> bool:
        """Whether one more message may go. `alone`: nothing is in flight, so that one item of any size may."""
        return self.sent_items < self.limit_items and (alone or self.sent_bytes + size <= self.limit_bytes)

    def use(self, size: int) -> None:
        self.sent_items += 1
        self.sent_bytes += size


@dataclass(slots=True)
class ReceiveWindow:
    """The receiver's half: what it has seen of the sender's counters, and what it holds.

    `limit = seen + window - held`: a delivery that was lost on the way counts as seen once a later one arrives, so
    losses never leak credit.
    """

    window_items: int
    window_bytes: int
    seen_items: int = 0
    seen_bytes: int = 0
    held_items: int = 0
    held_bytes: int = 0

    def see(self, items: int, size: int) -> None:
        self.seen_items = max(self.seen_items, items)
        self.seen_bytes = max(self.seen_bytes, size)

    def hold(self, size: int) -> None:
        self.held_items += 1
        self.held_bytes += size

    def release(self, size: int) -> None:
        self.held_items -= 1
        self.held_bytes -= size

    @property
    def limit_items(self) -> int:
        return self.seen_items + self.window_items - self.held_items

    @property
    def limit_bytes(self) -> int:
        return self.seen_bytes + self.window_bytes - self.held_bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a hub may hold, and how much of it one producer may have unused at a time.

    While the hub holds less than its capacity, every producer has unused credit; otherwise no producer is given any.
    Unused credit is not reserved, so an idle producer starves no other; the price is an overshoot of one base per
    producer.
    """

    items: int
    bytes: int

    @property
    def base_items(self) -> int:
        return max(1, min(64, self.items // 8))

    @property
    def base_bytes(self) -> int:
        return max(1, min(4 << 20, self.bytes // 8))

    def unused_items(self, held_items: int) -> int:
        return max(0, min(self.base_items, self.items - held_items))

    def unused_bytes(self, held_bytes: int) -> int:
        return max(0, min(self.base_bytes, self.bytes - held_bytes))


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
