"""Who gets what next: routing under credit, and solitary execution of suspects.

A suspect (see custody) is run alone: one consumer, the ward, is given nothing new until it is empty, then the suspect
only, until its verdict. A stage that gathers many messages before it answers any would wait for ever in solitude, so
the ward is given up after one lease and the suspect goes with the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from transport.core.routing import holder, keyed, least_loaded, sticky

if TYPE_CHECKING:
    from transport.core.custody import Custody, Item
    from transport.core.peers import ConsumerPeer
    from transport.spec import StreamSpec


class Dispatch:
    def __init__(self, spec: StreamSpec, custody: Custody, consumers: dict[str, ConsumerPeer]) -> None:
        self._spec = spec
        self._keyed = spec.routing == "keyed"
        self._route = sticky if spec.routing == "sticky" else least_loaded
        self._custody = custody
        self._consumers = consumers
        self._ward: ConsumerPeer | None = None
        self.alone: Item | None = None
        self._ward_until = 0.0

    def assign(self, now: float) -> Iterator[tuple[Item, ConsumerPeer]]:
        """Pairs to be delivered, one by one: the caller leases each before it asks for the next."""
        yield from self._solitary(now)
        open_to = [peer for peer in self._consumers.values() if peer is not self._ward and peer.accepts(0)]
        while open_to:
            pair = self._next(open_to)
            if pair is None:
                return
            yield pair
            if not pair[1].accepts(0):
                open_to.remove(pair[1])

    def abandon(self, peer: ConsumerPeer) -> None:
        """The consumer takes nothing more."""
        if peer is self._ward:
            self._ward = self.alone = None

    def on_timer(self, now: float) -> None:
        if self._ward is not None and now >= self._ward_until:
            self._ward = self.alone = None
            while (item := self._custody.next_suspect()) is not None:
                item.tried_alone = True
                self._custody.suspects.popleft()
                self._custody.again.append(item)

    def deadline(self) -> float | None:
        return self._ward_until if self._ward is not None else None

    def _next(self, consumers: list[ConsumerPeer]) -> tuple[Item, ConsumerPeer] | None:
        item = self._custody.next_ready()
        if item is None:
            return None
        # Keyed, all are asked: an item whose place is with the ward waits for it.
        peer = keyed(item, self._consumers.values()) if self._keyed else self._route(item, consumers)
        if peer is None or peer is self._ward:
            self._custody.put_back(item)
            return None
        return item, peer

    def _solitary(self, now: float) -> Iterator[tuple[Item, ConsumerPeer]]:
        if self.alone is not None and (self._ward is None or self.alone.holder is not self._ward):
            self._ward = self.alone = None
        suspect = self._custody.next_suspect()
        if suspect is None:
            if self.alone is None:
                self._ward = None
            return
        if self.alone is not None:
            return
        beside = holder(suspect, self._consumers.values()) if self._keyed else None
        if self._ward is None or beside not in (None, self._ward):
            candidates = [peer for peer in self._consumers.values() if peer.connected and not peer.draining]
            if beside is None and not candidates:
                return
            self._ward = beside or min(candidates, key=lambda peer: (len(peer.held), peer is suspect.last))
            self._ward_until = now + self._spec.lease_s
        if not self._ward.held and self._ward.accepts(suspect.size):
            self.alone = self._custody.suspects.popleft()
            yield self.alone, self._ward
