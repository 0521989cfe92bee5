"""The newest value of each key, shared by all processes of a run: the server's and the clients' shells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

from transport.bodies import body_buffer
from transport.core.topic import Entries, TopicClientCore, TopicServerCore
from transport.errors import LinkError, MessageInvalid, MessageTooLarge, UsageError
from transport.port import CorePort, PeerPort
from transport.wire import KEY_LIMIT, AnyMessage, Body, FromTopic, ToTopic

VALUE_LIMIT = 64 << 20


def check_entry(key: str, value: bytes) -> None:
    if not key or len(key) > KEY_LIMIT:
        raise MessageInvalid(f"topic key {key[:40]!r} has {len(key)} characters; use 1 to {KEY_LIMIT}")
    if len(value) > VALUE_LIMIT:
        raise MessageTooLarge(
            f"topic value {key!r} has {len(value)} bytes, the limit is {VALUE_LIMIT}; publish a reference"
        )


def _bytes(body: Body) -> bytes | None:
    return None if body is None else bytes(body_buffer(body))


class Waiters:
    """Tasks that wait for keys: a change wakes only the tasks that read the key."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries
        self._waiting: dict[asyncio.Future[None], tuple[int, tuple[str, ...]]] = {}

    async def wait(self, revision: int, prefixes: tuple[str, ...], check: Callable[[], None]) -> int:
        """Wait for a change after `revision` below one of the prefixes (none: of any key). `check` raises what is
        wrong with the port; it is called again after each wake-up."""
        prefixes = prefixes or ("",)
        while not self.entries.changed_since(revision, prefixes):
            check()
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[woken] = (revision, prefixes)
            try:
                await woken
            finally:
                del self._waiting[woken]
        return self.entries.revision

    def wake(self, *, everybody: bool = False) -> None:
        for woken, (revision, prefixes) in self._waiting.items():
            if everybody or self.entries.changed_since(revision, prefixes):
                if not woken.done():
                    woken.set_result(None)
            else:  # skip these changes from now on, so that a long wait costs each change once
                self._waiting[woken] = (self.entries.revision, prefixes)


class TopicReader:
    """What both sides of a topic read."""

    entries: Entries

    @property
    def revision(self) -> int:
        return self.entries.revision

    def get(self, key: str) -> bytes | None:
        return self.entries.values.get(key)

    def items(self, prefix: str) -> Mapping[str, bytes]:
        return {key: value for key, value in self.entries.values.items() if key.startswith(prefix)}


class TopicServer(CorePort, TopicReader):
    """Made by `Node.topic_server`. Its own process reads and writes it directly."""

    def __init__(self, core: TopicServerCore) -> None:
        super().__init__()
        self.core = core
        self.entries = core.entries
        self._waiters = Waiters(core.entries)

    def publish(self, key: str, value: bytes) -> None:
        """Replace the value of a key and send it to all clients."""
        check_entry(key, value)
        self.core.publish(key, value)
        self.link.wake()

    def drop(self, key: str) -> None:
        """Delete a key; nothing happens if it is absent."""
        self.core.drop(key)
        self.link.wake()

    def dismiss(self, replica: str) -> None:
        """Delete the keys of a replica that has ended for good, and take no more from it."""
        self.core.dismiss(replica)
        self.link.wake()

    async def wait(self, revision: int, *prefixes: str) -> int:
        """See the stages' Topic. Unblocked by a change, or by closing."""
        return await self._waiters.wait(revision, prefixes, self._check_usable)

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        """Stop answering; clients keep their copies and look for another incarnation."""
        if self.closed:
            return
        self.core.closing = True
        self.shut(1000)
        self._waiters.wake(everybody=True)

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        self.core.on_message(route, cast(ToTopic, message), _bytes(body))

    def on_malformed(self, route: bytes, frame: bytes) -> None:
        self.core.malformed += 1

    def flush(self, now: float) -> None:
        for route, message, body in self.core.flush():
            if not self.link.send(route, message, body):
                self.core.on_unreachable(route)
        self._waiters.wake()

    def _check_usable(self) -> None:
        if self.closed:
            raise UsageError(f"the topic at {self.address} is closed; wait inside `async with Node`")


class TopicClient(PeerPort[TopicClientCore], TopicReader):
    """Made by `Node.topic`; satisfies the stages' Topic."""

    def __init__(self, address: str, core: TopicClientCore) -> None:
        super().__init__(address, "topic", core)
        self.entries = core.entries
        self._waiters = Waiters(core.entries)

    async def publish(self, key: str, value: bytes) -> None:
        """Replace the value of a key; returns when the server has it. Repeated after a reconnect, stored once."""
        self.check_usable()
        check_entry(key, value)
        await self.promised(self.core.publish(key, value))

    async def wait(self, revision: int, *prefixes: str) -> int:
        """See the stages' Topic. A fault and closing unblock it too."""
        return await self._waiters.wait(revision, prefixes, self.check_usable)

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        if self.closed:
            return
        self.core.fin(self.now())
        await self.leave(timeout_s)  # if the server is gone, nothing here is owed to it
        self._fail(UsageError(f"the topic at {self.address} was closed while publishing"))

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        self.core.on_message(self.now(), cast(FromTopic, message), _bytes(body))

    def flush(self, now: float) -> None:
        self.send_all(self.core.flush(now))
        self.note_session()
        for number in self.core.stored:
            self.keep(number)
        self.core.stored.clear()
        if (fault := self.fault()) is not None:
            self._fail(fault)
        else:
            self._waiters.wake()

    def _fail(self, error: LinkError | UsageError) -> None:
        self._waiters.wake(everybody=True)
        self.break_promises(error)
