"""The place of one process on the wire: its ZeroMQ context, its links, their owner tasks, and an orderly end.

Invariants: one node (and one zmq context) per process, or several replicas inside one node; every port is opened inside
`async with` and closed at its end, peers before hubs, within `close_s`; leaving never hangs, also after an error.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import zmq

from transport import wire
from transport.byte_transfer import ByteClient, ByteServer
from transport.codec import Codec
from transport.core.hub import HubCore
from transport.core.peers import ConsumerCore, ProducerCore
from transport.core.topic import ANYBODY, TopicClientCore, TopicServerCore, Writers
from transport.errors import AddressInUse, SecurityError, UsageError
from transport.port import FORKED, CorePort, Decode, Link, PeerPort
from transport.security import KEY_MARK, ZAP_ADDRESS, Address, Security, check_exposure, parse_address, zap_reply
from transport.spec import DeadLetter, StreamSpec
from transport.stream import Hub, Inlet, Outlet
from transport.topic import VALUE_LIMIT, TopicClient, TopicServer
from transport.wire import HEADER_LIMIT, PROTOCOL, Hello
from transport.zmq_link import ZmqLink, new_socket, readable

CONNECT_LIMIT = 1 << 31  # a peer trusts its hub's sizes; the hub limits what peers send


class ZmqFabric:
    """Makes the links of a node in one context; with keys, also the ZAP handler that all servers of the context ask."""

    def __init__(self, security: Security | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = security
        self._links: list[ZmqLink] = []
        self._zap: zmq.Socket[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._poll = self._loop.call_later(1.0, self._safety_poll)

    def bind(self, text: str, endpoint: CorePort, max_message_bytes: int, decode: Decode) -> Link:
        address = parse_address(text)
        check_exposure(address, keys=self._security is not None, binding=True)
        socket = new_socket(self._context, zmq.ROUTER, address, 2 * max_message_bytes + HEADER_LIMIT)
        pair = None
        if self._security is not None and address.scheme == "tcp":
            owns_server_key = self._security.own.public == self._security.server_public
            pair = self._security.own if owns_server_key else self._security.serving
            if pair is None:
                socket.close(0)
                raise SecurityError(
                    f"cannot bind {address}: this node does not own the run's server key, nor one of its own to bind "
                    "with; bind where it is"
                )
            self._start_zap()
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, pair.secret.encode())
            socket.set(zmq.ZAP_DOMAIN, b"sluice")
        link = self._open(ZmqLink(endpoint, socket, decode), address)
        if pair is not None and self._security is not None and pair.public != self._security.server_public:
            link.address += f"{KEY_MARK}{pair.public}"  # its peers cannot know it otherwise
        return link

    def connect(self, text: str, endpoint: CorePort, decode: Decode) -> Link:
        address = parse_address(text)
        check_exposure(address, keys=self._security is not None, binding=False)
        socket = new_socket(self._context, zmq.DEALER, address, CONNECT_LIMIT)
        server_public = None
        if self._security is not None and address.scheme == "tcp":
            server_public = self._security.server_public
            socket.set(zmq.CURVE_PUBLICKEY, self._security.own.public.encode())
            socket.set(zmq.CURVE_SECRETKEY, self._security.own.secret.encode())
        return self._open(ZmqLink(endpoint, socket, decode, server_public), address)

    async def close(self) -> None:
        """Terminate the context in a thread, since it waits for lingering sockets."""
        self._poll.cancel()
        if self._zap is not None:
            self._loop.remove_reader(self._zap.fileno())
            self._zap.close(0)
        for link in self._links:
            link.close(0)
        await self._loop.run_in_executor(None, self._context.term)

    def _open(self, link: ZmqLink, address: Address) -> Link:
        try:
            link.open(address)
        except BaseException:
            link.close(0)
            raise
        self._links = [known for known in self._links if not known.closed]
        self._links.append(link)
        return link

    def _safety_poll(self) -> None:
        for link in self._links:
            if not link.closed:
                link.check()
        if self._zap is not None:
            self._answer_zap(self._zap)
        self._poll = self._loop.call_later(1.0, self._safety_poll)

    def _start_zap(self) -> None:
        if self._zap is None:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind(ZAP_ADDRESS)
            self._loop.add_reader(self._zap.fileno(), self._answer_zap, self._zap)

    def _answer_zap(self, zap: zmq.Socket[bytes]) -> None:
        assert self._security is not None
        while readable(zap):
            late = self._security.admitted is not None
            zap.send_multipart(zap_reply(zap.recv_multipart(), self._security.clients(), retry_unknown=late))


TOPIC = "topic"  # in the place of a stream's name
T = TypeVar("T")
Port = TypeVar("Port", bound=CorePort)
Peer = TypeVar("Peer", bound=PeerPort[Any])
REBIND_TRIES = 20
REBIND_PAUSE_S = 0.02


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
        self.run_id, self.replica, self.security = run_id, replica, security
        self._give_up_s, self._close_s = give_up_s, close_s
        self._fabric: ZmqFabric | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._peers: list[CorePort] = []
        self._hosts: list[CorePort] = []
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
            for ports in (self._peers, self._hosts):
                await asyncio.gather(*(port.close(blame=blame, timeout_s=self._close_s) for port in ports))
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
        hub = Hub(HubCore(spec, self.run_id, secrets.randbits(62)), on_dead_letter)
        return await self._bind(spec.address, hub, spec.max_message_bytes, wire.decode_to_hub)

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
        if window_items < 1 or window_bytes < 1:
            raise UsageError(
                f"window of {window_items} items and {window_bytes} bytes admits nothing; use at least 1 of each"
            )
        codec = Codec(schema)
        hello = self._hello(stream, "consumer", codec.name, codec.hash, replica)
        core = ConsumerCore(hello, window_items, window_bytes, give_up_s=self._give_up_s)
        return await self._open(Inlet(address, stream, core, codec), wire.decode_from_hub)

    async def outlet(self, address: str, stream: str, schema: type[T], *, replica: str | None = None) -> Outlet[T]:
        """Connect a producer and wait for its welcome."""
        codec = Codec(schema)
        hello = self._hello(stream, "producer", codec.name, codec.hash, replica)
        core = ProducerCore(hello, give_up_s=self._give_up_s)
        return await self._open(Outlet(address, stream, core, codec), wire.decode_from_hub)

    async def topic_server(
        self, address: str, private: tuple[str, ...] = (), writers: Writers = ANYBODY
    ) -> TopicServer:
        """Bind the run's topic here. Values below the `private` prefixes are for this process alone; `writers`: which
        stages may write a key, beside this process (see TopicServerCore)."""
        server = TopicServer(TopicServerCore(self.run_id, secrets.randbits(62), private, writers))
        return await self._bind(address, server, VALUE_LIMIT, wire.decode_to_topic)

    async def topic(self, address: str, *, replica: str | None = None) -> TopicClient:
        """Connect to the topic and wait for its snapshot."""
        hello = self._hello(TOPIC, "consumer", "", "", replica)
        client = TopicClient(address, TopicClientCore(hello, give_up_s=self._give_up_s))
        return await self._open(client, wire.decode_from_topic)

    async def byte_server(self, address: str) -> ByteServer:
        """Bind a server of bytes here; it serves nothing yet."""
        return await self._bind(address, ByteServer(self.run_id), 0, wire.decode_to_bytes)

    async def byte_client(self, address: str) -> ByteClient:
        """A client of a byte server. The first call fails if there is none."""
        return self._connect(ByteClient(self.run_id, address, give_up_s=self._give_up_s), wire.decode_from_bytes)

    def _make_fabric(self) -> ZmqFabric:
        return ZmqFabric(self.security)

    async def _bind(self, address: str, host: Port, max_message_bytes: int, decode: Decode) -> Port:
        """Bind and start, with a little patience: a closed socket gives its address back a moment later."""
        fabric = self._usable()
        for again in reversed(range(REBIND_TRIES + 1)):
            try:
                host.link = fabric.bind(address, host, max_message_bytes, decode)
                break
            except AddressInUse:
                if not again:
                    raise
            await asyncio.sleep(REBIND_PAUSE_S)
        host.address = host.link.address
        return self._start(host, self._hosts)

    def _usable(self) -> ZmqFabric:
        if self._fabric is None or self._tasks is None:
            raise UsageError("the node is not open; use it inside `async with Node(...)`")
        if os.getpid() != self._pid:
            raise UsageError(FORKED)
        return self._fabric

    def _hello(self, stream: str, role: wire.Role, schema: str, digest: str, replica: str | None) -> Hello:
        name = replica or self.replica
        for what, text in (("replica", name), ("run_id", self.run_id), ("stream", stream), ("schema", schema)):
            if len(text) > wire.KEY_LIMIT:
                raise UsageError(
                    f"{what} {text[:40]!r}... has {len(text)} characters, the limit is {wire.KEY_LIMIT}; shorten it"
                )
        return Hello(PROTOCOL, self.run_id, stream, role, name, secrets.token_hex(16), schema, digest)

    def _start(self, port: Port, ports: list[CorePort]) -> Port:
        assert self._tasks is not None
        ports[:] = [earlier for earlier in ports if not earlier.closed]
        ports.append(port)
        self._tasks.create_task(port.link.run(), name=f"link {port.link.address}")
        return port

    def _connect(self, port: Port, decode: Decode) -> Port:
        port.link = self._usable().connect(port.address, port, decode)
        return self._start(port, self._peers)

    async def _open(self, port: Peer, decode: Decode) -> Peer:
        self._connect(port, decode)
        try:
            await port.opened()
        except BaseException:
            port.shut(0)
            raise
        return port
