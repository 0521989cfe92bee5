"""The topic's machines, with messages lost, repeated and late."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from transport import wire
from transport.core.topic import Entries, TopicClientCore, TopicServerCore
from transport.topic import Waiters
from transport.wire import PROTOCOL, TopicHello


class Pair:
    """A server and clients with an unkind network between them, in steps of one second."""

    def __init__(self, seed: int, drop: float) -> None:
        self.rng = random.Random(seed)
        self.drop = drop
        self.now = 0.0
        self.server = TopicServerCore("run", 1)
        self.clients: dict[bytes, TopicClientCore] = {}
        for number in range(3):
            route = bytes([number])
            self.clients[route] = TopicClientCore(TopicHello(PROTOCOL, "run", f"c{number}", f"i{number}"))
            self.clients[route].start(0.0)

    def exchange(self) -> None:
        self.now += 1.0
        for route, client in self.clients.items():
            client.on_timer(self.now)
            for message, body in client.flush(self.now):
                if self.rng.random() >= self.drop:
                    received: Any = wire.decode_to_topic(wire.encode(message))
                    self.server.on_message(route, received, body)  # type: ignore[arg-type]
        for route, answer, body in self.server.flush():
            if self.rng.random() >= self.drop:
                decoded: Any = wire.decode_from_topic(wire.encode(answer))
                self.clients[route].on_message(self.now, decoded, body)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(50))
def test_all_copies_agree_in_the_end(seed: int) -> None:
    pair = Pair(seed, drop=0.3)
    revisions = dict.fromkeys(pair.clients, 0)
    for step in range(60):
        key = f"k{pair.rng.randrange(5)}"
        if pair.rng.random() < 0.3:
            pair.server.drop(key)
        else:
            pair.server.publish(key, b"%d" % step)
        pair.exchange()
        for route, client in pair.clients.items():
            assert client.entries.revision >= revisions[route]
            revisions[route] = client.entries.revision
    for _ in range(100):
        pair.exchange()
    for client in pair.clients.values():
        assert client.entries.values == pair.server.entries.values


def test_a_repeated_publication_is_stored_once() -> None:
    pair = Pair(0, drop=0.0)
    pair.exchange()
    client = pair.clients[b"\0"]
    client.publish("k", b"old")
    [(put, body)] = [sent for sent in client.flush(1.0) if isinstance(sent[0], wire.TopicPut)]
    assert isinstance(body, bytes)
    pair.server.on_message(b"\0", put, body)
    pair.server.publish("k", b"new")
    pair.server.on_message(b"\0", put, body)  # sent again after a reconnect
    assert pair.server.entries.values["k"] == b"new"


def test_what_a_dismissed_replica_sent_before_its_end_is_acknowledged_and_not_stored() -> None:
    pair = Pair(0, drop=0.0)
    pair.exchange()
    gone, other = pair.clients[b"\0"], pair.clients[b"\1"]
    gone.publish("stats/c0", b"1")
    other.publish("stats/c1", b"1")
    pair.exchange()
    gone.publish("stats/c0", b"2")
    late = [sent for sent in gone.flush(1.0) if isinstance(sent[0], wire.TopicPut)]
    pair.server.dismiss("c0")
    assert pair.server.entries.values == {"stats/c1": b"1"}
    pair.server.flush()
    for put, body in late:
        assert isinstance(body, bytes)
        pair.server.on_message(b"\0", put, body)
    assert pair.server.entries.values == {"stats/c1": b"1"}
    assert [type(answer) for _, answer, _ in pair.server.flush()] == [wire.TopicAck]


def test_publications_are_resent_after_a_reconnect_and_resolve() -> None:
    pair = Pair(0, drop=0.0)
    pair.exchange()
    client = pair.clients[b"\1"]
    client.publish("k", b"v")
    client.flush(1.0)  # lost with the link
    client.on_link_up(2.0)
    for _ in range(3):
        pair.exchange()
    assert pair.server.entries.values == {"k": b"v"}
    assert not client.waiting


def test_a_server_forgets_whom_it_cannot_reach() -> None:
    pair = Pair(0, drop=0.0)
    pair.exchange()
    pair.server.on_unreachable(b"\0")
    pair.server.publish("k", b"v")
    assert {route for route, _, _ in pair.server.flush()} == {b"\1", b"\2"}


def test_a_round_of_figures_costs_no_message_to_the_other_clients() -> None:
    """A hundred replicas publish their figures: without the private prefix that would be 10,000 messages."""
    server = TopicServerCore("run", 1, private=("stats/",))
    routes = [bytes([number]) for number in range(100)]
    for route in routes:
        server.on_message(route, TopicHello(PROTOCOL, "run", f"c{route[0]}", f"i{route[0]}"), None)
    server.flush()
    for route in routes:
        server.on_message(route, wire.TopicPut(1, f"stats/c{route[0]}"), b"figures")
    out = server.flush()
    assert [(route, type(message)) for route, message, _ in out] == [(route, wire.TopicAck) for route in routes]
    assert len(server.entries.values) == 100
    server.publish("drain", b"now")
    assert len(server.flush()) == 100
    ping = wire.TopicPing(1, server.shared_revision)
    server.on_message(routes[0], ping, None)  # nothing of what clients see is missing: no snapshot
    [(_, answer, _)] = server.flush()
    assert isinstance(answer, wire.TopicAck)


async def test_a_waiter_is_not_even_woken_by_keys_that_it_does_not_read() -> None:
    entries, looks = Entries(), 0

    def look() -> None:
        nonlocal looks
        looks += 1

    waiters = Waiters(entries)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(waiters.wait(0, ("drain",), look))
        await asyncio.sleep(0)
        for number in range(100):
            entries.change({f"applied/{number}": b"1"})
            waiters.wake()
            await asyncio.sleep(0)
        assert looks == 1
        entries.change({"drain": b"now"})
        waiters.wake()
        assert await waiting == 101
    assert looks == 1
