"""The topic's machines, with messages lost, repeated and late."""

from __future__ import annotations

import random
from typing import Any

import pytest

from transport import wire
from transport.core.topic import TopicClientCore, TopicServerCore
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
            assert client.revision >= revisions[route]
            revisions[route] = client.revision
    for _ in range(100):
        pair.exchange()
    for client in pair.clients.values():
        assert client.entries == pair.server.entries


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
    assert pair.server.entries["k"] == b"new"


def test_publications_are_resent_after_a_reconnect_and_resolve() -> None:
    pair = Pair(0, drop=0.0)
    pair.exchange()
    client = pair.clients[b"\1"]
    client.publish("k", b"v")
    client.flush(1.0)  # lost with the link
    client.on_link_up(2.0)
    for _ in range(3):
        pair.exchange()
    assert pair.server.entries == {"k": b"v"}
    assert not client.waiting


def test_a_server_forgets_whom_it_cannot_reach() -> None:
    pair = Pair(0, drop=0.0)
    pair.exchange()
    pair.server.on_unreachable(b"\0")
    pair.server.publish("k", b"v")
    assert {route for route, _, _ in pair.server.flush()} == {b"\1", b"\2"}
