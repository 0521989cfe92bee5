"""Links: the conformance suite on every kind, cut connections, idle steps, and keys of processes that bind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.transport.conformance_streams import ContentConformance, DepartureConformance, StreamConformance
from tests.transport.conformance_topics import ByteConformance, TopicConformance
from tests.transport.memory_link import MemoryNetwork, MemoryNode, Net, ignore, take_one, until
from transport import DeadLetter, Node, StreamSpec, zmq_link
from transport.core import session
from transport.errors import LinkLost, LinkRefused
from transport.security import (
    KEY_MARK,
    SERVER,
    Security,
    add_client,
    create_keys,
    load_security,
    parse_address,
    with_serving_key,
)
from transport.zmq_link import ZmqLink


class PortConformance(StreamConformance, DepartureConformance, ContentConformance, TopicConformance, ByteConformance):
    """Everything. The subclass gives the fixture `net`."""


class TestMemory(PortConformance):
    @pytest.fixture
    def net(self) -> Net:
        network = MemoryNetwork()
        return Net(lambda: MemoryNode("run", "node", network), lambda name: name)


class TestInproc(PortConformance):
    @pytest.fixture
    def net(self) -> Net:
        numbers = itertools.count()
        return Net(lambda: Node("run", "node"), lambda name: f"inproc://{name}{next(numbers)}", rebinds=False)


class TestIpc(PortConformance):
    @pytest.fixture
    def net(self, run_dir: Path) -> Net:
        return Net(lambda: Node("run", "node"), lambda name: f"ipc://{run_dir}/{name}")


class TestTcp(PortConformance):
    @pytest.fixture
    def net(self) -> Net:
        return Net(lambda: Node("run", "node"), lambda name: "tcp://127.0.0.1:0")


class TestCurve(PortConformance):
    @pytest.fixture
    def net(self, run_dir: Path) -> Net:
        create_keys(run_dir / "keys", [])
        security = load_security(run_dir / "keys")
        return Net(lambda: Node("run", "node", security), lambda name: "tcp://127.0.0.1:0")


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
            for number in range(300):
                await outlet.send(b"x" * 5000, str(number))
            hub.finish()
        stats = hub.stats()
        await proxy.stop()
    assert set(got) == {str(number) for number in range(300)}
    assert (stats.accepted, stats.settled) == (300, 300)
    assert proxy.cuts >= 4
    assert letters == []


async def test_a_topic_survives_a_cut() -> None:
    async with asyncio.timeout(120), Node("run", "main") as node:
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


async def test_a_step_without_news_asks_the_socket_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage wakes its links for its own sake, as with each message that it finishes. Beats are a question each."""
    links: list[ZmqLink] = []
    original = ZmqLink.__init__

    def made(link: ZmqLink, endpoint: Any, socket: Any, *rest: Any) -> None:
        original(link, endpoint, Counted(socket), *rest)  # type: ignore[arg-type]
        links.append(link)

    monkeypatch.setattr(ZmqLink, "__init__", made)
    async with asyncio.timeout(60), Node("run", "node") as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), ignore)
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
        requested = [socket.asked - n for socket, n in zip(sockets, before, strict=True)]  # type: ignore[attr-defined]
        assert len(links) == 3
        assert max(requested) < STEPS // 4, "only what it sent or was told of"
        assert [socket.in_vain for socket in sockets] == [0, 0, 0]  # type: ignore[attr-defined]
        assert [link.late_wakeups for link in links] == [0, 0, 0]


class Late(Counted):
    """A socket whose connection comes when all wake-ups that tell of it are spent, between an attempt and its poll."""

    attempts = 0

    def send(self, *args: Any, **options: Any) -> Any:
        if self.socket.socket_type == zmq.DEALER and self.attempts < 10:  # no two wake-ups tell of it, let alone ten
            self.attempts += 1
            while not self.socket.get(zmq.EVENTS) & zmq.POLLOUT:
                time.sleep(0.001)
            raise zmq.Again
        return self.socket.send(*args, **options)


async def test_a_hello_is_sent_as_soon_as_it_can_be(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the second attempt, a second later, at each link of a process that starts."""
    original = ZmqLink.__init__

    def made(link: ZmqLink, endpoint: Any, socket: Any, *rest: Any) -> None:
        original(link, endpoint, Late(socket), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ZmqLink, "__init__", made)
    monkeypatch.setattr(session, "HELLO_RETRY_S", 3600.0)
    async with asyncio.timeout(20), Node("run", "node") as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), ignore)
        await node.outlet(hub.address, "s", bytes, replica="sender")


class Keys:
    """Of a run: the server key, and client keys by name; the hub admits some of them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        create_keys(place / "server", [])
        self.server = load_security(place / "server")
        self.admitted = {self.server.server_public: SERVER}

    def client(self, name: str, *, admitted: bool = True) -> Security:
        public = add_client(self.place / "server", name, self.place / name)
        if admitted:
            self.admitted[public] = name
        return load_security(self.place / name, name)

    def hub(self, name: str) -> Security:
        return with_serving_key(self.client(name), lambda: self.admitted)


@pytest.fixture
def keys(run_dir: Path) -> Keys:
    return Keys(run_dir)


def spec() -> StreamSpec:
    stages = {"producers": frozenset({"generate", "prompts"}), "consumers": frozenset({"reward"})}
    return StreamSpec("s", "tcp://127.0.0.1:0", **stages)


async def test_a_listed_peer_may_connect_in_its_role_and_no_other(keys: Keys) -> None:
    async with asyncio.timeout(120), Node("run", "hub-0", keys.hub("hub-0")) as node:
        hub = await node.hub(spec(), ignore)
        key = parse_address(hub.address).key
        assert key == parse_address((await node.hub(spec(), ignore)).address).key, "of the process, in its addresses"
        assert key not in {load_security(keys.place / "hub-0", "hub-0").own.public, keys.server.server_public}
        assert not any(key in path.read_text() for path in keys.place.rglob("*.*"))
        for replica, security, name in (
            ("generate-0", keys.client("generate-0"), None), ("controller", keys.server, "prompts-0"),
        ):  # fmt: skip
            async with Node("run", replica, security) as sender:
                await (await sender.outlet(hub.address, "s", bytes, replica=name)).send(b"x", replica)
        async with Node("run", "reward-0", keys.client("reward-0")) as taker:
            assert await (await taker.inlet(hub.address, "s", bytes)).receive() is not None
            with pytest.raises(LinkRefused, match="'reward-0' is no producer of stream 's'"):
                await taker.outlet(hub.address, "s", bytes)
        create_keys(keys.place / "made", ["reward-0"])  # a stranger's own
        made = load_security(keys.place / "made", "reward-0")
        for stranger in (Security(made.own, keys.server.server_public), None):
            async with Node("run", "reward-0", stranger, give_up_s=0.3) as intruder:
                with pytest.raises(LinkLost):
                    await intruder.inlet(hub.address, "s", bytes)
        assert hub.stats().accepted == 2


async def test_a_process_that_is_announced_late_is_not_refused(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_link, "HANDSHAKE_MS", 200)  # after which it tries again
    async with asyncio.timeout(120), Node("run", "hub-0", keys.hub("hub-0")) as node, asyncio.TaskGroup() as tasks:
        requested = asyncio.Event()
        admitted = keys.admitted

        class Admitted(dict[str, str]):
            def get(self, key: str, default: str = "") -> str:  # type: ignore[override]
                requested.set()
                return admitted.get(key, default)

        keys.admitted = Admitted()
        hub = await node.hub(spec(), ignore)
        late = keys.client("generate-1", admitted=False)
        async with Node("run", "generate-1", late) as sender:
            opening = tasks.create_task(sender.outlet(hub.address, "s", bytes))
            await requested.wait()
            admitted[late.own.public] = "generate-1"
            await (await opening).send(b"x", "1")
        assert hub.stats().accepted == 1


async def test_peers_connect_to_no_impostor(keys: Keys) -> None:
    own = keys.client("generate-0")
    async with asyncio.timeout(120):
        async with Node("run", "hub-0", keys.hub("hub-0")) as node:
            address = (await node.hub(spec(), ignore)).address
        async with Node("run", "hub-1", keys.hub("hub-1")) as node:
            hub = await node.hub(spec(), ignore)
            impostor = hub.address.partition(KEY_MARK)[0]  # it cannot prove that it owns the key that is asked for
            for key in (f"{KEY_MARK}{parse_address(address).key}", ""):
                async with Node("run", "generate-0", own, give_up_s=0.3) as deceived:
                    with pytest.raises(LinkLost, match="heard nothing"):
                        await deceived.outlet(impostor + key, "s", bytes)
