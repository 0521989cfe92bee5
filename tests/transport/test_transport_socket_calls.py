"""What a link asks of its socket: each question costs a system call or two, at every step of every port of a run."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import pytest
import zmq

from tests.transport.conformance_net import take_one, until
from transport import Node, StreamSpec
from transport.links.zmq_link import ZmqLink

STEPS = 200


class Counted:
    """A socket, and how often it was asked whether it has something, or read in vain."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket, self.asked, self.in_vain = socket, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)

    def get(self, option: int) -> Any:
        self.asked += option == zmq.EVENTS
        return self.socket.get(option)

    def recv(self, *args: Any, **options: Any) -> Any:
        try:
            return self.socket.recv(*args, **options)
        except zmq.Again:
            self.in_vain += 1
            raise


async def test_a_step_without_news_asks_the_socket_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage wakes its links for its own sake, as with each message that it finishes. Beats are a question each."""
    links: list[ZmqLink] = []
    original = ZmqLink.__init__

    def made(link: ZmqLink, endpoint: Any, socket: Any, *rest: Any) -> None:
        original(link, endpoint, Counted(socket), *rest)  # type: ignore[arg-type]
        links.append(link)

    monkeypatch.setattr(ZmqLink, "__init__", made)
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        async with asyncio.timeout(60), Node("run", "node") as node:
            hub = await node.hub(StreamSpec("s", f"ipc://{directory}/s"), lambda letter: None)
            outlet = await node.outlet(hub.address, "s", bytes, replica="sender")
            inlet = await node.inlet(hub.address, "s", bytes, replica="taker")
            for number in range(20):
                await outlet.send(b"x", str(number))
                lease = await take_one(inlet)
                lease.done()
            await until(lambda: hub.stats().settled == 20)
            sockets = [link._socket for link in links]
            before = [socket.asked for socket in sockets]  # type: ignore[attr-defined]
            for _ in range(STEPS):
                for link in links:
                    link.wake()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            asked = [socket.asked - n for socket, n in zip(sockets, before, strict=True)]  # type: ignore[attr-defined]
            assert len(links) == 3
            assert max(asked) < STEPS // 4, "only what it sent or was told of"
            assert [socket.in_vain for socket in sockets] == [0, 0, 0]  # type: ignore[attr-defined]
            assert [link.late_wakeups for link in links] == [0, 0, 0]
