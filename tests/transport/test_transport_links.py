"""Links: cut connections are repaired by the protocol, and an idle step costs no system call."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from typing import Any

import pytest
import zmq

from tests.transport.conformance_net import take_one, until
from transport import DeadLetter, Node, StreamSpec
from transport.zmq_link import ZmqLink


class Proxy:
    """Forwards tcp connections to one port, and can cut them all or hold everything back."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: list[asyncio.StreamWriter] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.cuts = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset every connection: what the proxy holds is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self.cuts += len(self._writers)
        self._writers.clear()

    def hold(self) -> None:
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    async def stop(self) -> None:
        self.release()
        self.cut()
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # either side may go at any time
            hub_reader, hub_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers += [writer, hub_writer]
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, hub_writer))
                group.create_task(self._pump(hub_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy one direction. Unblocked by data and by the end of the connection."""
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            writer.close()


async def test_cut_connections_lose_and_repeat_nothing() -> None:
    letters: list[DeadLetter] = []
    async with asyncio.timeout(60), Node("run", "main") as node:
        hub = await node.hub(StreamSpec("s", "tcp://127.0.0.1:0", lease_s=30.0), letters.append)
        proxy = Proxy(int(hub.address.rpartition(":")[2]))
        address = await proxy.start()
        outlet = await node.outlet(address, "s", bytes)
        inlet = await node.inlet(address, "s", bytes)
        got: Counter[str] = Counter()

        async def produce() -> None:
            for number in range(300):
                await outlet.send(b"x" * 5000, str(number))

        async def consume() -> None:
            """Take and finish. Unblocked by END."""
            while (lease := await inlet.receive()) is not None:
                await asyncio.sleep(0.001)
                got[lease.key] += 1
                lease.done()

        async def vandal() -> None:
            for _ in range(5):
                await asyncio.sleep(0.1)
                proxy.cut()

        async with asyncio.TaskGroup() as group:
            group.create_task(consume())
            group.create_task(vandal())
            await group.create_task(produce())
            hub.finish()
        stats = hub.stats()
        await proxy.stop()
    assert set(got) == {str(number) for number in range(300)}
    assert (stats.accepted, stats.settled) == (300, 300)
    assert proxy.cuts >= 4
    assert letters == []


async def test_a_topic_survives_a_cut() -> None:
    async with asyncio.timeout(30), Node("run", "main") as node:
        server = await node.topic_server("tcp://127.0.0.1:0")
        proxy = Proxy(int(server.address.rpartition(":")[2]))
        client = await node.topic(await proxy.start())
        await client.publish("a", b"1")
        proxy.hold()
        server.publish("b", b"2")
        server.drop("a")
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(client.publish("c", b"3"))
            await asyncio.sleep(0.05)
            assert not publishing.done()
            proxy.cut()
            proxy.release()
            while client.items("") != {"b": b"2", "c": b"3"}:
                await client.wait(client.revision)
        assert server.items("") == {"b": b"2", "c": b"3"}
        await proxy.stop()


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
