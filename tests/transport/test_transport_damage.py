"""Damaged, lost, repeated and late messages: each is refused or read as what it is, and hub, topic and peers go on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from stages.messages import Int32Array, PromptGroup
from stages.messages import wire as as_array
from transport import wire
from transport.codec import Codec, checksum
from transport.core.hub import HubCore
from transport.core.peers import ConsumerCore, ProducerCore
from transport.core.topic import Entries, TopicClientCore, TopicServerCore
from transport.errors import DecodeError
from transport.spec import StreamSpec
from transport.topic import Waiters

HEADERS, ANSWERS, BODIES = 40_000, 20_000, 40_000
LINK_CATCHES = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError)  # as `ZmqLink._hand_over` does
SPEC = StreamSpec("s", "a", capacity_items=64, capacity_bytes=1 << 16)


def hello(role: wire.Role, number: int) -> wire.Hello:
    name = f"{role}-{number}"
    return wire.Hello(wire.PROTOCOL, "run", "s", role, name, name, "x", "h")


def damaged(rng: random.Random, whole: bytes, other: bytes) -> bytes:
    """A bit, some bytes, the end or the beginning of it is another's, or gone; or nothing is."""
    data, at = bytearray(whole), rng.randrange(len(whole))
    match rng.randrange(7):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at : at + rng.randrange(1, 5)] = rng.randbytes(rng.randrange(5))
        case 2:
            del data[at:]
        case 3:
            data = data[:at] + other[rng.randrange(len(other)) :]
        case 4:
            data[at:at] = bytes([rng.choice((0xDD, 0xDF, 0xC6, 0xDB))]) + rng.randbytes(4)  # "a lot follows"
        case 5:
            data += other
    return bytes(data)


def understood(rng: random.Random, messages: list[Any], decode: Any, count: int) -> Iterator[tuple[Any, bytes | None]]:
    """The damaged ones that are messages still, with a body of the size that they say, as links and ports see to."""
    for _ in range(count):
        whole, other = (wire.encode(rng.choice(messages)) for _ in range(2))
        try:
            message = decode(damaged(rng, whole, other))
        except LINK_CATCHES:
            continue
        size = message.size if isinstance(message, wire.Put | wire.Work) else 0
        if size <= 1 << 14:
            yield message, bytes(size) if isinstance(message, wire.Put | wire.Work) else None


def test_a_hub_goes_on() -> None:
    rng = random.Random(0)
    hub = HubCore(SPEC, "run", 1)
    routes = [f"{role}-{number}".encode() for role in ("producer", "consumer") for number in range(3)]
    peers = [hello(role, number) for role in ("producer", "consumer") for number in range(3)]  # type: ignore[arg-type]
    hub.on_message(0.0, routes[0], peers[0])  # says what the stream carries
    messages = [
        *peers, wire.Ping(), wire.Drain(), wire.Fin(), wire.Fin(True), wire.FinAck(),
        *(wire.Put(seq, f"k{seq}", 3, 0) for seq in range(1, 200)),
        *(wire.Report(1, s, 0, 8, 1 << 20, (1,), tuple(range(s, s + 9)), (wire.Refusal(s, 1, "poison", "why"),), None)
          for s in range(1, 60)),
        *(wire.Report(1, s, 0, 4, 1 << 20, held=(s, 2 * s)) for s in range(1, 30)),
    ]  # fmt: skip
    taken = 0
    for taken, (message, body) in enumerate(understood(rng, messages, wire.decode_to_hub, HEADERS), 1):
        hub.on_message(taken / 100, rng.choice([*routes, b"stranger"]), message, body)
        if taken % 20 == 0:
            hub.on_timer(taken / 100)
            hub.flush(taken / 100)
    held = hub.custody
    assert taken > HEADERS / 20, "some are left to look at"
    assert held.accepted > 100
    assert held.accepted == held.settled + held.dead_letters + len(held.items)
    assert held.bytes_queued == sum(item.size for item in held.items.values())
    assert delivers(hub, taken / 100)


def delivers(hub: HubCore, now: float) -> bool:
    """Whether a message of a new producer comes to a new consumer, who takes all that is there."""
    producer, consumer = ProducerCore(hello("producer", 8)), ConsumerCore(hello("consumer", 8), 8, 1 << 30)
    producer.session.start(now)
    consumer.session.start(now)
    producer.offer("the last", 3, 0, b"abc")
    for _ in range(2000):
        now += 0.01
        for route, core in ((b"p", producer), (b"c", consumer)):
            core.session.on_timer(now)
            for message, body in core.flush(now):
                hub.on_message(now, route, message, body)
        hub.on_timer(now)
        for route, answer, body in hub.flush(now):
            if route == b"p":
                producer.on_message(now, answer)
            elif route == b"c":
                consumer.on_message(now, answer, body)
        while (delivery := consumer.take()) is not None:
            consumer.settle(delivery, "done")
            if delivery.work.key == "the last":
                return True
    return False


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_its_peers_go_on(role: wire.Role) -> None:
    rng = random.Random(role)
    core: Any = ProducerCore(hello(role, 0)) if role == "producer" else ConsumerCore(hello(role, 0), 8, 1 << 16)
    core.session.say_hello(0.0)
    messages = [
        *(wire.Welcome(epoch, session, 30.0, 1 << 20, 8, 1 << 16, 0, 0) for epoch, session in ((1, 1), (1, 2), (2, 2))),
        wire.Who(), wire.End(1), wire.Fin(), wire.FinAck(), wire.Refuse("refused", "why"),
        *(wire.Accepted(1, (n, n + 1), n + 8, 1 << 20) for n in range(50)),
        *(wire.Work(1, 1, n, n, 3 * n, 1, f"k{n}", 3, 0) for n in range(1, 50)),
        *(wire.Settled(1, 1, (n, n + 1), n, 3 * n) for n in range(50)),
    ]  # fmt: skip
    taken = 0
    for taken, (message, body) in enumerate(understood(rng, messages, wire.decode_from_hub, ANSWERS // 2), 1):
        arguments = (message,) if role == "producer" else (message, body)
        core.on_message(taken / 100, *arguments)
        if role == "producer" and taken % 5 == 0:
            core.offer(f"o{taken}", 3, 0, b"abc")
        elif role == "consumer" and (delivery := core.take()) is not None:
            core.settle(delivery, "done")
        if taken % 20 == 0:
            core.session.on_timer(taken / 100)
        core.flush(taken / 100)
    assert taken > ANSWERS / 20


def consumer_with(*messages: wire.FromHub) -> ConsumerCore:
    core = ConsumerCore(hello("consumer", 0), 8, 1 << 16)
    core.session.say_hello(0.0)
    for message in messages:
        core.on_message(0.0, message, b"abc" if isinstance(message, wire.Work) else None)
    core.flush(0.0)
    return core


def reports(core: ConsumerCore) -> list[wire.Report]:
    return [message for message, _ in core.flush(0.0) if isinstance(message, wire.Report)]


def test_a_delivery_of_an_old_hub_is_not_reported_to_the_new_one_as_started() -> None:
    """Both hubs gave the same id. Whoever dies over the old delivery must not be blamed for the new one."""
    old, new = (wire.Work(epoch, 1, 5, 1, 3, 1, "k", 3, 0) for epoch in (1, 2))
    core = consumer_with(wire.Welcome(1, 1, 30.0, 1 << 20, 8, 1 << 16, 0, 0), old)
    core.on_message(0.0, wire.Welcome(2, 1, 30.0, 1 << 20, 8, 1 << 16, 0, 0))
    core.on_message(0.0, new, b"abc")
    core.flush(0.0)  # the account that the new hub gets first
    taken = core.take()
    assert taken is not None
    assert taken.orphan
    assert not any(report.started for report in reports(core))
    assert core.take() is not None
    assert [report.started for report in reports(core)] == [(5,)]


def test_what_arrives_after_a_drain_is_handed_back() -> None:
    core = consumer_with(wire.Welcome(1, 1, 30.0, 1 << 20, 8, 1 << 16, 0, 0))
    core.drain()
    core.on_message(0.0, wire.Work(1, 1, 5, 1, 3, 1, "k", 3, 0), b"abc")
    assert core.take() is None
    assert [report.refused for report in reports(core)] == [(wire.Refusal(5, 1, "returned"),)]


def test_a_goodbye_that_is_said_again_blames_as_the_first_one_did() -> None:
    core = consumer_with(wire.Welcome(1, 1, 30.0, 1 << 20, 8, 1 << 16, 0, 0))
    core.fin(0.0, blame=True)
    assert wire.Fin(True) in [message for message, _ in core.flush(0.0)]
    core.session.on_timer(60.0)
    assert [message for message, _ in core.flush(60.0)] == [wire.Fin(True)]


def test_bodies_decode_or_are_refused() -> None:
    rng, codec = random.Random(0), Codec(PromptGroup)
    ids = [as_array(np.arange(n, dtype="<i4"), Int32Array) for n in (1, 40)]
    whole = [
        b"".join(bytes(frame) for frame in codec.encode(PromptGroup(n, n, 0, f"prompt {n}", tokens, "label", 8, n)))
        for n, tokens in enumerate(ids)
    ]
    refused = 0
    for _ in range(BODIES):
        body = damaged(rng, rng.choice(whole), rng.choice(whole))
        try:
            group = codec.decode((body,), len(body), checksum(body))
        except DecodeError:
            refused += 1
        else:
            assert isinstance(group, PromptGroup)
    assert BODIES / 10 < refused < BODIES


def greeting(number: int) -> wire.Hello:
    return wire.Hello(wire.PROTOCOL, "run", "topic", "consumer", f"c{number}", f"i{number}", "", "")


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
            self.clients[route] = TopicClientCore(greeting(number))
            self.clients[route].session.start(0.0)

    def exchange(self) -> None:
        self.now += 1.0
        for route, client in self.clients.items():
            client.session.on_timer(self.now)
            for message, body in client.flush(self.now):
                if self.rng.random() >= self.drop:
                    received: Any = wire.decode_to_topic(wire.encode(message))
                    self.server.on_message(route, received, body)  # type: ignore[arg-type]
        for route, answer, body in self.server.flush():
            if self.rng.random() >= self.drop:
                decoded: Any = wire.decode_from_topic(wire.encode(answer))
                self.clients[route].on_message(self.now, decoded, body)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(50))
def test_all_copies_agree_in_the_end_and_each_publication_is_stored_once(seed: int) -> None:
    """What is lost is sent again, and what comes again, or late, replaces nothing newer."""
    pair = Pair(seed, drop=0.3)
    revisions = dict.fromkeys(pair.clients, 0)
    newest = dict.fromkeys(pair.clients, -1)
    for step in range(60):
        key = f"k{pair.rng.randrange(5)}"
        if pair.rng.random() < 0.3:
            pair.server.drop(key)
        else:
            pair.server.publish(key, b"%d" % step)
        for route, client in pair.clients.items():
            if step % 7 == 0:
                client.session.say_hello(pair.now)  # and what was under way is lost
                client.flush(pair.now)
            client.publish(f"of {route[0]}", b"%d" % step)
        pair.exchange()
        for route, client in pair.clients.items():
            assert client.entries.revision >= revisions[route]
            revisions[route] = client.entries.revision
            stored = int(pair.server.entries.values.get(f"of {route[0]}", b"-1"))
            assert newest[route] <= stored <= step
            newest[route] = stored
    pair.drop = 0.0
    for client in pair.clients.values():
        client.session.say_hello(pair.now)
    for _ in range(10):
        pair.exchange()
    for client in pair.clients.values():
        assert not client.waiting
        assert client.entries.values == pair.server.entries.values
    assert [pair.server.entries.values[f"of {n}"] for n in range(3)] == [b"59"] * 3


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


def test_a_round_of_figures_costs_no_message_to_the_other_clients() -> None:
    """A hundred replicas publish their figures: without the private prefix that would be 10,000 messages."""
    server = TopicServerCore("run", 1, private=("stats/",))
    routes = [bytes([number]) for number in range(100)]
    for route in routes:
        server.on_message(route, greeting(route[0]), None)
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
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
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
