"""Small messages travel together, in order, and what a batch says wrongly of its bodies harms that batch alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.transport.memory_link import until
from transport import DeadLetter, Node, StreamSpec, port, wire
from transport.bodies import BATCH_ITEMS, FITS_BYTES, SMALL_BYTES, body_frames, packed, unpacked
from transport.codec import Codec, checksum, total
from transport.wire import Hello, Put, Puts, Settled, Work, Works
from transport.zmq_link import ZmqLink


def put(number: int, body: bytes) -> Put:
    return Put(number, f"k{number}", len(body), checksum(body))


def test_neighbours_are_joined_and_each_peer_gets_its_messages_in_order() -> None:
    bodies = [bytes([number]) * (SMALL_BYTES if number % 3 == 0 else number) for number in range(12)]
    works = [Work(1, 1, number, number, 0, 1, "k", len(body), 0) for number, body in enumerate(bodies)]
    out: list[Any] = [(b"ab"[number % 2 :][:1], work, bodies[number]) for number, work in enumerate(works)]
    large = bytes(FITS_BYTES + 1)
    out.insert(6, (b"a", msgspec.structs.replace(works[0], size=len(large)), large))
    out.insert(9, (b"b", Settled(1, 1, ()), None))
    sent = packed(out)
    assert [type(message) for route, message, _ in sent if route == b"a"] == [Works, Work, Works]
    assert [type(message) for route, message, _ in sent if route == b"b"] == [Works, Settled, Works]
    for route in (b"a", b"b"):
        arrived = [part for to, message, body in sent if to == route for part in unpacked(message, body)]
        assert arrived == [(message, body) for to, message, body in out if to == route]


def test_a_batch_is_bounded() -> None:
    longest = "\N{GRINNING FACE}" * wire.KEY_LIMIT
    for size in (1, FITS_BYTES):
        sent = packed((b"", Put(2**62, longest, size, 2**62), bytes(size)) for _ in range(300))
        for _, message, body in sent:
            assert len(wire.encode(message)) <= wire.HEADER_LIMIT
            assert total(body_frames(body)) <= wire.HEADER_LIMIT, "which each link and socket lets pass"
        assert sum(len(list(unpacked(message, body))) for _, message, body in sent) == 300


def test_a_small_body_of_a_batch_does_not_keep_the_memory_of_others() -> None:
    bodies = [b"one", b"three", b"five5"]
    whole = b"".join(bodies)
    parts = list(unpacked(Puts(tuple(put(n, body) for n, body in enumerate(bodies))), memoryview(whole)))
    assert [body for _, body in parts] == bodies
    assert all(type(body) is bytes for _, body in parts)


async def test_messages_that_are_ready_together_travel_together(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    original = ZmqLink._send_frames

    def counted(link: ZmqLink, message: Any, body: Any) -> None:
        if isinstance(message, Put | Puts | Work | Works):
            sent.append((type(message).__name__, len(getattr(message, "parts", "1"))))
        original(link, message, body)

    monkeypatch.setattr(ZmqLink, "_send_frames", counted)
    async with asyncio.timeout(60), Node("run", "node") as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), lambda letter: None)
        inlet = await node.inlet(hub.address, "s", bytes, window_items=100)
        outlet = await node.outlet(hub.address, "s", bytes)
        async with asyncio.TaskGroup() as tasks:
            for number in range(50):
                tasks.create_task(outlet.send(b"x" * number, str(number)))
        got = []
        for _ in range(50):
            lease = await inlet.receive()
            assert lease is not None
            got.append((lease.key, lease.message))
            lease.done()
        await until(lambda: hub.stats().settled == 50)
    assert got == [(str(number), b"x" * number) for number in range(50)]
    assert sent == [("Puts", 50), ("Works", 50)]


async def test_a_step_takes_so_many_messages_and_not_batches(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks get their turn between two steps."""
    steps: list[int] = []
    monkeypatch.setattr(port, "STEP_LIMIT", 2 * BATCH_ITEMS)
    async with asyncio.timeout(60), Node("run", "node") as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), lambda letter: None)
        outlets = [await node.outlet(hub.address, "s", bytes, replica=f"p-{n}") for n in range(10)]
        original = hub.on_step

        def counted() -> None:
            steps.append(hub.stats().accepted)
            original()

        hub.on_step = counted  # type: ignore[method-assign]
        monkeypatch.setattr(hub.link, "_arrived", False)
        hub.loop.remove_reader(hub.link._socket.fileno())  # type: ignore[attr-defined]
        async with asyncio.TaskGroup() as tasks:
            for outlet in outlets:
                for number in range(BATCH_ITEMS):
                    tasks.create_task(outlet.send(b"x", f"{outlet.name} {id(outlet)} {number}"))
            await asyncio.sleep(0.3)  # all are in the socket
            hub.loop.add_reader(hub.link._socket.fileno(), hub.link._on_arrival)  # type: ignore[attr-defined]
            hub.link._on_arrival()  # type: ignore[attr-defined]
        assert hub.stats().accepted == 10 * BATCH_ITEMS
    assert max(after - before for before, after in pairwise([0, *steps])) <= 2 * BATCH_ITEMS


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize(("spoilt", "whole"), [([], 0), ([b"aabb"], 1), ([b"aabbb"], 2)])
async def test_what_a_batch_lacks_of_a_body_is_quarantined_and_the_rest_is_accepted(
    run_dir: Path, context: zmq.Context[zmq.Socket[bytes]], spoilt: list[bytes], whole: int
) -> None:
    letters: list[DeadLetter] = []
    codec = Codec(bytes)
    bodies = [b"aa", b"bbb", b"c" * SMALL_BYTES]
    async with asyncio.timeout(60), Node("run", "node", close_s=0.2) as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), letters.append)
        intruder = context.socket(zmq.DEALER)
        intruder.connect(hub.address)
        intruder.send(wire.encode(Hello(wire.PROTOCOL, "run", "s", "producer", "p", "p", codec.name, codec.hash)))
        intruder.send_multipart([wire.encode(Puts(tuple(map(put, (1, 2, 3), bodies)))), *spoilt])
        await until(lambda: len(letters) + hub.stats().accepted == 3)
        assert hub.stats().accepted == whole
        assert [letter.key for letter in letters] == ["k1", "k2", "k3"][whole:]
        assert all("body is not of the" in letter.reason for letter in letters)
        intruder.send_multipart([wire.encode(Puts(tuple(map(put, (4, 5, 6), bodies)))), b"aabbb", bodies[2]])
        await until(lambda: hub.stats().accepted == whole + 3)
