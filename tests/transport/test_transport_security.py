"""Addresses, keys and hostile peers."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

import transport
from tests.transport.memory_link import Extra, ignore, take_one
from transport import (
    AddressInUse,
    AddressInvalid,
    AddressRefused,
    BlobGone,
    DeadLetter,
    Hub,
    LinkLost,
    LinkRefused,
    MessageInvalid,
    Node,
    Security,
    SecurityError,
    StreamSpec,
    Transfer,
    UsageError,
    wire,
    zmq_link,
)
from transport import stream as stream_port
from transport.codec import Codec
from transport.security import add_client, create_keys, load_security, parse_address, zap_reply
from transport.topic import VALUE_LIMIT, check_entry
from transport.wire import KEY_LIMIT, Hello, Put, Report

PACKAGE = Path(transport.__file__).parent


@asynccontextmanager
async def served(
    run_dir: Path, letters: list[DeadLetter] | None = None, **limits: int
) -> AsyncIterator[tuple[Node, Hub]]:
    """A stream of one node, which does not wait long for peers that are gone."""
    async with asyncio.timeout(120), Node("run", "node", close_s=0.2) as node:
        spec = StreamSpec("s", f"ipc://{run_dir}/s", **limits)  # type: ignore[arg-type]
        yield node, await node.hub(spec, ignore if letters is None else letters.append)


def test_the_package_has_no_pickle() -> None:
    words = ("pick" + "le", "marsh" + "al", "recv_pyobj", "send_pyobj", "eval(", "exec(")
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert not any(word in text for word in words), path


async def test_nothing_unpickles_at_run_time(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "loads", poisoned)
    monkeypatch.setattr(pickle, "load", poisoned)
    async with served(run_dir) as (node, hub):
        inlet = await node.inlet(hub.address, "s", bytes)
        outlet = await node.outlet(hub.address, "s", bytes)
        await outlet.send(pickle.dumps({"a": 1}), "k")
        lease = await take_one(inlet)
        lease.done()


@pytest.mark.parametrize("place", ["*", "0.0.0.0", "[::]", "192.0.2.1", "example.org"])
async def test_open_interfaces_need_keys(place: str) -> None:
    async with Node("run", "node") as node:
        words = r"will not bind tcp://.* without keys: .* give the node Security"
        with pytest.raises(AddressRefused, match=words):
            await node.hub(StreamSpec("s", f"tcp://{place}:0"), ignore)
        with pytest.raises(AddressRefused, match=words):
            await node.byte_server(f"tcp://{place}:0")


async def test_connecting_beyond_loopback_needs_keys() -> None:
    async with Node("run", "node") as node:
        with pytest.raises(AddressRefused, match=r"will not connect to tcp://192.0.2.1:5555 without keys"):
            await node.outlet("tcp://192.0.2.1:5555", "s", bytes)
        with pytest.raises(AddressInvalid, match="names no single place"):
            await node.outlet("tcp://0.0.0.0:5555", "s", bytes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("udp://x:1", "is none of inproc://NAME, ipc:///PATH, tcp://HOST:PORT"),
        ("ipc://relative", "not an absolute path"),
        ("ipc://@abstract", "no abstract sockets"),
        ("ipc:///" + "x" * 120, "path of 121 bytes but the system allows 107; use a shorter run directory"),
        ("tcp://127.0.0.1", "port"),
        ("tcp://127.0.0.1:70000", "not 0 to 65535"),
    ],
)
def test_bad_addresses_are_named(text: str, words: str) -> None:
    with pytest.raises(AddressInvalid, match=words):
        parse_address(text)


async def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with Node("run", "node") as node:
            with pytest.raises(AddressInUse, match=rf"tcp://127.0.0.1:{port} is in use .* choose another, or port 0"):
                await node.hub(StreamSpec("s", f"tcp://127.0.0.1:{port}"), ignore)


async def test_ipc_sockets_are_private(run_dir: Path) -> None:
    async with Node("run", "node") as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/new/s"), ignore)
        assert stat.S_IMODE((run_dir / "new").stat().st_mode) == 0o700
        assert stat.S_IMODE((run_dir / "new" / "s").stat().st_mode) & 0o077 == 0
        with pytest.raises(AddressInUse, match="in use by another hub or process"):
            await node.hub(StreamSpec("s", hub.address), ignore)
        (run_dir / "open").mkdir()
        (run_dir / "open").chmod(0o755)
        with pytest.raises(AddressInvalid, match=r"has mode 0755 .* chmod 700 it"):
            await node.hub(StreamSpec("s", f"ipc://{run_dir}/open/s"), ignore)


async def test_the_socket_of_a_dead_process_is_taken_over(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "s"))
    async with Node("run", "node") as node:
        await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), ignore)
        await node.outlet(f"ipc://{run_dir}/s", "s", bytes)


def test_key_files_are_private_and_complete(run_dir: Path) -> None:
    create_keys(run_dir / "keys", ["worker"])
    assert stat.S_IMODE((run_dir / "keys" / "server.key").stat().st_mode) == 0o600
    server = load_security(run_dir / "keys")
    worker = load_security(run_dir / "keys", "worker")
    assert worker.server_public == server.own.public
    assert server.clients()[worker.own.public] == "worker"
    assert worker.clients() == {}
    assert server.own.secret not in repr(server)
    with pytest.raises(SecurityError, match="exists and is not overwritten"):
        create_keys(run_dir / "keys", [])
    (run_dir / "keys" / "worker.key").chmod(0o644)
    with pytest.raises(SecurityError, match="has mode 0644, others can read it"):
        load_security(run_dir / "keys", "worker")
    with pytest.raises(SecurityError, match=r"cannot be read .* create_keys"):
        load_security(run_dir / "keys", "nobody")


def test_a_key_that_somebody_else_put_there_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_keys(run_dir / "keys", ["worker"])
    (run_dir / "keys" / "link.key").symlink_to(run_dir / "keys" / "worker.key")
    with pytest.raises(SecurityError, match=r"link.key' cannot be read \(Too many levels of symbolic links\)"):
        load_security(run_dir / "keys", "link")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(SecurityError, match=r"is owned by user \d+, who knows it; create new keys"):
        load_security(run_dir / "keys", "worker")


def test_the_allow_list_grants_curve_only(run_dir: Path) -> None:
    create_keys(run_dir / "keys", [])
    security = load_security(run_dir / "keys")
    raw = zmq.utils.z85.decode(security.own.public)
    good = [b"1.0", b"7", b"sluice", b"", b"", b"CURVE", raw]
    assert zap_reply(good, security.clients())[1:5] == [b"7", b"200", b"OK", b"server"]
    for bad in (
        [*good[:5], b"NULL"],
        [*good[:6], b"x" * 32],
        [b"2.0", *good[1:]],
        [],
        [*good[:5], b"PLAIN", b"a", b"b"],
    ):
        assert zap_reply(bad, security.clients())[2] == b"400"


def keys_of(run_dir: Path) -> tuple[Security, Security]:
    """The server's, and those of somebody who knows the server and is on no list; in `keys` are a worker's."""
    create_keys(run_dir / "keys", ["worker"])
    create_keys(run_dir / "stranger", [])
    security = load_security(run_dir / "keys")
    return security, Security(load_security(run_dir / "stranger").own, security.own.public)


async def test_unknown_keys_and_plain_peers_are_refused(run_dir: Path) -> None:
    security, intruding = keys_of(run_dir)
    async with asyncio.timeout(120), Node("run", "hub", security) as node:
        hub = await node.hub(StreamSpec("s", "tcp://127.0.0.1:0"), ignore)
        async with Node("run", "worker", load_security(run_dir / "keys", "worker")) as worker:
            outlet = await worker.outlet(hub.address, "s", bytes)
            await outlet.send(b"x", "k")
        async with Node("run", "w", intruding) as intruder:
            with pytest.raises(LinkRefused, match="allow-list does not contain this node's key; add the key"):
                await intruder.outlet(hub.address, "s", bytes)
        async with Node("run", "w", give_up_s=0.5) as plain:
            with pytest.raises(LinkLost, match=r"heard nothing for give_up_s=0\.5"):
                await plain.outlet(hub.address, "s", bytes)
        async with Node("run", "worker", load_security(run_dir / "keys", "worker")) as worker:
            with pytest.raises(SecurityError, match="does not own the run's server key"):
                await worker.hub(StreamSpec("s", "tcp://127.0.0.1:0"), ignore)
        assert hub.stats().accepted == 1


async def test_a_key_is_for_one_name(run_dir: Path) -> None:
    create_keys(run_dir / "keys", [])
    security = load_security(run_dir / "keys")
    async with asyncio.timeout(120), Node("run", "hub", security) as node:
        hub = await node.hub(StreamSpec("s", "tcp://127.0.0.1:0"), ignore)
        topic = await node.topic_server("tcp://127.0.0.1:0")
        add_client(run_dir / "keys", "reward-0", run_dir / "its")  # the server listens already
        assert (run_dir / "its").stat().st_mode & 0o777 == 0o700
        own = load_security(run_dir / "its", "reward-0")
        async with Node("run", "reward-0", own) as honest:
            await (await honest.outlet(hub.address, "s", bytes)).send(b"x", "k")
            await (await honest.topic(topic.address)).publish("k", b"v")
        async with Node("run", "train-0", own, give_up_s=0.5) as liar:
            with pytest.raises(LinkLost, match=r"heard nothing for give_up_s=0\.5"):
                await liar.outlet(hub.address, "s", bytes)
            with pytest.raises(LinkLost, match=r"heard nothing for give_up_s=0\.5"):
                await liar.topic(topic.address)
        assert hub.stats().accepted == 1


async def test_the_key_of_a_chain_is_for_the_names_of_its_replicas_alone(run_dir: Path) -> None:
    create_keys(run_dir / "keys", [])
    async with asyncio.timeout(120), Node("run", "hub", load_security(run_dir / "keys")) as node:
        hub = await node.hub(StreamSpec("s", "tcp://127.0.0.1:0"), ignore)
        add_client(run_dir / "keys", "generate-0", run_dir / "its", ["reward-0"])
        own = load_security(run_dir / "its", "generate-0")
        async with Node("run", "generate-0", own) as chain:
            for name in ("generate-0", "reward-0"):
                await (await chain.outlet(hub.address, "s", bytes, replica=name)).send(b"x", name)
        for name in ("train-0", "reward-0+generate-0", "generate-0+reward-0"):
            async with Node("run", name, own, give_up_s=0.5) as liar:
                with pytest.raises(LinkLost, match=r"heard nothing for give_up_s=0\.5"):
                    await liar.outlet(hub.address, "s", bytes)
        assert hub.stats().accepted == 2


async def test_streams_and_keys_of_the_topic_are_for_certain_stages(run_dir: Path) -> None:
    async with asyncio.timeout(120), Node("run", "hub") as node:
        stages = {"producers": frozenset({"generate", "tools"}), "consumers": frozenset({"reward"})}
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s", **stages), ignore)
        writers = {"weights": frozenset({"train"}), "config": frozenset[str]()}
        topic = await node.topic_server(f"ipc://{run_dir}/t", writers=writers)
        topic.publish("config", b"of the run")
        await node.outlet(hub.address, "s", bytes, replica="tools-3")
        await node.inlet(hub.address, "s", bytes, replica="reward-0")
        for replica in ("reward-0", "generate", "generate-x-0", "train-0"):
            with pytest.raises(LinkRefused, match=r"no producer of stream 's', whose producers are the stages gen"):
                await node.outlet(hub.address, "s", bytes, replica=replica)
        with pytest.raises(LinkRefused, match=r"no consumer of stream 's', whose consumers are the stages reward"):
            await node.inlet(hub.address, "s", bytes, replica="generate-0")
        train = await node.topic(topic.address, replica="train-0")
        await train.publish("weights/pinned/1", b"1")
        for key, who in (("weights", "only train may"), ("config", "only the controller may")):
            worker = await node.topic(topic.address, replica="reward-0")
            await worker.publish("stats/reward-0", b"2")
            await worker.publish("weights_of_mine", b"4")  # another key, which only begins alike
            with pytest.raises(LinkRefused, match=rf"'reward-0' may not write '{key}' on the topic; {who}"):
                await worker.publish(key, b"3")
        assert dict(topic.items("")) == {
            "config": b"of the run", "weights/pinned/1": b"1", "stats/reward-0": b"2", "weights_of_mine": b"4"
        }  # fmt: skip


async def test_another_run_is_refused(run_dir: Path) -> None:
    async with asyncio.timeout(120), Node("run", "hub") as node:
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), ignore)
        topic = await node.topic_server(f"ipc://{run_dir}/t")
        async with Node("other", "w") as other:
            with pytest.raises(LinkRefused, match="'w' is of run 'other', stream 's' of 'run'"):
                await other.outlet(hub.address, "s", bytes)
            with pytest.raises(LinkRefused, match="is of run 'other'"):
                await other.topic(topic.address)


def test_entries_of_a_topic_have_limits() -> None:
    check_entry("k" * KEY_LIMIT, bytes(VALUE_LIMIT))
    with pytest.raises(transport.MessageTooLarge, match=r"'stats/a' has 67108865 bytes.*publish a reference"):
        check_entry("stats/a", bytes(VALUE_LIMIT + 1))
    for key in ("", "k" * (KEY_LIMIT + 1)):
        with pytest.raises(transport.MessageInvalid, match=f"has {len(key)} characters; use 1 to {KEY_LIMIT}"):
            check_entry(key, b"")


async def test_a_fork_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(run_dir) as (node, hub):
        outlet = await node.outlet(hub.address, "s", bytes)
        inlet = await node.inlet(hub.address, "s", bytes)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(UsageError, match="was forked after its node was opened"):
                await outlet.send(b"", "k")
            with pytest.raises(UsageError, match="was forked"):
                await inlet.receive()
            with pytest.raises(UsageError, match="was forked"):
                await node.inlet(hub.address, "s", bytes)


def hostile_frames(rng: random.Random) -> list[bytes]:
    """A multipart message that no honest peer sends: noise, damaged headers, lying headers."""
    codec = Codec(bytes)
    digest = rng.choice([codec.hash, "unknown"])
    hello = Hello(wire.PROTOCOL, "run", "s", "producer", "evil", rng.randbytes(4).hex(), codec.name, digest)
    report = Report(rng.getrandbits(60), 1, 2**62, 2**62, 2**62, (1, 2, 3), tuple(range(50)), (), tuple(range(9)))
    honest = [
        wire.encode(hello),
        wire.encode(Put(rng.getrandbits(40), "k" * rng.randint(0, 2000), rng.getrandbits(30), 0)),
        wire.encode(report),
        wire.encode(wire.Fin(True)),
        wire.encode(wire.Drain()),
        wire.encode(wire.Ping()),
        msgspec.msgpack.encode([2, -1, "k", -5, 2**64 - 1]),
        b"\x91" * rng.randint(1, 100_000),
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x03\xa2\xff\xfe",
        b"",
    ]
    header = bytearray(rng.choice(honest))
    for _ in range(rng.choice([0, 0, 1, 3])):
        if header:
            header[rng.randrange(len(header))] = rng.getrandbits(8)
    frames = [bytes(header), *(rng.randbytes(rng.randint(0, 300)) for _ in range(rng.choice([0, 1, 1, 2, 5])))]
    return frames if rng.random() < 0.9 else [rng.randbytes(rng.randint(0, 2000))]


async def test_hostile_frames_harm_nobody(run_dir: Path) -> None:
    letters: list[DeadLetter] = []
    rng = random.Random(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with served(run_dir, letters, max_message_bytes=1 << 16) as (node, hub):
            topic = await node.topic_server(f"ipc://{run_dir}/t")
            outlet = await node.outlet(hub.address, "s", bytes)
            inlet = await node.inlet(hub.address, "s", bytes)
            client = await node.topic(topic.address)
            for round_number in range(20):
                evil = context.socket(zmq.DEALER)
                evil.set(zmq.LINGER, 0)
                evil.connect(hub.address if round_number % 4 else topic.address)
                for _ in range(100):
                    evil.send_multipart(hostile_frames(rng))
                if round_number == 5:
                    evil.send(b"x" * (1 << 20))  # beyond the socket's limit: the connection is dropped
                await outlet.send(b"good", str(round_number))
                lease = await take_one(inlet)
                assert (lease.message, lease.key) == (b"good", str(round_number))
                lease.done()
                await client.publish("k", b"%d" % round_number)
                evil.close()
            await asyncio.sleep(0.2)  # let the rest of the noise arrive
            assert hub.stats().malformed > 100
            assert letters
            assert topic.get("k") == b"19"
            assert hub.stats().settled >= 20
        assert all(letter.reason.startswith("quarantined: ") for letter in letters)
    finally:
        context.term()


async def test_a_sender_that_skips_the_size_check_harms_only_itself(run_dir: Path) -> None:
    async with served(run_dir, max_message_bytes=1000) as (node, hub):
        reckless = await node.outlet(hub.address, "s", bytes)
        good = await node.outlet(hub.address, "s", bytes)
        for number, size in enumerate((2000, 2 << 20)):  # beyond the stream's limit, beyond the socket's
            reckless.core.offer(f"big{number}", size, 0, b"x" * size)
        reckless.link.wake()
        for number in range(20):
            await good.send(b"fine", str(number))
        assert hub.stats().accepted == 20


async def test_a_message_of_too_many_frames_is_not_kept(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq bounds each frame, and neither how many a message has nor what they sum up to."""
    letters: list[DeadLetter] = []
    monkeypatch.setattr(zmq_link, "FRAMES_LIMIT", 50)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with served(run_dir, letters, max_message_bytes=1 << 20) as (node, hub):
            outlet = await node.outlet(hub.address, "s", bytes)
            evil = context.socket(zmq.DEALER)
            evil.set(zmq.LINGER, 0)
            evil.connect(hub.address)
            codec = Codec(bytes)
            hello = wire.encode(Hello(wire.PROTOCOL, "run", "s", "producer", "evil", "evil", codec.name, codec.hash))
            many, large = [b"x"] * 51, [b"x" * (1 << 20)] * 4  # 3 MiB and a little more are what the socket lets pass
            evil.send(hello)
            for number, frames in enumerate((many, large), 1):
                size = sum(map(len, frames))
                evil.send_multipart([wire.encode(Put(number, f"evil{number}", size, 0)), *frames])
            while hub.stats().malformed < 2:  # noqa: ASYNC110 - what counters say has no event
                await asyncio.sleep(0.01)
            await outlet.send(b"fine", "good")
            assert (hub.stats().accepted, hub.stats().malformed) == (1, 2)
            evil.close()
        assert [(letter.key, letter.body) for letter in letters] == [("", b""), ("", b"")]
    finally:
        context.term()


async def test_extras_beyond_the_limit_are_refused_before_they_are_sent(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_port, "FRAMES_LIMIT", 3)
    async with served(run_dir) as (node, hub):
        outlet = await node.outlet(hub.address, "s", list[Extra])
        extra = np.zeros(2).view(Extra)
        await outlet.send([extra, extra], "two")
        with pytest.raises(MessageInvalid, match="message 'three' has 3 extras, at most 2 travel with it"):
            await outlet.send([extra, extra, extra], "three")


async def test_a_route_to_no_peer_is_reported(run_dir: Path) -> None:
    """ROUTER_MANDATORY: otherwise the message would vanish and the lease would have to run out."""
    async with served(run_dir) as (_, hub):
        assert hub.link.send(b"nobody", wire.Who()) is False


async def test_an_error_in_an_owner_task_ends_the_node(run_dir: Path) -> None:
    def broken(letter: DeadLetter) -> None:
        raise RuntimeError("the dead-letter callback is broken")

    async def run() -> None:
        async with asyncio.timeout(120), Node("run", "node", close_s=0.2) as node:
            hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s"), broken)
            inlet = await node.inlet(hub.address, "s", bytes)
            outlet = await node.outlet(hub.address, "s", bytes)
            await outlet.send(b"x", "k")
            lease = await take_one(inlet)
            lease.poison("no")
            await inlet.receive()

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert isinstance(raised.value.exceptions[0], RuntimeError)
    assert "callback is broken" in str(raised.value.exceptions[0])


async def test_bytes_go_to_holders_of_a_key_alone(run_dir: Path) -> None:
    security, intruding = keys_of(run_dir)
    async with asyncio.timeout(120), Node("run", "server", security) as node:
        server = await node.byte_server("tcp://127.0.0.1:0")
        blob = server.serve("weights/1", b"secret")
        async with Node("run", "w", intruding, give_up_s=5) as intruder:
            client = await intruder.byte_client(server.address)
            with pytest.raises(LinkRefused, match=r"refused this node: its allow-list does not contain .* add the key"):
                await client.stat("weights/1")
        async with Node("run", "w", give_up_s=0.5) as plain:
            client = await plain.byte_client(server.address)
            with pytest.raises(LinkLost, match=r"silent for give_up_s=0\.5 while 'weights/1' was fetched"):
                await client.stat("weights/1")
        assert (server.chunks, server.malformed) == (0, 0), "nothing of theirs was decoded"
        async with Node("other", "w", load_security(run_dir / "keys", "worker")) as other:
            client = await other.byte_client(server.address)
            with pytest.raises(BlobGone, match=r"asked by run 'other'.* this byte server is of run 'run'"):
                await client.stat("weights/1")
        async with Node("run", "worker", load_security(run_dir / "keys", "worker")) as worker:
            client = await worker.byte_client(server.address)
            buffer = bytearray(blob.size)
            await client.fetch(Transfer(blob, memoryview(buffer)))
        assert (bytes(buffer), server.chunks) == (b"secret", 1)
