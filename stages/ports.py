"""What a stage may ask of the world: the ports' Protocols. `transport` implements them; no stage imports it.

Invariants:
- `receive` hands out a lease, never a bare message: until `done` or `poison` is called the hub still owns the
  message, and hands it to another replica when this one is lost.
- `send` returns when the hub has taken custody. A stage therefore calls `done` on its input only after its last `send`.
- The topic is level-triggered: it holds the newest value of each key, and a late joiner sees them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from stages.messages import WeightsAnnouncement

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Lease(Protocol[T_co]):
    """One message in this replica's care."""

    @property
    def message(self) -> T_co: ...

    @property
    def key(self) -> str: ...

    @property
    def attempt(self) -> int:
        """1 at the first delivery, one more at each redelivery."""

    def done(self) -> None:
        """Release the message for good. Never blocks; acknowledgements travel in batches."""

    def poison(self, reason: str) -> None:
        """Refuse the message for good: the hub dead-letters it with the reason."""


class Inlet(Protocol[T_co]):
    """Consuming end of a stream."""

    async def receive(self) -> Lease[T_co] | None:
        """Wait for the next message. Unblocked by a delivery, or with None once the stream is finished and empty."""


class Outlet(Protocol[T_contra]):
    """Producing end of a stream."""

    async def send(self, message: T_contra, key: str) -> None:
        """Hand a message over.

        Waits for credit and for the hub's acceptance; `key` names it for duplicate detection. Raises ValueError, with
        nothing sent, for a message that is larger than the stream takes.
        """


class Readable(Protocol):
    """The reading half of a topic; its server and its clients both have it."""

    def get(self, key: str) -> bytes | None: ...

    def items(self, prefix: str) -> Mapping[str, bytes]: ...


class Topic(Readable, Protocol):
    """Newest value by key, shared by all processes of a run."""

    async def publish(self, key: str, value: bytes) -> None:
        """Replace the value of a key. Returns when the topic's server has it."""

    async def wait(self, revision: int, *prefixes: str) -> int:
        """Wait until a key below one of the prefixes changed after `revision` (0 at first); return the newest revision
        seen here, for the next call. Without prefixes: any key. Name what you read, for each wake-up costs time."""


def read_value(topic: Readable, key: str, kind: type[T]) -> T | None:
    """The value of a key as the struct that it is; None where the topic has none, or an empty one."""
    value = topic.get(key)
    return msgspec.msgpack.decode(value, type=kind) if value else None


async def wait_value(topic: Topic, key: str) -> bytes:
    """Wait until a key has a value, and return it."""
    revision = 0
    while (value := topic.get(key)) is None:
        revision = await topic.wait(revision, key)
    return value


async def wait_until(topic: Topic, holds: Callable[[], bool], *prefixes: str, limit_s: float | None = None) -> None:
    """Wait until this holds, which is asked again after each change below the prefixes; at most `limit_s`."""
    revision = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not holds():
                revision = await topic.wait(revision, *prefixes)


async def wait_at_most(limit_s: float | None, change: Awaitable[T]) -> T | None:
    """Wait for a change, but no longer than this, if there is a limit: then None, for a loop that looks again."""
    try:
        async with asyncio.timeout(limit_s):
            return await change
    except TimeoutError:
        return None


class WeightsSource(Protocol):
    """Published weights, on whichever host they are wanted."""

    async def offer(self, slot: Path) -> None:
        """Let other hosts fetch the files of this directory, now and after each rewrite."""

    async def local(self, announcement: WeightsAnnouncement) -> WeightsAnnouncement:
        """The same announcement with a path that lies on this host.

        Waits until all bytes are here. Raises WeightsError if they differ from the announced ones: ask again with
        the newest announcement.
        """

    def kept(self, announcement: WeightsAnnouncement) -> bool:
        """Whether the trainer still has the announced directory. One that was started again has not its copies."""


class SameHost:
    """All on one host, where a slot is used as it lies."""

    async def offer(self, slot: Path) -> None:
        """No process is on another host."""

    async def local(self, announcement: WeightsAnnouncement) -> WeightsAnnouncement:
        return announcement

    def kept(self, announcement: WeightsAnnouncement) -> bool:
        return Path(announcement.path).is_dir()


@dataclass(frozen=True)
class Ports:
    """All that a stage is connected to. Names are fixed by the graph: `in`, `out`, `settle`, ..."""

    replica: str
    inlets: Mapping[str, Inlet[Any]]
    outlets: Mapping[str, Outlet[Any]]
    topic: Topic
    weights: WeightsSource = field(default_factory=SameHost)
