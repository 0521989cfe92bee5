"""What a hub knows of each connected producer and consumer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from transport.core.credit import Capacity, SendCredit
from transport.core.custody import Item
from transport.core.dedup import SeqWindow
from transport.spec import StreamSpec
from transport.wire import PROTOCOL, Hello


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
    held_parts: Counter[str] = field(default_factory=Counter)  # of each first part of a key, how many are held
    to_settle: list[int] = field(default_factory=list)
    beat: bool = False  # answer with how far deliveries have gone
    draining: bool = False
    told_end: bool = False

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
