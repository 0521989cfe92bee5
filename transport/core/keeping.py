"""A hub whose senders keep what it has: what it tells them, and what it does where it comes without memory.

Invariants, for one death at a time:
- what is in custody is kept by a producer that is there and stays. Where the last one that keeps it leaves or dies, the
  body is handed to the keeper (`unkept`), a producer of the process that everything dies with; a producer that says
  goodbye is let go only then. The keeper puts it under the same key, and is so one more that keeps it;
- a producer is told that a message is settled after the verdict is recorded, and of a dead letter after that was told;
- a hub that comes without memory ends its stream only when whoever was there has had the time to come back, and has put
  what it kept. For that time it delivers nothing but what consumers claim, since they hold or have finished it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from transport.core.routing import holder

if TYPE_CHECKING:
    from transport.core.custody import Custody, Item
    from transport.core.peers import ConsumerPeer, ProducerPeer
    from transport.spec import StreamSpec
    from transport.wire import Ping


class Keeping:
    def __init__(
        self,
        spec: StreamSpec,
        custody: Custody,
        producers: dict[str, ProducerPeer],
        consumers: dict[str, ConsumerPeer],
        resume_until: float,
    ) -> None:
        self.on = spec.senders_keep
        self.unkept: list[Item] = []  # taken by the shell
        self.resume_until, self.resuming = resume_until, resume_until > 0
        self._keyed = spec.routing == "keyed"
        self._custody, self._producers, self._consumers = custody, producers, consumers
        self._claims: dict[str, ConsumerPeer] = {}
        self._claimed: list[Item] = []

    # Producers.

    def note(self, peer: ProducerPeer, seq: int, item: Item | None) -> None:
        """A put was accepted. `item`: in custody under its key; None: that was settled before."""
        peer.owed = max(0, peer.owed - 1)
        if item is None:
            peer.to_release.append(seq)
            return
        item.origins.append((peer, seq))
        peer.unsettled[seq] = item
        if item.key in self._claims:
            self._claimed.append(item)

    def asked(self, peer: ProducerPeer, ping: Ping) -> None:
        """It keeps these: some may be settled, and the news of it lost."""
        peer.to_release.extend(seq for seq in ping.kept if seq in peer.seqs and seq not in peer.unsettled)
        peer.owed = ping.again

    def release(self, item: Item) -> list[ProducerPeer]:
        """The item is done with; who is to be told."""
        origins, item.origins = item.origins, []
        for peer, seq in origins:
            peer.unsettled.pop(seq, None)
            peer.to_release.append(seq)
        return [peer for peer, _ in origins]

    def leaves(self, peer: ProducerPeer) -> None:
        """It says goodbye, or is gone: what nobody else keeps is to be handed over."""
        peer.leaving = True
        self.unkept.extend(item for item in peer.unsettled.values() if not self._kept(item) and item.body is not None)

    def may_leave(self, peer: ProducerPeer) -> bool:
        return all(self._kept(item) for item in peer.unsettled.values())

    def _kept(self, item: Item) -> bool:
        return any(not peer.leaving and self._producers.get(peer.incarnation) is peer for peer, _ in item.origins)

    # Consumers.

    def claim(self, peer: ConsumerPeer, keys: tuple[str, ...]) -> None:
        """These, and no others any more, are held at the consumer from before, or finished."""
        self.gone(peer)
        for key in keys:
            self._claims[key] = peer
            if (item := self._custody.by_key.get(key)) is not None:
                self._claimed.append(item)

    def gone(self, peer: ConsumerPeer) -> None:
        if self._claims:
            self._claims = {key: other for key, other in self._claims.items() if other is not peer}

    def claimed(self) -> Iterator[tuple[str, str]]:
        """Keys of what consumers have from before, and no sender has put again; and who has it."""
        return ((key, peer.replica) for key, peer in self._claims.items())

    def returns(self) -> Iterator[tuple[Item, ConsumerPeer]]:
        """Items to be delivered to who claims them, whatever its credit: they have their place there."""
        claimed, self._claimed = self._claimed, []
        for item in claimed:
            peer = self._claims.pop(item.key, None)
            if peer is None or item.state != "queued" or peer.draining or not peer.connected:
                continue
            if self._keyed and holder(item, self._consumers.values()) not in (None, peer):
                continue
            yield item, peer

    # A hub without memory.

    def on_timer(self, now: float) -> None:
        self.resuming = self.resuming and now < self.resume_until

    @property
    def waits(self) -> bool:
        """Whether something may come that was here before."""
        return self.resuming or any(peer.owed for peer in self._producers.values())
