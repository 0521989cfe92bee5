"""All ZeroMQ links of a node: one context, and with keys the handler that admits clients."""

from __future__ import annotations

import asyncio

import zmq

from transport.errors import SecurityError
from transport.links import address as addresses
from transport.links.address import Address
from transport.links.link import Decode, Endpoint, Link
from transport.links.security import ZAP_ADDRESS, Security, zap_reply
from transport.links.zmq_link import ZmqLink, new_socket, readable
from transport.wire import HEADER_LIMIT

CONNECT_LIMIT = 1 << 31  # a peer trusts its hub's sizes; the hub limits what peers send


class ZmqFabric:
    """One context and its links; with keys, also the ZAP handler that all servers of the context ask."""

    def __init__(self, security: Security | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = security
        self._links: list[ZmqLink] = []
        self._zap: zmq.Socket[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._poll = self._loop.call_later(1.0, self._safety_poll)

    def bind(self, text: str, endpoint: Endpoint, max_message_bytes: int, decode: Decode) -> Link:
        address = addresses.parse(text)
        addresses.check_exposure(address, keys=self._security is not None, binding=True)
        socket = new_socket(self._context, zmq.ROUTER, address, 2 * max_message_bytes + HEADER_LIMIT)
        pair = None
        if self._security is not None and address.scheme == "tcp":
            pair = self._security.binds_with
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
            link.address += f"{addresses.KEY_MARK}{pair.public}"  # its peers cannot know it otherwise
        return link

    def connect(self, text: str, endpoint: Endpoint, decode: Decode) -> Link:
        address = addresses.parse(text)
        addresses.check_exposure(address, keys=self._security is not None, binding=False)
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
