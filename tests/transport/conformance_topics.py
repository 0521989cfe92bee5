"""What a topic and a byte transfer promise, as tests for any kind of link."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.transport.memory_link import Net, until
from transport.byte_transfer import CHUNKS_IN_FLIGHT, ByteClient, ByteServer
from transport.errors import BlobGone, DecodeError, LinkLost
from transport.node import Node
from transport.port import body_buffer
from transport.wire import AnyMessage, Body


class TopicConformance:
    """What a topic promises."""

    async def test_values_reach_everybody_and_late_joiners_but_for_private_ones(self, net: Net) -> None:
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"), private=("stats/",))
            one = await node.topic(server.address, replica="one")
            two = await node.topic(server.address, replica="two")
            async with asyncio.TaskGroup() as group:
                local = group.create_task(server.wait(server.revision, "stats/"))
                await asyncio.sleep(0)
                await one.publish("stats/one", b"1")
                assert await local == server.revision
            await one.publish("weights", b"1")
            await one.publish("applied/a", b"x")
            assert server.get("weights") == b"1"
            while two.get("applied/a") is None:
                await two.wait(two.revision)
            assert two.items("applied/") == {"applied/a": b"x"}
            server.publish("weights", b"2")
            server.publish("empty", b"")
            while one.get("empty") is None:
                await one.wait(one.revision)
            late = await node.topic(server.address, replica="late")
            shared = {"weights": b"2", "applied/a": b"x", "empty": b""}
            assert one.items("") == late.items("") == shared
            assert await late.wait(0) == late.revision > 0
            assert server.items("stats/") == {"stats/one": b"1"}
            for key in ("weights", "absent", "stats/one"):
                server.drop(key)
            while late.get("weights") is not None:
                await late.wait(late.revision)
            assert late.items("") == server.items("") == {"applied/a": b"x", "empty": b""}

    async def test_clients_survive_a_new_server(self, net: Net) -> None:
        if not net.rebinds:
            pytest.skip("these links do not reconnect")
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"))
            client = await node.topic(server.address)
            await client.publish("old", b"1")
            address, before = server.address, client.revision
            await server.close()
            again = await node.topic_server(address)
            again.publish("new", b"2")
            while client.get("new") is None:
                await client.wait(client.revision)
            assert client.revision > before
            assert client.items("") == {"new": b"2"}
            await client.publish("more", b"3")
            assert again.get("more") == b"3"

    async def test_a_change_wakes_those_alone_who_read_the_key(self, net: Net) -> None:
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"))
            client = await node.topic(server.address)
            for end in (server, client):
                start = end.revision
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await end.wait(start)
                async with asyncio.TaskGroup() as group:
                    readers = [group.create_task(end.wait(start, "weights", "device/")) for _ in range(2)]
                    other = group.create_task(end.wait(start, "drain"))
                    await asyncio.sleep(0)
                    for key in ("weight", "device", "eval/released", "device/a"):
                        assert not any(reader.done() for reader in readers)
                        server.publish(key, b"1")
                        while client.get(key) is None:
                            await client.wait(client.revision)
                    assert [await reader for reader in readers] == [end.revision] * 2
                    assert not other.done()
                    server.publish("drain", b"now")
                    assert await other == end.revision
                before = end.revision
                server.drop("drain")  # those who read a key learn that it is gone
                assert await end.wait(before, "drain") > before
                for key in ("weight", "device", "eval/released", "device/a"):
                    server.drop(key)
                while client.items(""):
                    await client.wait(client.revision)


# Byte transfer.

CHUNK = 100_000  # bodies above the zero-copy threshold
DATA = random.Random(0).randbytes(2_345_678)
CHUNKS = -(-len(DATA) // CHUNK)


class Copy:
    """A file that a blob is fetched into."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "copy"
        self.path.write_bytes(b"before")

    async def fetch(self, client: ByteClient, name: str) -> None:
        handle = os.open(self.path, os.O_RDWR)
        try:
            await client.fetch(await client.stat(name), handle)
        finally:
            os.close(handle)

    @property
    def content(self) -> bytes:
        return self.path.read_bytes()


def hold_back(server: ByteServer, after: int) -> list[tuple[bytes, AnyMessage]]:
    """From now on the server answers so many asks; those after them are in the list."""
    answer, held = server.on_message, list[tuple[bytes, AnyMessage]]()

    def on_message(route: bytes, message: AnyMessage, body: Body) -> None:
        if server.chunks < after:
            answer(route, message, body)
        else:
            held.append((route, message))

    server.on_message = on_message  # type: ignore[method-assign]
    return held


@asynccontextmanager
async def connected(net: Net) -> AsyncIterator[tuple[Node, ByteServer, ByteClient]]:
    async with net.node() as node:
        server = await node.byte_server(net.address("bytes"))
        yield node, server, await node.byte_client(server.address)


class ByteConformance:
    """What a byte transfer promises."""

    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Chunks are counted here, so none may be asked for twice because the machine is busy."""
        monkeypatch.setattr("transport.byte_transfer.RETRY_S", 5.0)
        monkeypatch.setattr("transport.byte_transfer.CHUNK_BYTES", CHUNK)

    @pytest.fixture
    def blob(self, tmp_path: Path) -> Path:
        (tmp_path / "blob").write_bytes(DATA)
        return tmp_path / "blob"

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Copy:
        return Copy(tmp_path)

    async def test_files_arrive_where_they_shall_lie(self, net: Net, tmp_path: Path, blob: Path, copy: Copy) -> None:
        (tmp_path / "none").write_bytes(b"")
        async with connected(net) as (_, server, client):
            served = [server.serve("file", blob), server.serve("none", tmp_path / "none")]
            assert [await client.stat(one.name) for one in served] == served
            answer, most = server.on_message, 0

            def counted(*arguments: object) -> None:
                nonlocal most
                most = max(most, len(client._asked))
                answer(*arguments)  # type: ignore[arg-type]

            server.on_message = counted  # type: ignore[assignment,method-assign]
            await copy.fetch(client, "none")
            assert copy.content == b"before"
            await copy.fetch(client, "file")
            assert copy.content == DATA
            assert server.chunks == CHUNKS
            assert most <= CHUNKS_IN_FLIGHT, "few are under way at a time"

    async def test_what_is_not_served_is_named(self, net: Net, blob: Path, copy: Copy) -> None:
        async with connected(net) as (_, server, client):
            with pytest.raises(BlobGone, match="no blob 'x' is served here"):
                await client.stat("x")
            first = server.serve("x", blob)
            assert server.serve("x", blob).generation != first.generation
            with (
                copy.path.open("rb+") as file,
                pytest.raises(BlobGone, match="'x' was served anew since this transfer began; begin again"),
            ):
                await client.fetch(first, file.fileno())
            assert copy.content == b"before"

    async def test_a_damaged_chunk_is_noticed_and_requested_again(self, net: Net, blob: Path, copy: Copy) -> None:
        async with connected(net) as (_, server, client):
            server.serve("a", blob)
            arrived, damages = client.on_message, 0

            def damaged(route: bytes, message: AnyMessage, body: Body) -> None:
                nonlocal damages
                if body and damages < limit and server.chunks > 3:  # a bit falls over on the way
                    damages += 1
                    data = bytes(body_buffer(body))
                    body = bytes([data[0] ^ 1]) + data[1:]
                arrived(route, message, body)

            client.on_message = damaged  # type: ignore[method-assign]
            limit = 2
            await copy.fetch(client, "a")
            assert (damages, copy.content) == (2, DATA)
            assert server.chunks == CHUNKS + 2
            limit = 1 << 30
            with pytest.raises(DecodeError, match="were damaged 3 times on their way; check that nothing writes"):
                await copy.fetch(client, "a")
            assert copy.content == DATA, "what was damaged is not written"

    async def test_a_server_that_goes_is_noticed_and_its_successor_is_used(
        self, net: Net, blob: Path, copy: Copy
    ) -> None:
        async with connected(net) as (node, server, client):
            client.give_up_s = 0.3
            server.serve("a", blob)
            held = hold_back(server, after=5)

            async def lost() -> None:
                with pytest.raises(LinkLost, match=r"silent for give_up_s=0\.3 while 'a' was fetched; fetch it again"):
                    await copy.fetch(client, "a")

            async with asyncio.TaskGroup() as group:
                group.create_task(lost())
                await until(lambda: len(held) == CHUNKS_IN_FLIGHT)
                await server.close()
            assert copy.content != DATA
            other = await node.byte_server(net.address("other"))
            other.serve("a", blob)
            await copy.fetch(await node.byte_client(other.address), "a")
            assert copy.content == DATA

    async def test_a_server_that_comes_back_is_no_successor_of_itself(self, net: Net, blob: Path, copy: Copy) -> None:
        if not net.rebinds:
            pytest.skip("these links do not reconnect")
        async with connected(net) as (node, server, client):
            server.serve("a", blob)
            held = hold_back(server, after=5)

            async def gone() -> None:
                with pytest.raises(BlobGone, match="'a' was served anew since this transfer began"):
                    await copy.fetch(client, "a")

            async with asyncio.TaskGroup() as group:
                group.create_task(gone())
                await until(lambda: len(held) == CHUNKS_IN_FLIGHT)
                await server.close()
                (await node.byte_server(server.address)).serve("a", blob)
            await copy.fetch(client, "a")
            assert copy.content == DATA

    async def test_nothing_is_written_after_a_cancelled_fetch(self, net: Net, blob: Path, copy: Copy) -> None:
        async with connected(net) as (_, server, client):
            served = server.serve("a", blob)
            copy.path.write_bytes(bytes(len(DATA)))
            answer, held = server.on_message, hold_back(server, after=5)
            async with asyncio.TaskGroup() as group:
                fetching = group.create_task(copy.fetch(client, "a"))
                await until(lambda: len(held) == CHUNKS_IN_FLIGHT)
                fetching.cancel()
            for route, message in held:  # late answers
                answer(route, message, None)
            server.on_message = answer  # type: ignore[method-assign]
            assert await client.stat("a") == served  # comes after them
            assert copy.content == DATA[: 5 * CHUNK] + bytes(len(DATA) - 5 * CHUNK)
            await copy.fetch(client, "a")
            assert copy.content == DATA
