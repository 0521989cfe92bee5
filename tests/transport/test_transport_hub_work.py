"""What a hub does for a message does not grow with the replicas around it; who waits for room is not forgotten."""

from __future__ import annotations

from collections import Counter

import pytest

from transport.core.custody import ConsumerPeer, ProducerPeer
from transport.core.hub import HubCore, Send
from transport.spec import StreamSpec
from transport.wire import PROTOCOL, Accepted, Hello, Put, Report, Role, Settled, Welcome, Work


def greet(hub: HubCore, role: Role, number: int) -> tuple[bytes, int]:
    """(route, session) of a new peer."""
    name = f"{role}-{number}"
    hub.on_message(0.0, name.encode(), Hello(PROTOCOL, "run", "s", role, name, name, "x", "h"))
    [welcome] = [s.message for s in hub.flush(0.0) if isinstance(s.message, Welcome)]
    return name.encode(), welcome.session


def report(session: int, *, seen: int, done: tuple[int, ...] = (), window: int = 4) -> Report:
    return Report(1, session, seen, seen + window, 1 << 40, (), done, (), None)


def kinds(sent: list[Send]) -> list[tuple[str, bytes]]:
    return [(type(s.message).__name__, s.route) for s in sent]


@pytest.mark.parametrize("replicas", [1, 32])
def test_a_message_is_work_for_its_own_peers_only(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = HubCore(StreamSpec("s", "a"), "run", 1)
    producers = [greet(hub, "producer", i) for i in range(replicas)]
    consumers = [greet(hub, "consumer", i) for i in range(replicas)]
    for route, session in consumers:
        hub.on_message(0.0, route, report(session, seen=0))
    hub.flush(0.0)
    looks: Counter[str] = Counter()
    grant, confirm = HubCore._grant, HubCore._confirm

    def granting(core: HubCore, peer: ProducerPeer) -> None:
        looks["producers"] += 1
        grant(core, peer)

    def confirming(core: HubCore, peer: ConsumerPeer) -> None:
        looks["consumers"] += 1
        confirm(core, peer)

    monkeypatch.setattr(HubCore, "_grant", granting)
    monkeypatch.setattr(HubCore, "_confirm", confirming)
    hub.on_message(1.0, producers[-1][0], Put(1, "k", 3, 0), b"abc")
    accepted, delivered = hub.flush(1.0)
    assert isinstance(accepted.message, Accepted)
    assert accepted.message.seqs == (1,)
    assert isinstance(delivered.message, Work)
    session = dict(consumers)[delivered.route]
    hub.on_message(1.0, delivered.route, report(session, seen=1, done=(delivered.message.id,)))
    [settled] = hub.flush(1.0)
    assert isinstance(settled.message, Settled)
    assert looks == {"producers": 1, "consumers": 1}
    assert hub.flush(1.0) == []
    assert looks.total() == 2, "nobody was heard of, nobody is looked at"


def test_a_producer_that_waits_for_room_hears_of_it_when_others_make_it() -> None:
    hub = HubCore(StreamSpec("s", "a", capacity_items=8), "run", 1)
    producer, _ = greet(hub, "producer", 0)
    other, _ = greet(hub, "producer", 1)
    for seq in range(1, 9):
        hub.on_message(0.0, producer, Put(seq, f"k{seq}", 1, 0), b"x")
        limits = [s.message.limit_items for s in hub.flush(0.0) if isinstance(s.message, Accepted)]
    assert limits == [8], "the hub is full"
    hub.on_message(0.0, other, Put(1, "other", 1, 0), b"x")
    hub.flush(0.0)
    assert hub.flush(1.0) == []
    consumer, session = greet(hub, "consumer", 0)
    hub.on_message(1.0, consumer, report(session, seen=0))
    work = [s.message for s in hub.flush(1.0) if isinstance(s.message, Work)]
    done = tuple(message.id for message in work)
    assert len(done) == 4
    hub.on_message(2.0, consumer, report(session, seen=4, done=done))
    sent = hub.flush(2.0)
    assert ("Accepted", producer) in kinds(sent)
    assert [s.message.limit_items for s in sent if isinstance(s.message, Accepted) and s.route == producer] == [9]


def test_a_peer_that_left_is_told_nothing() -> None:
    hub = HubCore(StreamSpec("s", "a"), "run", 1)
    producer, _ = greet(hub, "producer", 0)
    consumer, session = greet(hub, "consumer", 0)
    hub.on_message(0.0, consumer, report(session, seen=0))
    hub.on_message(0.0, producer, Put(1, "k", 1, 0), b"x")
    [work] = [s.message for s in hub.flush(0.0) if isinstance(s.message, Work)]
    hub.on_message(0.0, consumer, report(session, seen=1, done=(work.id,)))
    hub.peer_lost("consumer-0")
    hub.peer_lost("producer-0")
    assert hub.flush(0.0) == []
