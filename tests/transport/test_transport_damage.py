"""A hundred thousand damaged messages: each is refused or taken for what it says, and hub and peers go on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from stages.messages import Int32Array, PromptGroup, wire
from transport.codec import Codec, checksum
from transport.core.hub import HubCore
from transport.core.peers import ConsumerCore, ProducerCore
from transport.errors import DecodeError
from transport.spec import StreamSpec
from transport.wire import (
    PROTOCOL,
    Accepted,
    Drain,
    End,
    Fin,
    FinAck,
    Hello,
    Ping,
    Put,
    Refusal,
    Refuse,
    Report,
    Role,
    Settled,
    Welcome,
    Who,
    Work,
    decode_from_hub,
    decode_to_hub,
    encode,
)  # fmt: skip

HEADERS, ANSWERS, BODIES = 40_000, 20_000, 40_000
LINK_CATCHES = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError)  # as `ZmqLink._hand_over` does
SPEC = StreamSpec("s", "a", capacity_items=64, capacity_bytes=1 << 16)


def hello(role: Role, number: int) -> Hello:
    name = f"{role}-{number}"
    return Hello(PROTOCOL, "run", "s", role, name, name, "x", "h")


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
        whole, other = (encode(rng.choice(messages)) for _ in range(2))
        try:
            message = decode(damaged(rng, whole, other))
        except LINK_CATCHES:
            continue
        size = message.size if isinstance(message, Put | Work) else 0
        if size <= 1 << 14:
            yield message, bytes(size) if isinstance(message, Put | Work) else None


def test_a_hub_goes_on() -> None:
    rng = random.Random(0)
    hub = HubCore(SPEC, "run", 1)
    routes = [f"{role}-{number}".encode() for role in ("producer", "consumer") for number in range(3)]
    peers = [hello(role, number) for role in ("producer", "consumer") for number in range(3)]  # type: ignore[arg-type]
    hub.on_message(0.0, routes[0], peers[0])  # says what the stream carries
    messages = [
        *peers, Ping(), Drain(), Fin(), Fin(True), FinAck(), *(Put(seq, f"k{seq}", 3, 0) for seq in range(1, 200)),
        *(Report(1, s, 0, 8, 1 << 20, (1,), tuple(range(s, s + 9)), (Refusal(s, 1, "poison", "why"),), None)
          for s in range(1, 60)),
        *(Report(1, s, 0, 4, 1 << 20, held=(s, 2 * s)) for s in range(1, 30)),
    ]  # fmt: skip
    taken = 0
    for taken, (message, body) in enumerate(understood(rng, messages, decode_to_hub, HEADERS), 1):
        hub.on_message(taken / 100, rng.choice([*routes, b"stranger"]), message, body)
        if taken % 20 == 0:
            hub.on_timer(taken / 100)
            hub.flush(taken / 100)
    held = hub.custody
    assert taken > HEADERS / 20, "some are left to look at"
    assert held.accepted > 100
    assert held.accepted == held.settled + held.dead + len(held.items)
    assert held.held_bytes == sum(item.size for item in held.items.values())
    assert delivers(hub, taken / 100)


def delivers(hub: HubCore, now: float) -> bool:
    """Whether a message of a new producer comes to a new consumer, who takes all that is there."""
    hub.on_message(now, b"p", hello("producer", 8))
    hub.on_message(now, b"c", hello("consumer", 8))
    for sent in hub.flush(now):
        if sent.route == b"c" and isinstance(sent.message, Welcome):
            session = sent.message.session
    done: tuple[int, ...] = ()
    seen, offered = 0, False
    for _ in range(2000):
        now += 0.01
        if not offered:
            hub.on_message(now, b"p", Put(1, "the last", 3, 0), b"abc")
        hub.on_message(now, b"p", Ping())
        hub.on_message(now, b"c", Report(hub.epoch, session, seen, seen + 8, 1 << 30, (), done))
        hub.on_timer(now)
        for sent in hub.flush(now):
            offered = offered or (sent.route == b"p" and isinstance(sent.message, Accepted) and 1 in sent.message.seqs)
            if sent.route == b"c" and isinstance(sent.message, Work):
                seen, done = sent.message.serial, (*done, sent.message.id)
                if sent.message.key == "the last":
                    return True
    return False


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_its_peers_go_on(role: Role) -> None:
    rng = random.Random(role)
    core: Any = ProducerCore(hello(role, 0)) if role == "producer" else ConsumerCore(hello(role, 0), 8, 1 << 16)
    core.on_link_up(0.0)
    welcome = Welcome(1, 1, 30.0, 1 << 20, 8, 1 << 16, 0, 0)
    messages = [
        welcome, *[Welcome(epoch, 2, 30.0, 1 << 20, 8, 1 << 16, 0, 0) for epoch in (1, 2)], Who(), End(1), Fin(),
        FinAck(), Refuse("refused", "why"), *(Accepted(1, (n, n + 1), n + 8, 1 << 20) for n in range(50)),
        *(Work(1, 1, n, n, 3 * n, 1, f"k{n}", 3, 0) for n in range(1, 50)),
        *(Settled(1, 1, (n, n + 1), n, 3 * n) for n in range(50)),
    ]  # fmt: skip
    taken = 0
    for taken, (message, body) in enumerate(understood(rng, messages, decode_from_hub, ANSWERS // 2), 1):
        arguments = (message,) if role == "producer" else (message, body)
        core.on_message(taken / 100, *arguments)
        if role == "producer" and taken % 5 == 0:
            core.offer(f"o{taken}", 3, 0, b"abc")
        elif role == "consumer" and (delivery := core.take()) is not None:
            core.settle(delivery, "done")
        if taken % 20 == 0:
            core.on_timer(taken / 100)
        core.flush(taken / 100)
    assert taken > ANSWERS / 20


def test_bodies_decode_or_are_refused() -> None:
    rng, codec = random.Random(0), Codec(PromptGroup)
    ids = [wire(np.arange(n, dtype="<i4"), Int32Array) for n in (1, 40)]
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
