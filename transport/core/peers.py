"""What a hub knows of each connected producer and consumer."""

from __future__ import annotations

from dataclasses import dataclass, field

from transport.core.credit import SendCredit
from transport.core.custody import Item
from transport.core.dedup import SeqWindow


@dataclass(slots=True, eq=False)
class Peer:
    route: bytes
    replica: str
    incarnation: str
    silent_at: float  # when it counts as lost unless it is heard of
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
    asked: bool = False  # wants to hear its limits


@dataclass(slots=True, eq=False)
class ConsumerPeer(Peer):
    credit: SendCredit = field(default_factory=SendCredit)
    held: dict[int, Item] = field(default_factory=dict)
    to_settle: list[int] = field(default_factory=list)
    beat: bool = False  # answer with how far deliveries have gone
    draining: bool = False
    told_end: bool = False

    def take(self, item: Item) -> None:
        self.credit.use(item.size)
        item.serial = self.credit.sent_items
        item.holder = self
        self.held[item.id] = item

    def give(self, item: Item) -> None:
        del self.held[item.id]

    def accepts(self, size: int) -> bool:
        return self.connected and not self.draining and self.credit.fits(size, alone=not self.held)
