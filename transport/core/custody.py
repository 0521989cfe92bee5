"""What a hub holds and for whom: every accepted message, from ACCEPTED to its one verdict, and the connected peers.

Invariants:
- accepted == settled + dead + in custody (queued or leased), at all times.
- The first verdict wins; a later verdict changes nothing but a counter.
- Only an item that was started at the time of its failure is blamed; after `max_attempts` failures it is dead.
- An item is a suspect once it was started in two replicas that died, or merely held by three (the report of its start
  may die with the process). It is next run alone, so that its neighbours do not share its fate; a death there is proof.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from transport.core.session import Capacity, KeyMemory, SendCredit, SeqWindow
from transport.spec import Counts, DeadLetter, Held, StreamSpec
from transport.wire import PROTOCOL, Body, Hello, Work, encode

SUSPECT_DEATHS = 2
SUSPECT_LOSSES = 3
KEYS_REMEMBERED = 1 << 17


@dataclass(slots=True, eq=False)
class Item:
    id: int
    key: str
    size: int
    checksum: int
    body: Body
    attempt: int = 0  # deliveries so far
    failures: int = 0  # replicas that died, or left with an error, while executing it
    losses: int = 0  # replicas that died while holding it unstarted, as far as the hub knows
    state: Literal["queued", "leased", "gone"] = "queued"
    started: bool = False
    serial: int = 0  # of its newest delivery
    leased_at: float = 0.0  # time of its newest delivery
    holder: ConsumerPeer | None = None
    previous_holder: ConsumerPeer | None = None  # the next delivery prefers another consumer
    suspect: bool = False
    tried_alone: bool = False


@dataclass(slots=True, eq=False)
class Peer:
    """What a hub knows of a connected producer or consumer."""

    route: bytes
    replica: str
    incarnation: str
    silent_at: float  # when it counts as lost unless a message of it arrives
    session: int
    connected: bool = True


@dataclass(slots=True, eq=False)
class ProducerPeer(Peer):
    seqs: SeqWindow = field(default_factory=SeqWindow)
    used_items: int = 0
    used_bytes: int = 0
    limit_items: int = 0
    limit_bytes: int = 0
    to_accept: list[int] = field(default_factory=list)
    wants_limits: bool = False

    @property
    def within_credit(self) -> bool:
        return self.used_items < self.limit_items and self.used_bytes < self.limit_bytes

    def limits(self, capacity: Capacity, held_items: int, held_bytes: int) -> tuple[int, int]:
        return (
            max(self.limit_items, self.used_items + capacity.unused_items(held_items)),
            max(self.limit_bytes, self.used_bytes + capacity.unused_bytes(held_bytes)),
        )

    def starved(self, capacity: Capacity) -> bool:
        """Whether half of what it may send is used up."""
        return (
            self.limit_items - self.used_items <= capacity.base_items // 2
            or self.limit_bytes - self.used_bytes <= capacity.base_bytes // 2
        )


@dataclass(slots=True, eq=False)
class ConsumerPeer(Peer):
    credit: SendCredit = field(default_factory=SendCredit)
    held: dict[int, Item] = field(default_factory=dict)
    held_parts: Counter[str] = field(default_factory=Counter)  # held items by the first part of their keys
    done: dict[int, None] = field(default_factory=dict)  # verdicts that are recorded and not confirmed
    refused: list[int] = field(default_factory=list)  # the same
    beat: bool = False  # answer with how far deliveries have gone
    draining: bool = False
    end_sent: bool = False

    def take(self, item: Item) -> None:
        self.credit.use(item.size)
        item.serial = self.credit.sent_items
        item.holder = self
        self.held[item.id] = item
        self.held_parts[item.key.partition("/")[0]] += 1

    def give(self, item: Item) -> None:
        del self.held[item.id]
        part = item.key.partition("/")[0]
        self.held_parts[part] -= 1
        if not self.held_parts[part]:
            del self.held_parts[part]

    def accepts(self, size: int) -> bool:
        return self.connected and not self.draining and self.credit.fits(size, alone=not self.held)


@dataclass(slots=True)
class Custody(Counts):
    spec: StreamSpec
    epoch: int
    items: dict[int, Item] = field(default_factory=dict)
    ready: deque[Item] = field(default_factory=deque)
    redeliveries: deque[Item] = field(default_factory=deque)  # go first
    suspects: deque[Item] = field(default_factory=deque)
    letters: list[tuple[DeadLetter, Body]] = field(default_factory=list)  # the letters without their bodies
    keys: KeyMemory = field(init=False)

    def __post_init__(self) -> None:
        self.keys = KeyMemory(max(KEYS_REMEMBERED, 2 * self.spec.capacity_items))

    def admit(self, key: str, size: int, checksum: int, body: Body) -> None:
        """Take custody; a key that was accepted before is suppressed."""
        if not self.keys.add(key):
            self.duplicates += 1
            return
        self.accepted += 1
        item = Item(self.accepted, key, size, checksum, body)
        self.items[item.id] = item
        self.bytes_queued += size
        self.ready.append(item)

    def lease(self, item: Item, holder: ConsumerPeer) -> Work:
        """Hand the item to the holder and return the header of its delivery."""
        item.state = "leased"
        item.started = False
        item.attempt += 1
        self.leased += 1
        if item.attempt > 1:
            self.redelivered += 1
        holder.take(item)
        return self._header(item, holder.session, holder.credit.sent_bytes)

    def settle(self, item_id: int) -> None:
        """Record a done; of an item that is unknown or settled it is a duplicate."""
        item = self.items.get(item_id)
        if item is None:
            self.duplicates += 1
            return
        self._remove(item)
        self.settled += 1

    def release(self, item: Item) -> None:
        """Take the item back from its holder; the caller queues it or buries it."""
        if item.holder is not None:
            item.holder.give(item)
            item.previous_holder = item.holder
            item.holder = None
            self.leased -= 1
        item.state = "queued"

    def requeue(self, item: Item, *, died: bool = False) -> None:
        """Queue for redelivery without blame. `died`: the holder has died."""
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
        self.dead_letters += 1
        self.keys.forget(item.key)
        self.letters.append((DeadLetter(self.spec.name, item.key, header, b"", reason), body))

    def held(self, now: float) -> list[Held]:
        """All messages in custody, oldest first."""
        return [
            Held(item.key, "", 0.0)
            if item.holder is None
            else Held(item.key, item.holder.replica, now - item.leased_at)
            for item in self.items.values()
        ]

    def next_ready(self) -> Item | None:
        """Take the oldest item to deliver off its queue, redeliveries first. Settled items are skipped."""
        for queue in (self.redeliveries, self.ready):
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
        """Undo next_ready for an item for which no consumer has room."""
        (self.redeliveries if item.attempt else self.ready).appendleft(item)

    def _header(self, item: Item, session: int, total: int) -> Work:
        return Work(self.epoch, session, item.id, item.serial, total, item.attempt, item.key, item.size, item.checksum)

    def _queue(self, item: Item) -> None:
        (self.suspects if item.suspect and not item.tried_alone else self.redeliveries).append(item)

    def _remove(self, item: Item) -> None:
        self.release(item)
        del self.items[item.id]
        self.bytes_queued -= item.size
        item.state = "gone"
        item.body = None  # queues may still refer to the item


def stage_of(replica: str) -> str:
    """The stage in a replica's name, `<stage>-<number>`."""
    return replica.rpartition("-")[0]


def mismatch(hello: Hello, spec: StreamSpec, run_id: str, schema: tuple[str, str] | None) -> str | None:
    """Why a hub cannot serve a peer, in one sentence, or None. `schema`: name and hash of what the stream carries."""
    name = spec.name
    if hello.protocol != PROTOCOL:
        return f"{hello.replica!r} speaks protocol {hello.protocol}, stream {name!r} {PROTOCOL}; install one version"
    if hello.run_id != run_id:
        return f"{hello.replica!r} is of run {hello.run_id!r}, stream {name!r} of {run_id!r}; check the address"
    if hello.stream != name:
        return f"{hello.replica!r} asked for stream {hello.stream!r}, here is {name!r}; check the address"
    stages = spec.producers if hello.role == "producer" else spec.consumers
    if stages is not None and stage_of(hello.replica) not in stages:
        return (
            f"{hello.replica!r} is no {hello.role} of stream {name!r}, whose {hello.role}s are the stages "
            f"{', '.join(sorted(stages))}; check its name"
        )
    if schema is not None and schema[1] != hello.schema_hash:
        return (
            f"{hello.replica!r} declares schema {hello.schema} ({hello.schema_hash}), stream {name!r} carries "
            f"{schema[0]} ({schema[1]}); run the same code on both sides"
        )
    return None
