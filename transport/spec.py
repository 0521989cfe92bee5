"""The declaration of a stream, and the facts of its hub: plain values, validated at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from transport.errors import UsageError

Routing = Literal["least_loaded", "sticky", "keyed"]


class StreamSpec(msgspec.Struct, frozen=True):
    """One declared edge of the graph; its hub binds at `address`.

    Back-pressure is soft by one step: a hub grants while it holds less than its capacity, so it may come to hold up to
    one window (an eighth of the capacity, at most 64 messages or 4 MiB) more per connected producer, plus one message.
    """

    name: str
    address: str
    capacity_items: int = 100_000
    capacity_bytes: int = 1 << 30
    lease_s: float = 30.0  # a consumer silent for so long loses what it holds
    max_attempts: int = 5  # failed executions before a message is dead-lettered
    max_message_bytes: int = 64 << 20
    routing: Routing = "least_loaded"
    # Stages whose replicas (`<stage>-<number>`) may send and take; None: any that may connect.
    producers: frozenset[str] | None = None
    consumers: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for field in ("capacity_items", "capacity_bytes", "max_attempts", "max_message_bytes"):
            value = getattr(self, field)
            if value < 1:
                raise UsageError(f"stream {self.name!r}: {field} is {value} but must be at least 1; raise it")
        if not self.lease_s > 0:
            raise UsageError(f"stream {self.name!r}: lease_s is {self.lease_s} but must be positive; 30 is usual")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that no consumer will process, and why."""

    stream: str
    key: str
    header: bytes  # msgpack of the WORK header, or the raw frame of something that was no message
    body: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """One message in a hub's custody, and the replica that has it."""

    key: str
    holder: str  # replica that has it; empty while it waits for one
    seconds: float  # since the holder got it; 0 while it waits


@dataclass(slots=True, kw_only=True)
class Counts:
    """What a hub counts of its messages. `accepted == settled + dead_letters + queued + leased` at all times."""

    leased: int = 0
    accepted: int = 0  # messages taken into custody, duplicates excluded
    redelivered: int = 0  # deliveries beyond the first of each
    duplicates: int = 0  # suppressed: resent, same key, or finished twice
    dead_letters: int = 0
    bytes_queued: int = 0  # bodies in custody, leased ones included
    settled: int = 0


@dataclass(slots=True, kw_only=True)
class HubStats(Counts):
    """Counters of one hub at one moment."""

    queued: int
    producers: int
    consumers: int
    malformed: int  # frames that were no message of the protocol
