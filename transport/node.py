"""One process's place on the wire: its links, their owner tasks, and an orderly end.

Invariants: one node (and one zmq context) per process, or several replicas inside one node; every port is opened inside
`async with` and closed at its end, peers before hubs, within `close_s`; leaving never hangs, also after an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TypeVar

from transport import wire
from transport.codec import Codec
from transport.core.consumer import ConsumerCore
from transport.core.hub import HubCore
from transport.core.producer import ProducerCore
from transport.core.topic import TopicClientCore, TopicServerCore
from transport.errors import AddressInUse, UsageError
from transport.links.link import Decode, Endpoint, Fabric, Link
from transport.links.security import Security
from transport.links.zmq_fabric import ZmqFabric
from transport.ports.byte_transfer import ByteClient, ByteServer
from transport.ports.endpoint import PeerPort
from transport.ports.hub import Hub
from transport.ports.stream import Inlet, Outlet
from transport.ports.topic import VALUE_LIMIT, TopicClient, TopicServer
from transport.spec import DeadLetter, StreamSpec
from transport.wire import PROTOCOL, Hello, TopicHello

T = TypeVar("T")
REBIND_TRIES = 20
REBIND_PAUSE_S = 0.02


class Port(Protocol):
    """What a node closes at its end."""

    closed: bool
    link: Link

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None: ...

    def shut(self, linger_ms: int) -> None: ...


class Node:
    """See the module.

    `replica` names this process (or this task) to hubs and supervisor; ports may override it. `give_up_s`: a hub that
    was silent for so long is lost, and its ports raise LinkLost; None retries for ever. `close_s` bounds each half of
    the goodbyes.
    """

    def __init__(
        self,
        run_id: str,
        replica: str,
        security: Security | None = None,
        *,
        give_up_s: float | None = None,
        close_s: float = 1.5,
    ) -> None:
        self.run_id = run_id
        self.replica = replica
        self.security = security
        self._give_up_s = give_up_s
        self._close_s = close_s
        self._fabric: Fabric | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._peers: list[Port] = []
        self._hosts: list[Port] = []
        self._pid = os.getpid()

    async def __aenter__(self) -> Node:
        if self._tasks is not None:
            raise UsageError("this node was opened before; make a new one")
        self._fabric = self._make_fabric()
        self._pid = os.getpid()
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        assert self._fabric is not None
        cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        blame = kind is not None and not cancelled
        try:
            await self._close_all(self._peers, blame=blame)
            await self._close_all(self._hosts, blame=blame)
        finally:
            for port in [*self._peers, *self._hosts]:
                port.shut(0 if error is not None else 1000)
            try:
                # Only a cancellation may pass: an owner task that failed has cancelled this one, and the group knows.
                # Any other error would come back wrapped into a group of one.
                await self._tasks.__aexit__(kind if cancelled else None, error if cancelled else None, trace)
            finally:
                await self._fabric.close()

    async def hub(self, spec: StreamSpec, on_dead_letter: Callable[[DeadLetter], None]) -> Hub:
        """Bind the hub of a stream here. Raises AddressInUse, AddressRefused, AddressInvalid."""
        fabric = self._usable()
        hub = Hub(HubCore(spec, self.run_id, secrets.randbits(62)), on_dead_letter)
        hub.link = await self._bind(fabric, spec.address, hub, spec.max_message_bytes, wire.decode_to_hub)
        self._start(hub, self._hosts)
        return hub

    async def inlet(
        self,
        address: str,
        stream: str,
        schema: type[T],
        *,
        window_items: int = 16,
        window_bytes: int = 8 << 20,
        replica: str | None = None,
    ) -> Inlet[T]:
        """Connect a consumer and wait for its welcome. At most `window_items` are in its care at a time."""
        fabric = self._usable()
        if window_items < 1 or window_bytes < 1:
            raise UsageError(
                f"window of {window_items} items and {window_bytes} bytes admits nothing; use at least 1 of each"
            )
        codec = Codec(schema)
        hello = self._hello(stream, "consumer", codec.name, codec.hash, replica)
        core = ConsumerCore(hello, window_items, window_bytes, give_up_s=self._give_up_s)
        inlet: Inlet[T] = Inlet(address, stream, core, codec)
        inlet.link = fabric.connect(address, inlet, wire.decode_from_hub)
        await self._open(inlet)
        return inlet

    async def outlet(self, address: str, stream: str, schema: type[T], *, replica: str | None = None) -> Outlet[T]:
        """Connect a producer and wait for its welcome."""
        fabric = self._usable()
        codec = Codec(schema)
        hello = self._hello(stream, "producer", codec.name, codec.hash, replica)
        outlet: Outlet[T] = Outlet(address, stream, ProducerCore(hello, give_up_s=self._give_up_s), codec)
        outlet.link = fabric.connect(address, outlet, wire.decode_from_hub)
        await self._open(outlet)
        return outlet

    async def topic_server(
        self,
        address: str,
        private: tuple[str, ...] = (),
        writers: Mapping[str, frozenset[str]] = MappingProxyType({}),
    ) -> TopicServer:
        """Bind the run's topic here. Values below the `private` prefixes are for this process alone; `writers`: which
        stages may write a key, beside this process (see TopicServerCore)."""
        fabric = self._usable()
        server = TopicServer(TopicServerCore(self.run_id, secrets.randbits(62), private, writers))
        server.link = await self._bind(fabric, address, server, VALUE_LIMIT, wire.decode_to_topic)
        self._start(server, self._hosts)
        return server

    async def topic(self, address: str, *, replica: str | None = None) -> TopicClient:
        """Connect to the topic and wait for its snapshot."""
        fabric = self._usable()
        hello = TopicHello(PROTOCOL, self.run_id, replica or self.replica, secrets.token_hex(16))
        client = TopicClient(address, TopicClientCore(hello, give_up_s=self._give_up_s))
        client.link = fabric.connect(address, client, wire.decode_from_topic)
        await self._open(client)
        return client

    async def byte_server(self, address: str) -> ByteServer:
        """Bind a server of bytes here; it serves nothing yet."""
        server = ByteServer(self.run_id)
        server.link = await self._bind(self._usable(), address, server, 0, wire.decode_to_bytes)
        self._start(server, self._hosts)
        return server

    async def byte_client(self, address: str) -> ByteClient:
        """A client of a byte server. Whether that is there, the first call tells."""
        fabric = self._usable()
        client = ByteClient(self.run_id, address, give_up_s=self._give_up_s)
        client.link = fabric.connect(address, client, wire.decode_from_bytes)
        self._start(client, self._peers)
        return client

    def _make_fabric(self) -> Fabric:
        return ZmqFabric(self.security)

    @staticmethod
    async def _bind(fabric: Fabric, text: str, endpoint: Endpoint, max_message_bytes: int, decode: Decode) -> Link:
        """Bind, with a little patience: a closed socket gives its address back a moment later."""
        for _ in range(REBIND_TRIES):
            with contextlib.suppress(AddressInUse):  # the last try, below, tells
                return fabric.bind(text, endpoint, max_message_bytes, decode)
            await asyncio.sleep(REBIND_PAUSE_S)
        return fabric.bind(text, endpoint, max_message_bytes, decode)

    def _usable(self) -> Fabric:
        if self._fabric is None or self._tasks is None:
            raise UsageError("the node is not open; use it inside `async with Node(...)`")
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked after its node was opened, so nothing would arrive; spawn instead"
            )
        return self._fabric

    def _hello(self, stream: str, role: wire.Role, schema: str, digest: str, replica: str | None) -> Hello:
        name = replica or self.replica
        for what, text in (("replica", name), ("run_id", self.run_id), ("stream", stream), ("schema", schema)):
            if len(text) > wire.KEY_LIMIT:
                raise UsageError(
                    f"{what} {text[:40]!r}... has {len(text)} characters, the limit is {wire.KEY_LIMIT}; shorten it"
                )
        return Hello(PROTOCOL, self.run_id, stream, role, name, secrets.token_hex(16), schema, digest)

    def _start(self, port: Port, ports: list[Port]) -> None:
        assert self._tasks is not None
        ports[:] = [earlier for earlier in ports if not earlier.closed]
        ports.append(port)
        self._tasks.create_task(port.link.run(), name=f"link {port.link.address}")

    async def _open(self, port: PeerPort[Any]) -> None:
        self._start(port, self._peers)  # type: ignore[arg-type]
        try:
            await port.opened()
        except BaseException:
            port.shut(0)
            raise

    async def _close_all(self, ports: list[Port], *, blame: bool) -> None:
        await asyncio.gather(*(port.close(blame=blame, timeout_s=self._close_s) for port in ports))
