"""What a hub holds: every accepted message, from ACCEPTED to its one verdict.

Invariants:
- accepted == settled + dead + in custody (queued or leased), at all times.
- The first verdict wins; a later one changes nothing but a counter.
- Only an item that was started at the time of its failure is blamed; after `max_attempts` failures it is dead.
- An item is a suspect once it was started in two replicas that died, or merely held by three (the news of its start
  may die with the process). It is next run alone, so that its neighbours do not share its fate; a death there is proof.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from transport.core.dedup import KeyMemory
from transport.spec import DeadLetter, Held, HubStats, StreamSpec
from transport.wire import Work, encode

if TYPE_CHECKING:
    from transport.core.peers import ConsumerPeer

SUSPECT_DEATHS = 2
SUSPECT_LOSSES = 3
KEYS_REMEMBERED = 1 << 17

Body = object  # opaque here: bytes in the tests, a zmq frame or a tuple of frames in the shell


@dataclass(slots=True, eq=False)
class Item:
    id: int
    key: str
    size: int
    checksum: int
    body: Body
    attempt: int = 0  # deliveries so far
    failures: int = 0  # replicas that died, or left with an error, while executing it
    losses: int = 0  # replicas that died while holding it unstarted, as far as was known
    state: Literal["queued", "leased", "gone"] = "queued"
    started: bool = False
    serial: int = 0  # of its newest delivery
    leased_at: float = 0.0  # time of that
    holder: ConsumerPeer | None = None
    last: ConsumerPeer | None = None  # who had it before; another one is preferred next
    suspect: bool = False
    tried_alone: bool = False


@dataclass(slots=True)
class Custody:
    spec: StreamSpec
    epoch: int
    items: dict[int, Item] = field(default_factory=dict)
    ready: deque[Item] = field(default_factory=deque)
    again: deque[Item] = field(default_factory=deque)  # redeliveries go first
    suspects: deque[Item] = field(default_factory=deque)
    letters: list[tuple[DeadLetter, Body]] = field(default_factory=list)  # the letters without their bodies
    keys: KeyMemory = field(init=False)
    held_bytes: int = 0
    leased: int = 0
    accepted: int = 0
    delivered: int = 0
    redelivered: int = 0
    settled: int = 0
    duplicates: int = 0
    dead: int = 0

    def __post_init__(self) -> None:
        self.keys = KeyMemory(max(KEYS_REMEMBERED, 2 * self.spec.capacity_items))

    def admit(self, key: str, size: int, checksum: int, body: Body) -> None:
        """Take custody; a key that was accepted before is suppressed."""
        if self.spec.dedup_keys and not self.keys.add(key):
            self.duplicates += 1
            return
        self.accepted += 1
        item = Item(self.accepted, key, size, checksum, body)
        self.items[item.id] = item
        self.held_bytes += size
        self.ready.append(item)

    def lease(self, item: Item, holder: ConsumerPeer) -> Work:
        """Hand the item to the holder and return the header of its delivery."""
        item.state = "leased"
        item.started = False
        item.attempt += 1
        self.leased += 1
        self.delivered += 1
        if item.attempt > 1:
            self.redelivered += 1
        holder.take(item)
        return self._header(item, holder.session, holder.credit.sent_bytes)

    def _header(self, item: Item, session: int, total_bytes: int) -> Work:
        return Work(
            self.epoch, session, item.id, item.serial, total_bytes, item.attempt, item.key, item.size, item.checksum
        )

    def settle(self, item_id: int) -> bool:
        """Record a done. False: unknown or already settled, counted as duplicate."""
        item = self.items.get(item_id)
        if item is None:
            self.duplicates += 1
            return False
        self._remove(item)
        self.settled += 1
        return True

    def release(self, item: Item) -> None:
        """Take the item back from its holder; the caller queues it or buries it."""
        if item.holder is not None:
            item.holder.give(item)
            item.last = item.holder
            item.holder = None
            self.leased -= 1
        item.state = "queued"

    def requeue(self, item: Item, *, died: bool = False) -> None:
        """Queue for redelivery; nobody is blamed."""
        self.release(item)
        item.losses += died
        item.suspect = item.suspect or item.losses >= SUSPECT_LOSSES
        self._queue(item)

    def fail(self, item: Item, reason: str) -> None:
        """Blame the death of its holder on the item: redeliver it, or bury it."""
        self.release(item)
        item.failures += 1
        if item.failures >= self.spec.max_attempts:
            self.bury(item, f"{reason} (failed {item.failures} of max_attempts={self.spec.max_attempts})")
        else:
            item.suspect = item.suspect or item.failures >= SUSPECT_DEATHS
            self._queue(item)

    def bury(self, item: Item, reason: str) -> None:
        """Dead-letter. The key is forgotten: sending the message anew is a decision, not an accident."""
        body = item.body
        header = encode(self._header(item, 0, 0))
        self._remove(item)
        self.dead += 1
        self.keys.forget(item.key)
        self.letters.append((DeadLetter(self.spec.name, item.key, header, b"", reason), body))

    def stats(self, producers: int, consumers: int, malformed: int) -> HubStats:
        return HubStats(
            queued=len(self.items) - self.leased,
            leased=self.leased,
            accepted=self.accepted,
            delivered=self.delivered,
            redelivered=self.redelivered,
            duplicates=self.duplicates,
            dead_letters=self.dead,
            bytes_queued=self.held_bytes,
            producers=producers,
            consumers=consumers,
            settled=self.settled,
            malformed=malformed,
        )

    def held(self, now: float) -> list[Held]:
        """All messages in custody, oldest first."""
        return [
            Held(item.key, "", 0.0)
            if item.holder is None
            else Held(item.key, item.holder.replica, now - item.leased_at)
            for item in self.items.values()
        ]

    def next_ready(self) -> Item | None:
        """Oldest item to deliver, redeliveries first. Settled ones are skipped. The item is taken off the queue."""
        for queue in (self.again, self.ready):
            while queue:
                item = queue.popleft()
                if item.state == "queued":
                    return item
        return None

    def next_suspect(self) -> Item | None:
        while self.suspects:
            if self.suspects[0].state == "queued":
                return self.suspects[0]
            self.suspects.popleft()
        return None

    def put_back(self, item: Item) -> None:
        """Undo next_ready for an item that nobody has room for."""
        (self.again if item.attempt else self.ready).appendleft(item)

    def _queue(self, item: Item) -> None:
        (self.suspects if item.suspect and not item.tried_alone else self.again).append(item)

    def _remove(self, item: Item) -> None:
        self.release(item)
        del self.items[item.id]
        self.held_bytes -= item.size
        item.state = "gone"
        item.body = None  # queues may still refer to the item
