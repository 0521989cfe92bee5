"""What a topic and a byte transfer promise, as tests for any kind of link."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.transport.memory_link import Net, until
from transport.byte_transfer import ByteClient, ByteServer
from transport.core.byte_transfer import CHUNKS_IN_FLIGHT, Blob, Transfer
from transport.errors import BlobGone, DecodeError, LinkLost, UsageError
from transport.node import Node
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


def room(blob: Blob) -> tuple[bytearray, Transfer]:
    buffer = bytearray(blob.size)
    return buffer, Transfer(blob, memoryview(buffer), chunk_bytes=CHUNK)


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
        monkeypatch.setattr("transport.core.byte_transfer.RETRY_S", 5.0)

    async def test_buffers_and_files_arrive_where_they_shall_lie(self, net: Net, tmp_path: Path) -> None:
        (tmp_path / "blob").write_bytes(DATA)
        (tmp_path / "copy").write_bytes(b"before")
        async with connected(net) as (_, server, client):
            served = [server.serve("file", tmp_path / "blob"), server.serve("buffer", DATA), server.serve("none", b"")]
            blobs = [await client.stat(blob.name) for blob in served]
            assert blobs == served
            buffer, transfer = room(blobs[0])
            answer, most = server.on_message, 0

            def counted(*arguments: object) -> None:
                nonlocal most
                most = max(most, CHUNKS - len(transfer.missing) - server.chunks)
                answer(*arguments)  # type: ignore[arg-type]

            server.on_message = counted  # type: ignore[assignment,method-assign]
            await client.fetch(transfer)
            assert buffer == DATA
            assert not transfer.missing
            assert server.chunks == CHUNKS
            assert most <= CHUNKS_IN_FLIGHT, "few are under way at a time"
            with (tmp_path / "copy").open("rb+") as file:
                await asyncio.gather(
                    client.fetch(Transfer(blobs[1], file.fileno(), at=6)),
                    client.fetch(Transfer(blobs[2], memoryview(bytearray()))),
                )
            assert (tmp_path / "copy").read_bytes() == b"before" + DATA

    async def test_what_is_not_served_is_named(self, net: Net) -> None:
        async with connected(net) as (_, server, client):
            with pytest.raises(BlobGone, match="no blob 'x' is served here"):
                await client.stat("x")
            blob = server.serve("x", b"first")
            buffer, transfer = room(blob)
            assert server.serve("x", b"other").generation != blob.generation
            with pytest.raises(BlobGone, match="'x' was served anew since this transfer began; begin again"):
                await client.fetch(transfer)
            server.withdraw("x")
            with pytest.raises(BlobGone, match="no blob 'x' is served here"):
                await client.fetch(transfer)
            assert buffer == bytes(5)
            with pytest.raises(UsageError, match="needs a writable buffer of as many bytes, this one has 4"):
                Transfer(blob, memoryview(bytearray(4)))
            with pytest.raises(UsageError, match="read-only: True"):
                Transfer(blob, memoryview(b"12345"))

    async def test_a_damaged_chunk_is_noticed_and_requested_again(self, net: Net) -> None:
        async with connected(net) as (_, server, client):
            source = bytearray(DATA)
            buffer, transfer = room(server.serve("a", memoryview(source)))
            arrived, damages = client.core.on_message, 0

            def damaged(now: float, message: object, body: bytes) -> None:
                nonlocal damages
                if body and damages < limit and server.chunks > 3:  # a bit falls over on the way
                    damages += 1
                    body = bytes([body[0] ^ 1]) + bytes(body[1:])
                arrived(now, message, body)  # type: ignore[arg-type]

            client.core.on_message = damaged  # type: ignore[assignment,method-assign]
            limit = 2
            await client.fetch(transfer)
            assert (damages, bytes(buffer)) == (2, DATA)
            assert server.chunks == CHUNKS + 2
            limit = 1 << 30
            buffer, transfer = room(await client.stat("a"))
            with pytest.raises(DecodeError, match="were damaged 3 times on their way; check that nothing writes"):
                await client.fetch(transfer)
            limit = 0  # what had arrived is kept, and nothing of it was damaged
            await client.fetch(transfer)
            assert buffer == DATA

    async def test_a_server_that_goes_is_noticed_and_its_successor_sends_the_rest(
        self, net: Net, tmp_path: Path
    ) -> None:
        async with connected(net) as (node, server, client):
            client.core.give_up_s = 0.3
            buffer, transfer = room(server.serve("a", DATA, generation="version 7"))
            held = hold_back(server, after=5)

            async def lost() -> None:
                with pytest.raises(LinkLost, match=r"silent for give_up_s=0\.3 while 'a' was fetched; fetch it again"):
                    await client.fetch(transfer)

            async with asyncio.TaskGroup() as group:
                group.create_task(lost())
                await until(lambda: len(held) == CHUNKS_IN_FLIGHT)
                await server.close()
            assert len(transfer.missing) == CHUNKS - 5
            assert buffer != DATA
            other = await node.byte_server(net.address("other"))
            successor = await node.byte_client(other.address)
            other.serve("a", DATA, generation="version 7")
            await successor.fetch(transfer)
            assert buffer == DATA
            assert other.chunks == CHUNKS - 5

    async def test_a_server_that_comes_back_is_used_again(self, net: Net) -> None:
        if not net.rebinds:
            pytest.skip("these links do not reconnect")
        async with connected(net) as (node, server, client):
            buffer, transfer = room(server.serve("a", DATA, generation="version 7"))
            held = hold_back(server, after=5)
            async with asyncio.TaskGroup() as group:
                group.create_task(client.fetch(transfer))
                await until(lambda: len(held) == CHUNKS_IN_FLIGHT)
                await server.close()
                again = await node.byte_server(server.address)
                again.serve("a", DATA, generation="version 7")
            assert buffer == DATA
            assert again.chunks >= CHUNKS - 5

    async def test_a_cancelled_fetch_can_be_taken_up_again(self, net: Net) -> None:
        async with connected(net) as (_, server, client):
            buffer, transfer = room(server.serve("a", DATA))
            answer, held = server.on_message, hold_back(server, after=5)
            async with asyncio.TaskGroup() as group:
                fetching = group.create_task(client.fetch(transfer))
                await until(lambda: len(held) == CHUNKS_IN_FLIGHT)
                fetching.cancel()
            for route, message in held:  # late answers, to a buffer that its owner has taken back
                answer(route, message, None)
            server.on_message = answer  # type: ignore[method-assign]
            assert await client.stat("a") == transfer.blob  # comes after them
            assert buffer == DATA[: 5 * CHUNK] + bytes(len(DATA) - 5 * CHUNK)
            await client.fetch(transfer)
            assert buffer == DATA
            assert server.chunks == CHUNKS + CHUNKS_IN_FLIGHT
