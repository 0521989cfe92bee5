"""Which consumer gets an item: the least loaded, or the one that its key prefix belongs to.

Sticky routing uses rendezvous hashing over the replicas: no table, and a replica that comes or goes moves only its own
share of the prefixes. Items of a full consumer wait in its backlog; a consumer with nothing to do takes the
newest of the longest backlog, since a lost cache costs less than an idle replica.
"""

from __future__ import annotations

from collections.abc import Collection

import xxhash

from transport.core.custody import Custody, Item
from transport.core.peers import ConsumerPeer


def least_loaded(item: Item, consumers: Collection[ConsumerPeer]) -> ConsumerPeer | None:
    """Fewest held, then most free credit; another one than it failed at, if there is any with room."""
    best: ConsumerPeer | None = None
    best_rank = (True, 0, 0)
    for peer in consumers:
        if peer.accepts(item.size):
            rank = (peer is item.last, len(peer.held), -peer.credit.free_items)
            if best is None or rank < best_rank:
                best, best_rank = peer, rank
    return best


def home(item: Item, consumers: Collection[ConsumerPeer]) -> ConsumerPeer | None:
    """The consumer that the text before the key's first '/' belongs to; another one after a failure there."""
    prefix = item.key.partition("/")[0]
    candidates = [peer for peer in consumers if peer.connected and not peer.draining]
    if item.failures and len(candidates) > 1:
        candidates = [peer for peer in candidates if peer is not item.last]
    if not candidates:
        return None
    return max(
        candidates, key=lambda peer: (xxhash.xxh3_64_intdigest(f"{prefix}\0{peer.replica}".encode()), peer.incarnation)
    )


def next_sticky(custody: Custody, consumers: Collection[ConsumerPeer]) -> tuple[Item, ConsumerPeer] | None:
    """Sort ready items into their homes until one can be delivered; else serve backlogs, else let an idle one help."""
    for peer in consumers:
        while peer.backlog:
            if peer.backlog[0].state != "queued":
                peer.backlog.popleft()
            elif peer.accepts(peer.backlog[0].size):
                return peer.backlog.popleft(), peer
            else:
                break
    while (item := custody.next_ready()) is not None:
        owner = home(item, consumers)
        if owner is None:
            custody.put_back(item)
            return None
        if owner.accepts(item.size) and not owner.backlog:
            return item, owner
        owner.backlog.append(item)
    return _help_out(consumers)


def _help_out(consumers: Collection[ConsumerPeer]) -> tuple[Item, ConsumerPeer] | None:
    idle = [peer for peer in consumers if not peer.held and not peer.backlog]
    if not idle:
        return None
    busiest = max(consumers, key=lambda peer: len(peer.backlog))
    while busiest.backlog:
        item = busiest.backlog.pop()
        if item.state == "queued":
            taker = least_loaded(item, idle)
            if taker is None:
                busiest.backlog.append(item)
                return None
            return item, taker
    return None
