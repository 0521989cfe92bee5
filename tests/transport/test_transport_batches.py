"""Small messages travel together, in order, and what a batch says wrongly of its bodies harms that batch alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.transport.memory_link import until
from transport import DeadLetter, Node, StreamSpec, wire
from transport.bodies import BATCH_ITEMS, SMALL_BYTES, packed, unpacked
from transport.codec import Codec, checksum
from transport.wire import Hello, Put, Puts, Settled, Work, Works
from transport.zmq_link import ZmqLink


def put(number: int, body: bytes) -> Put:
    return Put(number, f"k{number}", len(body), checksum(body))


def test_small_neighbours_are_joined_and_each_peer_gets_its_messages_in_order() -> None:
    small, large = [bytes([number]) * number for number in range(1, 9)], bytes(SMALL_BYTES)
    works = [Work(1, 1, number, number, 0, 1, "k", len(body), 0) for number, body in enumerate(small)]
    out: list[Any] = [(b"ab"[number % 2 :][:1], work, small[number]) for number, work in enumerate(works)]
    out.insert(4, (b"a", works[0], large))
    out.insert(7, (b"b", Settled(1, 1, ()), None))
    sent = packed(out)
    assert [type(message) for route, message, _ in sent if route == b"a"] == [Works, Work, Works]
    assert [type(message) for route, message, _ in sent if route == b"b"] == [Works, Settled, Work]
    for route in (b"a", b"b"):
        arrived = [part for to, message, body in sent if to == route for part in unpacked(message, body)]
        assert arrived == [(message, body) for to, message, body in out if to == route]


def test_a_batch_is_bounded() -> None:
    longest = "\N{GRINNING FACE}" * wire.KEY_LIMIT
    body = bytes(SMALL_BYTES - 1)
    sent = packed((b"", Put(2**62, longest, len(body), 2**62), body) for _ in range(BATCH_ITEMS + 1))
    assert [type(message) for _, message, _ in sent] == [Puts, Put]
    header, joined = wire.encode(sent[0][1]), sent[0][2]
    assert isinstance(joined, bytes)
    assert max(len(header), len(joined)) <= wire.HEADER_LIMIT, "which links and sockets let pass"


def test_each_body_of_a_batch_is_its_own_memory() -> None:
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


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize("spoilt", [b"aabb", b"aabbbcc", None], ids=["short", "long", "missing"])
async def test_a_batch_whose_bodies_are_not_as_long_as_it_says_is_quarantined(
    run_dir: Path, context: zmq.Context[zmq.Socket[bytes]], spoilt: bytes | None
) -> None:
    letters: list[DeadLetter] = []
    codec = Codec(bytes)
    async with asyncio.timeout(60), Node("run", "node", close_s=0.2) as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), letters.append)
        intruder = context.socket(zmq.DEALER)
        intruder.connect(hub.address)
        intruder.send(wire.encode(Hello(wire.PROTOCOL, "run", "s", "producer", "p", "p", codec.name, codec.hash)))
        batch = wire.encode(Puts((put(1, b"aa"), put(2, b"bbb"))))
        intruder.send_multipart([batch] if spoilt is None else [batch, spoilt])
        await until(lambda: len(letters) + hub.stats().accepted == 2)
        assert hub.stats().accepted == (0 if spoilt is None else 1)
        assert all("body is not of the" in letter.reason for letter in letters)
        intruder.send_multipart([wire.encode(Puts((put(3, b"aa"), put(4, b"bbb")))), b"aabbb"])
        await until(lambda: hub.stats().accepted == (2 if spoilt is None else 3))
