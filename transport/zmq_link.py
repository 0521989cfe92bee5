"""Links over ZeroMQ: ROUTER where a hub binds, DEALER where a peer connects.

Invariants:
- The descriptor of a zmq socket is edge-triggered, so after one wake-up everything is read until nothing is left, and
  after sending the socket is polled again, for a send takes the edge away, and a poll that of a connection that came
  meanwhile. A step in which neither happened does not poll. A safety poll each second counts wake-ups that were missed
  (it must stay 0).
- Routing ids are left to the ROUTER, new for each connection: a peer that reconnects can never be refused for an id
  that its broken connection still holds. Who a peer is, its HELLO says.
- Where keys are required, the replica in a peer's HELLO has the name of its key.
- ROUTER_MANDATORY shows a peer that has gone; IMMEDIATE keeps messages from queueing for a connection that never was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections import deque
from typing import Any, cast

import msgspec
import zmq
import zmq.utils.monitor

from transport.errors import AddressInvalid
from transport.port import CorePort, Decode, Link
from transport.security import BESIDE, SERVER, Address, in_use, prepare_ipc
from transport.wire import FRAMES_LIMIT, HEADER_LIMIT, AnyMessage, Body, Hello, Put, Puts, Work, Works, encode

COPY_BELOW = 64 << 10  # bytes; smaller bodies are cheaper to copy than to track
MESSAGE_FUSE = 100_000  # high-water mark: never reached while credit is respected
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 6000
HANDSHAKE_MS = 5000
SEND_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)  # combining the enums at each send would cost as much as the send
NOBLOCK = int(zmq.NOBLOCK)
POLLIN = int(zmq.POLLIN)
POLLOUT = int(zmq.POLLOUT)
BODIES = (Put, Puts, Work, Works)
MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: Address, max_message_bytes: int
) -> zmq.Socket[bytes]:
    """The one place where socket options are set, keys excepted."""
    socket = context.socket(kind)
    if ":" in address.place:  # otherwise IPv4 interfaces would be reported as mapped IPv6 addresses
        socket.set(zmq.IPV6, 1)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, MESSAGE_FUSE)
    socket.set(zmq.RCVHWM, MESSAGE_FUSE)
    socket.set(zmq.MAXMSGSIZE, max_message_bytes)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    if kind == zmq.ROUTER:
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.BACKLOG, 1024)
    else:
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether something can be read. Asking also resets the descriptor."""
    return bool(cast(int, socket.get(zmq.EVENTS)) & POLLIN)


class ZmqLink(Link):
    """A ROUTER (routes are its peers) or a DEALER (the route is ignored)."""

    def __init__(
        self, endpoint: CorePort, socket: zmq.Socket[bytes], decode: Decode, server_public: str | None = None
    ) -> None:
        """`server_public`: the expected key where an address names none; None: keys are not used."""
        super().__init__(endpoint)
        self.late_wakeups = 0  # arrivals that only the safety poll found; must stay 0
        self._server_public = server_public
        self._socket = socket
        self._router = socket.socket_type == zmq.ROUTER
        self._decode = decode
        self._guarded = self._router and bool(socket.get(zmq.CURVE_SERVER))
        self._most_bytes = cast(int, socket.get(zmq.MAXMSGSIZE))  # libzmq bounds each frame, this their sum
        self._unsent: deque[tuple[AnyMessage, Body]] = deque()
        self._monitor: zmq.Socket[bytes] | None = None
        self._arrived = self._reported = True  # whether the descriptors of socket and monitor were readable
        self._sent = False  # since the socket was last polled
        self._loop = asyncio.get_running_loop()

    def open(self, address: Address) -> None:
        """Bind or connect, and let the loop watch the descriptors."""
        if address.scheme != "inproc":  # inproc connections neither break nor report
            self._monitor = self._socket.get_monitor_socket(MONITORED)
            self._loop.add_reader(self._monitor.fileno(), self._on_report)
        if self._router:
            self._bind(address)
        else:
            self._connect(address)
        self._loop.add_reader(self._socket.fileno(), self._on_arrival)
        self.wake()

    def send(self, route: bytes, message: AnyMessage, body: Body = None) -> bool:
        if self._router:
            return self._send_routed(route, message, body)
        self._unsent.append((message, body))
        self._send_queued()
        return True

    def discard_unsent(self) -> None:
        self._unsent.clear()

    def check(self) -> None:
        """The safety poll: find what no wake-up announced, and count it."""
        if self._awake.is_set() or self._announced():
            return
        self._sent = True
        late = self._pending()
        if self._monitor is not None and readable(self._monitor):
            late = self._reported = True
        if late:
            self.late_wakeups += 1
            self.wake()

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def close(self, linger_ms: int) -> None:
        if self._socket.closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(linger_ms)

    def _connect(self, address: Address) -> None:
        if self._server_public is not None and address.scheme == "tcp":
            self._socket.set(zmq.CURVE_SERVERKEY, (address.key or self._server_public).encode())
        self._socket.connect(str(address))
        self.address = str(address)

    def _bind(self, address: Address) -> None:
        place = f"{str(address).removesuffix(':0')}:*" if address.scheme == "tcp" and not address.port else str(address)
        umask = -1
        if address.scheme == "ipc":
            prepare_ipc(address)
            umask = os.umask(0o077)
        try:
            self._socket.bind(place)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise in_use(address) from error
            raise AddressInvalid(
                f"cannot bind {address}: {error}; check that the interface or directory exists"
            ) from error
        finally:
            if umask >= 0:
                os.umask(umask)
        self.address = cast(bytes, self._socket.last_endpoint).decode() if address.scheme == "tcp" else str(address)

    def _take(self, limit: int) -> int:
        if self._monitor is not None and self._reported:
            self._reported = False
            self._take_events(self._monitor)
        self._send_queued()
        if not self._arrived:
            return 0
        self._arrived = False
        receive = self._socket.recv
        taken = 0
        while taken < limit:
            if not readable(self._socket):
                return taken
            try:  # a frame says whether another follows: to ask the socket costs more than the rest
                first = receive(NOBLOCK, copy=False)
            except zmq.Again:  # it broke off just now
                return taken
            taken += self._hand_over(*((first.bytes, receive(copy=False)) if self._router else (b"", first)))
        self._arrived = True
        return taken

    def _hand_over(self, route: bytes, frame: zmq.Frame) -> int:
        """How many messages it was."""
        header = frame.bytes
        key = cast(str, frame.get("User-Id")) if self._guarded else SERVER  # the name of the peer's key
        message: AnyMessage | None = None
        if len(header) <= HEADER_LIMIT:
            # Bad UTF-8 is a ValueError and deep nesting a RecursionError, neither is a MsgspecError.
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
                message = self._decode(header)
        body = self._take_body() if frame.more else None
        if body == () or (isinstance(body, tuple) and not isinstance(message, BODIES)):
            message, body = None, None  # more than a message may have; nothing else carries several frames
        if isinstance(message, Hello) and key != SERVER and message.replica not in key.split(BESIDE):
            message = None  # it takes another's name
        if message is None:
            self.endpoint.on_malformed(route, header)
        else:
            self.endpoint.on_message(route, message, body)
        return max(1, len(message.parts)) if isinstance(message, Puts | Works) else 1

    def _take_body(self) -> Body:
        """The frames behind the header; an empty tuple if they are more, or larger, than those of a message may be.
        They are read to the end in any case: the next message begins behind them."""
        frames: list[bytes | zmq.Frame] = []
        count, left, more = 0, self._most_bytes, True
        while more:
            frame = self._socket.recv(copy=False)
            more = frame.more
            count, left = count + 1, left - len(frame)
            if count > FRAMES_LIMIT or left < 0:
                frames = []
            else:
                frames.append(frame.bytes if len(frame) < COPY_BELOW else frame)
        if count > FRAMES_LIMIT or left < 0:
            return ()
        return tuple(frames) if count > 1 else frames[0] if frames else None

    def _take_events(self, monitor: zmq.Socket[bytes]) -> None:
        while readable(monitor):
            event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.endpoint.on_link_up()
            elif event == zmq.EVENT_DISCONNECTED:
                self.endpoint.on_link_down()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.endpoint.on_link_refused("its allow-list does not contain this node's key")

    def _on_arrival(self) -> None:
        self._arrived = True
        self.wake()

    def _on_report(self) -> None:
        self._reported = True
        self.wake()

    def _pending(self) -> bool:
        if not self._sent or self._socket.closed:
            return False
        self._sent = False
        events = cast(int, self._socket.get(zmq.EVENTS))
        self._arrived = self._arrived or bool(events & POLLIN)
        # The connection may have come between the attempt to send and this poll, which takes its edge away.
        return self._arrived or bool(self._unsent and events & POLLOUT)

    def _announced(self) -> bool:
        """Whether a descriptor is readable, so that the loop is about to wake the owner task by itself."""
        poller = select.poll()
        for socket in (self._socket, self._monitor):
            if socket is not None:
                poller.register(socket.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def _send_routed(self, route: bytes, message: AnyMessage, body: Body) -> bool:
        self._sent = True
        try:
            self._socket.send(route, SEND_MORE)
        except zmq.ZMQError as error:
            # Unreachable: it has gone. Full: it ignores its credit or does not read, which is no better.
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        self._send_frames(message, body)
        return True

    def _send_queued(self) -> None:
        while self._unsent:
            try:
                self._send_frames(*self._unsent[0])
            except zmq.Again:
                return  # not connected; the descriptor or the monitor will tell
            self._unsent.popleft()

    def _send_frames(self, message: AnyMessage, body: Any) -> None:
        self._sent = True
        if body is None:
            self._socket.send(encode(message), NOBLOCK)
        else:
            self._socket.send(encode(message), SEND_MORE)
            frames = body if isinstance(body, tuple) else (body,)
            for place, frame in enumerate(frames, 1):
                cheap = not isinstance(frame, zmq.Frame) and len(frame) < COPY_BELOW
                self._socket.send(frame, SEND_MORE if place < len(frames) else NOBLOCK, copy=cheap)
