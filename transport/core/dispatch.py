"""Which consumer gets which item next: routing under credit, and solitary execution of suspects.

Sticky routing is a hint that keeps a consumer's caches warm, never a promise. Rendezvous hashing over the consumers
with room needs no table, and a replica that comes or goes moves only its own share of the keys. A full consumer is
passed over, since a lost cache costs less than an idle replica.

Keyed routing is a promise, for stages that join: one consumer at a time holds the items whose keys have the same text
before the first '/', except items that a leaving consumer gives back. The consumer that holds one of them gets the
others; if there is none, rendezvous hashing decides. They wait while that consumer is full or its link is broken, so
consumers of such a stream have windows as large as all that may be in flight.

A suspect (see custody) is run alone. One consumer, the isolated one, is given nothing new until it is empty, then the
suspect only, until its verdict. A stage that gathers many messages before it answers any would wait for ever in
isolation, so the isolation ends after one lease and the suspect goes with the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import xxhash

from transport.core.custody import ConsumerPeer, Custody, Item
from transport.spec import StreamSpec


class Dispatch:
    def __init__(self, spec: StreamSpec, custody: Custody, consumers: dict[str, ConsumerPeer]) -> None:
        self._spec = spec
        self._keyed = spec.routing == "keyed"
        self._route = sticky if spec.routing == "sticky" else least_loaded
        self._custody = custody
        self._consumers = consumers
        self._isolated: ConsumerPeer | None = None
        self._isolated_until = 0.0
        self.solitary: Item | None = None  # the suspect that is leased to the isolated consumer

    def assign(self, now: float) -> Iterator[tuple[Item, ConsumerPeer]]:
        """Pairs to be delivered, in turn: the caller leases each before it asks for the next."""
        yield from self._assign_suspect(now)
        open_to = [peer for peer in self._consumers.values() if peer is not self._isolated and peer.accepts(0)]
        while open_to:
            pair = self._next(open_to)
            if pair is None:
                return
            yield pair
            if not pair[1].accepts(0):
                open_to.remove(pair[1])

    def abandon(self, peer: ConsumerPeer) -> None:
        """The consumer takes nothing more."""
        if peer is self._isolated:
            self._isolated = self.solitary = None

    def on_timer(self, now: float) -> None:
        if self._isolated is not None and now >= self._isolated_until:
            self._isolated = self.solitary = None
            while (item := self._custody.next_suspect()) is not None:
                item.tried_alone = True
                self._custody.suspects.popleft()
                self._custody.redeliveries.append(item)

    def deadline(self) -> float | None:
        return self._isolated_until if self._isolated is not None else None

    def _next(self, consumers: list[ConsumerPeer]) -> tuple[Item, ConsumerPeer] | None:
        item = self._custody.next_ready()
        if item is None:
            return None
        # Keyed routing looks at all consumers: an item whose place is the isolated consumer waits for it.
        peer = keyed(item, self._consumers.values()) if self._keyed else self._route(item, consumers)
        if peer is None or peer is self._isolated:
            self._custody.put_back(item)
            return None
        return item, peer

    def _assign_suspect(self, now: float) -> Iterator[tuple[Item, ConsumerPeer]]:
        if self.solitary is not None and (self._isolated is None or self.solitary.holder is not self._isolated):
            self._isolated = self.solitary = None
        suspect = self._custody.next_suspect()
        if suspect is None:
            if self.solitary is None:
                self._isolated = None
            return
        if self.solitary is not None:
            return
        bound_to = part_holder(suspect, self._consumers.values()) if self._keyed else None
        if self._isolated is None or bound_to not in (None, self._isolated):
            candidates = [peer for peer in self._consumers.values() if peer.connected and not peer.draining]
            if bound_to is None and not candidates:
                return
            last = suspect.previous_holder
            self._isolated = bound_to or min(candidates, key=lambda peer: (len(peer.held), peer is last))
            self._isolated_until = now + self._spec.lease_s
        if not self._isolated.held and self._isolated.accepts(suspect.size):
            self.solitary = self._custody.suspects.popleft()
            yield self.solitary, self._isolated


def least_loaded(item: Item, consumers: Collection[ConsumerPeer]) -> ConsumerPeer | None:
    """Fewest held, then most free credit; the previous holder only if no other consumer has room."""
    best: ConsumerPeer | None = None
    best_rank = (True, 0, 0)
    for peer in consumers:
        if peer.accepts(item.size):
            rank = (peer is item.previous_holder, len(peer.held), -peer.credit.free_items)
            if best is None or rank < best_rank:
                best, best_rank = peer, rank
    return best


def sticky(item: Item, consumers: Collection[ConsumerPeer]) -> ConsumerPeer | None:
    """Of the consumers with room, the one that the key's text before its last '/' belongs to."""
    prefix = item.key.rpartition("/")[0] or item.key
    return _rendezvous(prefix, (peer for peer in consumers if peer.accepts(item.size)))


def keyed(item: Item, consumers: Iterable[ConsumerPeer]) -> ConsumerPeer | None:
    """The consumer that holds items with the same first part of the key, else the one that this part belongs to; None
    while that consumer accepts nothing."""
    staying = [peer for peer in consumers if not peer.draining]
    owner = part_holder(item, staying) or _rendezvous(item.key.partition("/")[0], staying)
    return owner if owner is not None and owner.accepts(item.size) else None


def part_holder(item: Item, consumers: Iterable[ConsumerPeer]) -> ConsumerPeer | None:
    """The consumer that holds items with the same first part of the key, and stays."""
    part = item.key.partition("/")[0]
    return next((peer for peer in consumers if part in peer.held_parts and not peer.draining), None)


def _rendezvous(text: str, consumers: Iterable[ConsumerPeer]) -> ConsumerPeer | None:
    def rank(peer: ConsumerPeer) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(f"{text}\0{peer.replica}".encode()), peer.incarnation

    return max(consumers, key=rank, default=None)
