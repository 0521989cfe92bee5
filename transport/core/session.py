"""What all peers share: the session (hello, beats, silence, goodbye), and the counters of credit and of duplicates.

Credit is absolute: "you may have sent up to item number n and byte number b". A grant may be lost, repeated or
overtaken without harm, because the larger grant always holds. Duplicates are detected exactly by sequence number, and
by key within a window of recent keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import xxhash
from msgspec import structs

from transport.wire import Body, Fin, FinAck, FromHub, Hello, Refuse, ToHub, Welcome, Who

HELLO_RETRY_S = 1.0
FIN_RETRY_S = 0.3
BEAT_LIMIT_S = 5.0

State = Literal["new", "greeting", "open", "leaving", "left"]


class PeerCore:
    """Base of the protocol cores of all peers: each has a session, which the shell starts, and which has the timer."""

    def __init__(self, hello: Hello, give_up_s: float | None) -> None:
        self.session = Session(hello, give_up_s)

    def fin(self, now: float, *, blame: bool = False) -> None:
        self.session.fin(now, blame=blame)


class Session:
    """One peer's relation to its hub, across reconnects and hub restarts."""

    def __init__(self, hello: Hello, give_up_s: float | None) -> None:
        self.hello = hello
        self.give_up_s = give_up_s
        self.state: State = "new"
        self.epoch: int | None = None
        self.lease_s = 0.0
        self.max_message_bytes = 0
        self.refusal: Refuse | None = None
        self.lost = False  # silent for longer than give_up_s
        self.out: list[tuple[ToHub, Body]] = []
        self._heard_at = 0.0
        self._beat_at = 0.0
        self._beat_due = False
        self.session = 0
        self.next_seq = 1  # of a producer's messages
        self.fin_pending = False  # the hub lost this peer during the goodbye: greet, report, say goodbye again
        self.blame = False

    @property
    def leaving(self) -> bool:
        return self.fin_pending or self.state in ("leaving", "left")

    def start(self, now: float) -> None:
        self._heard_at = now
        self.say_hello(now)

    def say_hello(self, now: float) -> None:
        """Introduce this peer: at the start, after a reconnect, and when the hub does not know it."""
        if self.state == "left":
            return
        self.fin_pending = self.fin_pending or self.state == "leaving"
        self.state = "greeting"
        self.out.append((structs.replace(self.hello, low_seq=self.next_seq), None))
        self._beat_at = now + self._interval(HELLO_RETRY_S)

    def heard(self, now: float) -> None:
        self._heard_at = now
        self.lost = False

    def on_message(self, now: float, message: FromHub) -> bool:
        """Take a message about the session itself. True: this is another incarnation of the hub."""
        self.heard(now)
        if isinstance(message, Welcome):
            changed = self.epoch is not None and self.epoch != message.epoch
            self.epoch = message.epoch
            self.session = message.session
            self.lease_s = message.lease_s
            self.max_message_bytes = message.max_message_bytes
            if self.state != "left":
                self.state = "open"
                self.beat_now(now)
            return changed
        if isinstance(message, Refuse):
            self.refusal = message
        elif isinstance(message, Who):
            self.say_hello(now)
        elif isinstance(message, Fin):  # the hub closes; all that was reported before is with it
            self.out.append((FinAck(), None))
            if self.leaving:
                self.state = "left"
            elif self.state == "open":  # another incarnation may come: greet it when it does
                self.state = "greeting"
                self._beat_at = now + self._interval(HELLO_RETRY_S)
        elif isinstance(message, FinAck) and self.state == "leaving":
            self.state = "left"
        return False

    def beat_now(self, now: float) -> None:
        if self.state == "open":
            self._beat_at = now
            self._beat_due = True

    def beat_due(self, now: float) -> bool:
        """Whether to beat in this flush; plans the next one."""
        if self.state != "open" or not self._beat_due:
            return False
        self._beat_due = False
        self._beat_at = now + self._interval(min(BEAT_LIMIT_S, self.lease_s / 3))
        return True

    def fin(self, now: float, *, blame: bool = False) -> None:
        if self.state == "new" or (self.state == "greeting" and self.epoch is None):
            self.state = "left"
        elif self.state == "greeting":  # between two connections: report and say goodbye once welcomed again
            self.fin_pending = True
            self.blame = blame
        elif self.state == "open":
            self.state = "leaving"
            self.fin_pending = False
            self.blame = blame
            self.out.append((Fin(blame), None))
            self._beat_at = now + FIN_RETRY_S

    def on_timer(self, now: float) -> None:
        if self.give_up_s is not None and now - self._heard_at >= self.give_up_s:
            self.lost = True
        if now < self._beat_at:
            return
        if self.state == "greeting":
            self.say_hello(now)
        elif self.state == "open":
            self._beat_due = True
        elif self.state == "leaving":
            self.out.append((Fin(self.blame), None))
            self._beat_at = now + FIN_RETRY_S

    def deadline(self) -> float | None:
        return None if self.state in ("new", "left") or self.refusal is not None else self._beat_at

    def flush(self) -> list[tuple[ToHub, Body]]:
        out, self.out = self.out, []
        return out

    def _interval(self, normal_s: float) -> float:
        return normal_s if self.give_up_s is None else min(normal_s, self.give_up_s / 3)


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
