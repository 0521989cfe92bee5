"""Neighbouring stages of one process: a call in the place of a stream, known as operator chaining.

A `ChainLink` is the outlet of one stage and the inlet of the next one. An `EntryInlet` stands before each inlet of a
stage with a link behind it. Both know which messages belong together: those whose keys have the same text before the
first '/', as in keyed routing; here it is called the part.

Invariants:
- a message that entered by a hub is acknowledged there once its stage has released it, and the last stage of the chain
  all that the chain made of its part. So a process that dies loses nothing: the hub delivers the message again;
- what a hub still holds for a stage of the chain reaches the stage by the same inlet as the messages of the chain;
- `send` waits while `window` messages wait for the next stage;
- messages from and to stages of the user are copied and checked by the schema, as on their way between processes. All
  others are handed on as they are: nobody may write to the arrays of a message.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from transport.codec import Codec
from transport.errors import DecodeError, MessageInvalid
from transport.stream import LeaseHandle
from transport.wire import KEY_LIMIT

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Lease(Protocol[T_co]):
    """A message in the care of a stage."""

    @property
    def message(self) -> T_co: ...
    @property
    def key(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    def done(self) -> None: ...
    def poison(self, reason: str) -> None: ...


class Source(Protocol[T_co]):
    """An inlet of a hub."""

    async def receive(self) -> Lease[T_co] | None: ...


@dataclass(slots=True)
class _Part:
    """What a link knows of the messages of one part, from the first that enters to the last that is settled."""

    attempt: int = 1
    entered: int = 0  # leases before the link that their stage has not released
    behind: int = 0  # messages that were sent and are not settled
    since: float = 0.0  # when the oldest of them was sent, as long as there are any
    waiting: list[Lease[Any]] = field(default_factory=list)  # leases that their stage has released
    refused: str | None = None


class ChainLink(Generic[T]):
    """Outlet of one stage and inlet of the next.

    Args:
        schema: of the messages.
        window: the number of messages that may wait for the next stage.
        copies: whether a stage of the user is at an end.
    """

    def __init__(self, schema: type[T], window: int, *, copies: bool) -> None:
        self._codec = Codec(schema) if copies else None
        self._queue: asyncio.Queue[Lease[T] | None] = asyncio.Queue(window)
        self._parts: dict[str, _Part] = {}
        self._sources = 1
        self.consumed = asyncio.Event()  # the next stage has ended

    async def send(self, message: T, key: str) -> None:
        """Hand over. Waits for room. Raises MessageInvalid, with nothing sent."""
        if not key or len(key) > KEY_LIMIT:
            raise MessageInvalid(f"key {key[:40]!r} has {len(key)} characters; use 1 to {KEY_LIMIT}")
        if self._codec is not None:
            try:
                message = self._codec.copy(message)
            except DecodeError as error:
                known = self._parts.get(_part_of(key))
                if known is None or not known.entered:
                    raise MessageInvalid(f"message {key!r} belongs to none that its stage works on: {error}") from error
                known.refused = f"quarantined in a chain of stages: {error}"
                return
        part = self._parts.setdefault(_part_of(key), _Part())
        part.behind += 1
        part.since = part.since or time.monotonic()
        try:
            await self._queue.put(LeaseHandle(message, key, part.attempt, partial(self.settled, key)))
        except BaseException:
            self.settled(key)
            raise

    async def receive(self) -> Lease[T] | None:
        """The next message; None once all sources have ended and the queue is empty."""
        lease = await self._queue.get()
        if lease is None:
            self._queue.put_nowait(None)  # for the other receivers; its place is free
        return lease

    async def merge(self, source: Source[T]) -> None:
        """Receive also what a hub has for the next stage. Waits until the hub's stream ends, or the inlet is
        drained. `end` it as many times more."""
        self._sources += 1
        while (lease := await source.receive()) is not None:
            await self._queue.put(lease)
        await self.end()

    async def end(self) -> None:
        """One source has ended."""
        self._sources -= 1
        if not self._sources:
            await self._queue.put(None)

    @property
    def queued(self) -> int:
        """Messages that wait for the next stage."""
        return self._queue.qsize()

    def held(self, least_s: float) -> dict[str, float]:
        """Parts that have left the stage before for at least so many seconds and are not settled, with the seconds."""
        now = time.monotonic()
        ages = ((name, now - part.since) for name, part in self._parts.items() if part.behind and not part.entered)
        return {name: age for name, age in ages if age >= least_s}

    # Called by the leases of both sides.

    def entered(self, lease: Lease[Any]) -> None:
        """The stage before this link has received a message."""
        part = self._parts.setdefault(_part_of(lease.key), _Part())
        part.entered += 1
        part.attempt = lease.attempt

    def released(self, lease: Lease[Any], refused: str | None = None) -> None:
        """The stage before this link has released a message, and sent what follows from it. The message is settled
        when all of its part is; if some of that is refused, at once, as a dead letter."""
        part = self._parts[_part_of(lease.key)]
        part.entered -= 1
        part.refused = refused or part.refused
        part.waiting.append(lease)
        self._look(_part_of(lease.key))

    def settled(self, key: str, refused: str | None = None) -> None:
        """A message behind this link is settled."""
        part = self._parts[_part_of(key)]
        part.behind -= 1
        part.refused = refused or part.refused
        self._look(_part_of(key))

    def _look(self, name: str) -> None:
        part = self._parts[name]
        if part.behind and part.refused is None:
            return
        waiting, part.waiting = part.waiting, []
        for lease in waiting:
            if part.refused is None:
                lease.done()
            else:
                lease.poison(part.refused)
        if not part.behind:
            part.since = 0.0
            if not part.entered:
                del self._parts[name]


class EntryInlet(Generic[T]):
    """An inlet of a stage with a link behind it. At most `in_work` of its messages are in the care of the stage, while
    the inlet itself holds all those that the stages behind still work on."""

    def __init__(self, inlet: Source[T], link: ChainLink[Any], in_work: int) -> None:
        self._inlet, self._link = inlet, link
        self._room = asyncio.Semaphore(in_work)

    async def receive(self) -> Lease[T] | None:
        """As the inlet. Waits also while the stage has as many messages as it may."""
        await self._room.acquire()
        lease = None
        try:
            lease = await self._inlet.receive()
        finally:
            if lease is None:
                self._room.release()
        if lease is None:
            return None
        self._link.entered(lease)
        return LeaseHandle(lease.message, lease.key, lease.attempt, partial(self._released, lease))

    def _released(self, lease: Lease[T], refused: str | None) -> None:
        self._room.release()
        self._link.released(lease, refused)


def _part_of(key: str) -> str:
    return key.partition("/")[0]
