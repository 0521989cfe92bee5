"""Which consumer gets an item: the least loaded, or the one that its key belongs to.

Sticky routing is a hint that keeps a consumer's caches warm, never a promise: it uses rendezvous hashing over the
consumers that have room, so there is no table, a replica that comes or goes moves only its own share of the keys, and a
full one is passed over, since a lost cache costs less than an idle replica.
"""

from __future__ import annotations

from collections.abc import Collection

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

    def rank(peer: ConsumerPeer) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest(f"{prefix}\0{peer.replica}".encode()), peer.incarnation

    return max((peer for peer in consumers if peer.accepts(item.size)), key=rank, default=None)
