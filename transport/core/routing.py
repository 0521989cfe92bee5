"""Which consumer gets an item: the least loaded, the one that its key belongs to, or the one that holds its like.

Sticky routing is a hint that keeps a consumer's caches warm, never a promise: it uses rendezvous hashing over the
consumers that have room, so there is no table, a replica that comes or goes moves only its own share of the keys, and a
full one is passed over, since a lost cache costs less than an idle replica.

Keyed routing is a promise, for stages that join: items whose keys have the same text before the first '/' are held by
one consumer at a time, those that it gives back before it leaves excepted. Who holds one of them gets the others;
without such a one rendezvous hashing decides. Nobody else gets them while that one is full or its link is broken, so
consumers of such a stream have windows as large as all that may be in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import xxhash

from transport.core.custody import Item
from transport.core.peers import ConsumerPeer


def least_loaded(item: Item, consumers: Collection[ConsumerPeer]) -> ConsumerPeer | None:
    """Fewest held, then most free credit; another one than had it before, if there is any with room."""
    best: ConsumerPeer | None = None
    best_rank = (True, 0, 0)
    for peer in consumers:
        if peer.accepts(item.size):
            rank = (peer is item.last, len(peer.held), -peer.credit.free_items)
            if best is None or rank < best_rank:
                best, best_rank = peer, rank
    return best


def sticky(item: Item, consumers: Collection[ConsumerPeer]) -> ConsumerPeer | None:
    """The one, of those with room, that the key's text before its last '/' belongs to."""
    prefix = item.key.rpartition("/")[0] or item.key
    return _rendezvous(prefix, (peer for peer in consumers if peer.accepts(item.size)))


def keyed(item: Item, consumers: Iterable[ConsumerPeer]) -> ConsumerPeer | None:
    """The one that holds items with the same first part of the key, else the one that this part belongs to; None while
    that one takes nothing."""
    staying = [peer for peer in consumers if not peer.draining]
    owner = holder(item, staying) or _rendezvous(item.key.partition("/")[0], staying)
    return owner if owner is not None and owner.accepts(item.size) else None


def holder(item: Item, consumers: Iterable[ConsumerPeer]) -> ConsumerPeer | None:
    """Who holds items with the same first part of the key, and stays."""
    part = item.key.partition("/")[0]
    return next((peer for peer in consumers if part in peer.held_parts and not peer.draining), None)


def _rendezvous(text: str, consumers: Iterable[ConsumerPeer]) -> ConsumerPeer | None:
    def rank(peer: ConsumerPeer) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(f"{text}\0{peer.replica}".encode()), peer.incarnation

    return max(consumers, key=rank, default=None)
