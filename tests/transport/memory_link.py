"""Links without sockets, threads and clocks: the same cores and ports inside one process, for tests.

Invariant: what travels is encoded and decoded as on a wire, so a message that would not survive a socket does not
survive here either. Messages of one connection keep their order; a cut connection loses what was under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from transport.errors import AddressInUse
from transport.node import Node
from transport.port import CorePort, Decode, Link
from transport.spec import DeadLetter, StreamSpec
from transport.stream import Hub, Inlet, LeaseHandle
from transport.wire import AnyMessage, Body, encode

Letter = tuple[bytes, bytes, Body]  # route, header, body


class MemoryNetwork:
    """Where nodes of one process meet: hubs by address, connections by route."""

    def __init__(self) -> None:
        self.servers: dict[str, MemoryLink] = {}
        self.clients: dict[bytes, MemoryLink] = {}
        self.routes = count(1)


class MemoryLink(Link):
    """A server or a client (it has a route)."""

    def __init__(
        self, endpoint: CorePort, network: MemoryNetwork, decode: Decode, address: str, *, serves: bool
    ) -> None:
        super().__init__(endpoint)
        self.address, self.route = address, b""
        self.inbox: deque[Letter] = deque()
        self._network, self._decode, self._serves = network, decode, serves
        self._unsent: deque[tuple[bytes, Body]] = deque()
        self._events: deque[bool] = deque()  # True: link up, False: link down

    def send(self, route: bytes, message: AnyMessage, body: Body = None) -> bool:
        header = encode(message)
        if not self._serves:
            self._unsent.append((header, body))
            self._send_queued()
            return True
        client = self._network.clients.get(route)
        if client is not None:
            client.arrive((b"", header, body))
        return client is not None

    def arrive(self, letter: Letter) -> None:
        self.inbox.append(letter)
        self.wake()

    def report(self, *, up: bool) -> None:
        self._events.append(up)
        self.wake()

    def reconnect(self) -> None:
        """Forget the connection and make another one, as a socket would after a broken link."""
        self._network.clients.pop(self.route, None)
        self.route = next(self._network.routes).to_bytes(5, "big")
        self._network.clients[self.route] = self
        self.inbox.clear()
        if self.address in self._network.servers:
            self.report(up=True)

    def discard_unsent(self) -> None:
        self._unsent.clear()

    def close(self, linger_ms: int) -> None:
        server = self._network.servers.get(self.address)
        if server is self:
            del self._network.servers[self.address]
        elif self._network.clients.pop(self.route, None) is not None and server is not None:
            server.report(up=False)
        self.route = b""

    def _send_queued(self) -> None:
        server = self._network.servers.get(self.address)
        while server is not None and self.route and self._unsent:
            server.arrive((self.route, *self._unsent.popleft()))

    def _take(self, limit: int) -> int:
        while self._events:
            if self._events.popleft():
                self.endpoint.on_link_up()
            else:
                self.endpoint.on_link_down()
        if not self._serves:
            self._send_queued()
        taken = 0
        while self.inbox and taken < limit:
            route, header, body = self.inbox.popleft()
            taken += 1
            try:
                message = self._decode(header)
            except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
                self.endpoint.on_malformed(route, header)
            else:
                self.endpoint.on_message(route, message, body)
        return taken

    def _pending(self) -> bool:
        return bool(self.inbox or self._events)


class MemoryFabric:
    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._links: list[MemoryLink] = []

    def bind(self, text: str, endpoint: CorePort, max_message_bytes: int, decode: Decode) -> Link:
        if text in self._network.servers:
            raise AddressInUse(f"address {text} is in use by another hub of this network; choose another")
        link = MemoryLink(endpoint, self._network, decode, text, serves=True)
        self._network.servers[text] = link
        for client in list(self._network.clients.values()):
            if client.address == text:
                client.reconnect()
        self._links.append(link)
        return link

    def connect(self, text: str, endpoint: CorePort, decode: Decode) -> Link:
        link = MemoryLink(endpoint, self._network, decode, text, serves=False)
        link.reconnect()
        self._links.append(link)
        return link

    async def close(self) -> None:
        for link in self._links:
            link.close(0)


class MemoryNode(Node):
    """A node on a MemoryNetwork; any text is an address."""

    def __init__(self, run_id: str, replica: str, network: MemoryNetwork, **limits: Any) -> None:
        super().__init__(run_id, replica, **limits)
        self._network = network

    def _make_fabric(self) -> MemoryFabric:  # type: ignore[override]
        return MemoryFabric(self._network)


# Common ground of the conformance tests: how to reach a kind of link, a few message types, a stream made ready.


LIMIT_S = 120.0
T = TypeVar("T")


class Int32s(np.ndarray[Any, np.dtype[Any]]):
    wire_dtype: ClassVar[str] = "<i4"


class Extra(np.ndarray[Any, np.dtype[Any]]):
    wire_frame: ClassVar[bool] = True


class Job(msgspec.Struct, frozen=True, array_like=True):
    number: int
    text: str = ""
    tokens: Int32s | None = None
    extras: dict[str, Extra] = {}


class Ping(msgspec.Struct, frozen=True, array_like=True):
    number: int


@dataclass
class Net:
    """How to reach a kind of link."""

    open_node: Callable[[], AbstractAsyncContextManager[Node]]
    address: Callable[[str], str]  # a fresh place for each name
    rebinds: bool = True  # a hub may come back at the same address
    letters: list[DeadLetter] = field(default_factory=list)

    @asynccontextmanager
    async def node(self) -> AsyncIterator[Node]:
        async with asyncio.timeout(LIMIT_S), self.open_node() as node:
            yield node

    @asynccontextmanager
    async def stream(self, **of_spec: Any) -> AsyncIterator[tuple[Node, Hub]]:
        of_spec = {"max_attempts": 3, "max_message_bytes": 1 << 20, "lease_s": 5.0} | of_spec
        async with self.node() as node:
            spec = StreamSpec("jobs", self.address("jobs"), **of_spec)
            yield node, await node.hub(spec, self.letters.append)


def ignore(letter: DeadLetter) -> None:
    """Where dead letters are not what is tested."""


async def send_jobs(node: Node, hub: Hub, numbers: range) -> None:
    outlet = await node.outlet(hub.address, "jobs", Job)
    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(outlet.send(Job(number), f"{number % 5}/{number}"))


async def take_one(inlet: Inlet[T]) -> LeaseHandle[T]:
    """The next message. Unblocked by its delivery; END is a failure."""
    lease = await inlet.receive()
    assert lease is not None, "the stream has ended"
    return lease


async def take_all(inlet: Inlet[Job]) -> list[int]:
    """Finish everything until END. Unblocked by deliveries and by END."""
    numbers: list[int] = []
    while (lease := await inlet.receive()) is not None:
        numbers.append(lease.message.number)
        lease.done()
        await asyncio.sleep(0)
    return numbers


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event announces. Unblocked when the condition holds; bounded by the test's limit."""
    while not condition():  # noqa: ASYNC110 - what counters say has no event
        await asyncio.sleep(0.001)
