"""Neighbouring stages of one process: a call in the place of a stream, known as operator chaining.

A `ChainLink` is the outlet of one stage and the inlet of the next one. An `EntryInlet` stands before each inlet of a
stage with a link behind it. Both know which messages belong together: those whose keys have the same text before the
first '/', as in keyed routing; here it is called the part.

Invariants:
- a message that entered by a hub is acknowledged there once its stage has released it, and the last stage of the chain
  all that the chain made of its part. So a process that dies loses nothing: the hub delivers the message again;
- what a hub still holds for a stage of the chain reaches the stage by the same inlet as the messages of the chain;
- `send` waits while `window` messages wait for the next stage;
- a chain that is taken apart leaves from its last link to its first. What waits for a stage, what the stage still holds
  when it ends, and what is sent later goes to other replicas by the stream that the link stands for;
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
T_contra = TypeVar("T_contra", contravariant=True)


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


class Outlet(Protocol[T_contra]):
    """The producing end of the stream that a link stands for."""

    async def send(self, message: T_contra, key: str) -> None: ...


class Source(Protocol[T_co]):
    """An inlet."""

    async def receive(self) -> Lease[T_co] | None: ...


class HubSource(Protocol[T]):
    """An inlet of a hub."""

    async def receive(self) -> LeaseHandle[T] | None: ...


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
        self._queue: asyncio.Queue[LeaseHandle[T] | None] = asyncio.Queue(window)
        self._parts: dict[str, _Part] = {}
        self._unsettled: dict[str, LeaseHandle[T]] = {}  # what was sent here, by key
        self._outlet: Outlet[T] | None = None  # once the chain is taken apart
        self._sources = 1
        self.consumed = asyncio.Event()  # the next stage has ended

    async def send(self, message: T, key: str) -> None:
        """Hand over. Waits for room. Raises MessageInvalid, with nothing sent."""
        if self._outlet is not None:
            await self._outlet.send(message, key)
            return
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
        lease = self._unsettled[key] = LeaseHandle(message, key, part.attempt, partial(self.settled, key))
        try:
            await self._queue.put(lease)
        except BaseException:
            self.settled(key)
            raise

    async def receive(self) -> Lease[T] | None:
        """The next message; None once all sources have ended and the queue is empty."""
        lease = await self._queue.get()
        if lease is None:
            self._queue.put_nowait(None)  # for the other receivers; its place is free
        return lease

    async def merge(self, source: HubSource[T]) -> None:
        """Receive also what a hub has for the next stage. Waits until the hub's stream ends, or the inlet is
        drained. `end` it as many times more."""
        self._sources += 1
        while (lease := await source.receive()) is not None:
            await self._queue.put(lease)
        await self.end()

    async def end(self) -> None:
        """One source has ended."""
        self._sources -= 1
        if not self._sources and self._outlet is None:
            await self._queue.put(None)

    async def leave(self, outlet: Outlet[T]) -> None:
        """Give what waits for the next stage to other replicas of it, the oldest first. The next stage then ends."""
        self._outlet = outlet
        while not self._queue.empty():
            lease = self._queue.get_nowait()
            if lease is not None and lease.give_back is not None:
                lease.give_back()  # its hub took its key once, and would drop it
            elif lease is not None:
                await self._pass_on(lease)
        self._queue.put_nowait(None)

    async def give_up(self) -> None:
        """The next stage has ended. In a chain that is taken apart it leaves what it still holds, parts of groups."""
        for lease in list(self._unsettled.values()) if self._outlet is not None else ():
            await self._pass_on(lease)

    async def _pass_on(self, lease: LeaseHandle[T]) -> None:
        assert self._outlet is not None
        await self._outlet.send(lease.message, lease.key)
        lease.done()

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
        self._unsettled.pop(key, None)
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
