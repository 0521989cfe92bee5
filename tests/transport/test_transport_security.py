"""Addresses, keys and hostile peers."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from tests.transport.memory_link import Extra, ignore, take_one, until
from transport import DeadLetter, Hub, Node, StreamSpec, wire, zmq_link
from transport import stream as stream_port
from transport.codec import Codec
from transport.errors import (
    AddressInUse,
    AddressInvalid,
    AddressRefused,
    BlobGone,
    LinkLost,
    LinkRefused,
    MessageInvalid,
    MessageTooLarge,
    UsageError,
)
from transport.security import Security, SecurityError, add_client, create_keys, load_security, parse_address, zap_reply
from transport.topic import VALUE_LIMIT, check_entry
from transport.wire import KEY_LIMIT, Hello, Put, Report


@asynccontextmanager
async def served(
    run_dir: Path, on_dead_letter: Callable[[DeadLetter], None] = ignore, **limits: int
) -> AsyncIterator[tuple[Node, Hub]]:
    """A stream of one node, which does not wait long for peers that are gone."""
    async with asyncio.timeout(120), Node("run", "node", close_s=0.2) as node:
        spec = StreamSpec("s", f"ipc://{run_dir}/s", **limits)  # type: ignore[arg-type]
        yield node, await node.hub(spec, on_dead_letter)


async def test_beyond_loopback_keys_are_needed() -> None:
    async with Node("run", "node") as node:
        for place in ("*", "0.0.0.0", "[::]", "192.0.2.1", "example.org"):
            words = r"will not bind tcp://.* without keys: .* give the node Security"
            with pytest.raises(AddressRefused, match=words):
                await node.hub(StreamSpec("s", f"tcp://{place}:0"), ignore)
            with pytest.raises(AddressRefused, match=words):
                await node.byte_server(f"tcp://{place}:0")
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
        ("tcp://10.0.0.1:5000|abc", "names a key of 3 characters, a Z85 key has 40"),
    ],
)
def test_bad_addresses_are_named(text: str, words: str) -> None:
    with pytest.raises(AddressInvalid, match=words):
        parse_address(text)
    address = parse_address(f"tcp://[::1]:5000|{'a' * 40}")
    assert (str(address), address.key) == ("tcp://[::1]:5000", "a" * 40)


async def test_an_address_is_taken_from_the_dead_alone_and_ipc_sockets_are_private(run_dir: Path) -> None:
    with socket.socket() as taken, socket.socket(socket.AF_UNIX) as dead:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (run_dir / "dead").mkdir(mode=0o700)
        dead.bind(str(run_dir / "dead" / "s"))
        dead.close()
        (run_dir / "open").mkdir()
        (run_dir / "open").chmod(0o755)
        async with Node("run", "node") as node:
            with pytest.raises(AddressInUse, match=rf"tcp://127.0.0.1:{port} is in use .* choose another, or port 0"):
                await node.hub(StreamSpec("s", f"tcp://127.0.0.1:{port}"), ignore)
            before = os.umask(0o022)
            hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/new/s"), ignore)
            assert stat.S_IMODE((run_dir / "new").stat().st_mode) == 0o700
            assert stat.S_IMODE((run_dir / "new" / "s").stat().st_mode) & 0o077 == 0
            assert os.umask(before) == 0o022, "other files get the rights that they had"
            with pytest.raises(AddressInUse, match="in use by another hub or process"):
                await node.hub(StreamSpec("s", hub.address), ignore)
            with pytest.raises(AddressInvalid, match=r"has mode 0755 .* chmod 700 it"):
                await node.hub(StreamSpec("s", f"ipc://{run_dir}/open/s"), ignore)
            of_dead = await node.hub(StreamSpec("s", f"ipc://{run_dir}/dead/s"), ignore)
            await node.outlet(of_dead.address, "s", bytes)


def test_key_files_are_private_and_complete(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_keys(run_dir / "keys", ["worker", "other"])
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
    (run_dir / "keys" / "link.key").symlink_to(run_dir / "keys" / "server.key")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    for name, words in (
        ("worker", "has mode 0644, others can read it"),
        ("nobody", r"cannot be read .* create_keys"),
        ("link", r"link.key' cannot be read \(Too many levels of symbolic links\)"),
        ("other", r"is owned by user \d+, who knows it; create new keys"),
    ):
        with pytest.raises(SecurityError, match=words):
            load_security(run_dir / "keys", name)


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


async def test_unknown_keys_and_plain_peers_are_refused(run_dir: Path) -> None:
    create_keys(run_dir / "keys", ["worker"])
    create_keys(run_dir / "stranger", [])
    security, worker = load_security(run_dir / "keys"), load_security(run_dir / "keys", "worker")
    stranger = Security(load_security(run_dir / "stranger").own, security.own.public)
    async with asyncio.timeout(120), Node("run", "hub", security) as node:
        hub = await node.hub(StreamSpec("s", "tcp://127.0.0.1:0"), ignore)
        server = await node.byte_server("tcp://127.0.0.1:0")
        (run_dir / "weights").write_bytes(b"secret")
        blob = server.serve("weights/1", run_dir / "weights")
        async with Node("run", "w", stranger) as intruder:
            with pytest.raises(LinkRefused, match="allow-list does not contain this node's key; add the key"):
                await intruder.outlet(hub.address, "s", bytes)
            with pytest.raises(LinkRefused, match=r"refused this node: its allow-list does not contain .* add the key"):
                await (await intruder.byte_client(server.address)).stat("weights/1")
        async with Node("run", "w", give_up_s=0.3) as plain:
            with pytest.raises(LinkLost, match=r"heard nothing for give_up_s=0\.3"):
                await plain.outlet(hub.address, "s", bytes)
            with pytest.raises(LinkLost, match=r"silent for give_up_s=0\.3 while 'weights/1' was fetched"):
                await (await plain.byte_client(server.address)).stat("weights/1")
        assert (server.chunks, server.malformed) == (0, 0), "nothing of theirs was decoded"
        async with Node("other", "w", worker) as other:
            with pytest.raises(BlobGone, match=r"asked by run 'other'.* this byte server is of run 'run'"):
                await (await other.byte_client(server.address)).stat("weights/1")
        async with Node("run", "worker", worker) as honest:
            await (await honest.outlet(hub.address, "s", bytes)).send(b"x", "k")
            with (run_dir / "copy").open("wb") as file:
                await (await honest.byte_client(server.address)).fetch(blob, file.fileno())
            with pytest.raises(SecurityError, match="does not own the run's server key"):
                await honest.hub(StreamSpec("s", "tcp://127.0.0.1:0"), ignore)
        assert (hub.stats().accepted, (run_dir / "copy").read_bytes(), server.chunks) == (1, b"secret", 1)


async def test_a_key_is_for_its_name_and_for_those_in_its_process(run_dir: Path) -> None:
    create_keys(run_dir / "keys", [])
    async with asyncio.timeout(120), Node("run", "hub", load_security(run_dir / "keys")) as node:
        hub = await node.hub(StreamSpec("s", "tcp://127.0.0.1:0"), ignore)
        topic = await node.topic_server("tcp://127.0.0.1:0")
        add_client(run_dir / "keys", "generate-0", run_dir / "its", ["reward-0"])  # the server listens already
        assert (run_dir / "its").stat().st_mode & 0o777 == 0o700
        own = load_security(run_dir / "its", "generate-0")
        async with Node("run", "generate-0", own) as honest:
            for name in ("generate-0", "reward-0"):
                await (await honest.outlet(hub.address, "s", bytes, replica=name)).send(b"x", name)
            await (await honest.topic(topic.address)).publish("k", b"v")
        for name in ("train-0", "reward-0+generate-0", "generate-0+reward-0"):
            async with Node("run", name, own, give_up_s=0.3) as liar:
                openings = liar.outlet(hub.address, "s", bytes), liar.topic(topic.address)
                refused = await asyncio.gather(*openings, return_exceptions=True)
                assert [type(error) for error in refused] == [LinkLost, LinkLost]
        assert hub.stats().accepted == 2


async def test_streams_and_keys_of_the_topic_are_for_certain_stages_of_the_run(run_dir: Path) -> None:
    async with asyncio.timeout(120), Node("run", "hub") as node:
        stages = {"producers": frozenset({"generate", "tools"}), "consumers": frozenset({"reward"})}
        hub = await node.hub(StreamSpec("s", f"ipc://{run_dir}/s", **stages), ignore)
        writers = {"weights": frozenset({"train"}), "config": frozenset[str]()}
        topic = await node.topic_server(f"ipc://{run_dir}/t", writers=writers)
        topic.publish("config", b"of the run")
        async with Node("other", "w") as other:
            with pytest.raises(LinkRefused, match="'w' is of run 'other', stream 's' of 'run'"):
                await other.outlet(hub.address, "s", bytes)
            with pytest.raises(LinkRefused, match="is of run 'other'"):
                await other.topic(topic.address)
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


def test_entries_of_a_topic_have_limits() -> None:
    check_entry("k" * KEY_LIMIT, bytes(VALUE_LIMIT))
    with pytest.raises(MessageTooLarge, match=r"'stats/a' has 67108865 bytes.*publish a reference"):
        check_entry("stats/a", bytes(VALUE_LIMIT + 1))
    for key in ("", "k" * (KEY_LIMIT + 1)):
        with pytest.raises(MessageInvalid, match=f"has {len(key)} characters; use 1 to {KEY_LIMIT}"):
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


Evil = Callable[[str], zmq.Socket[bytes]]


@pytest.fixture
def evil() -> Iterator[Evil]:
    """Connects sockets that keep to no rule."""

    def connect(address: str) -> zmq.Socket[bytes]:
        made = context.socket(zmq.DEALER)
        made.connect(address)
        return made

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield connect
    context.destroy(linger=0)


async def test_hostile_frames_harm_nobody(run_dir: Path, evil: Evil) -> None:
    letters: list[DeadLetter] = []
    rng = random.Random(1)
    async with served(run_dir, letters.append, max_message_bytes=1 << 16) as (node, hub):
        topic = await node.topic_server(f"ipc://{run_dir}/t")
        outlet = await node.outlet(hub.address, "s", bytes)
        inlet = await node.inlet(hub.address, "s", bytes)
        client = await node.topic(topic.address)
        for round_number in range(20):
            intruder = evil(hub.address if round_number % 4 else topic.address)
            for _ in range(100):
                intruder.send_multipart(hostile_frames(rng))
            if round_number == 5:
                intruder.send(b"x" * (1 << 20))  # beyond the socket's limit: the connection is dropped
            await outlet.send(b"good", str(round_number))
            lease = await take_one(inlet)
            assert (lease.message, lease.key) == (b"good", str(round_number))
            lease.done()
            await client.publish("k", b"%d" % round_number)
            intruder.close(0)
        await asyncio.sleep(0.2)  # let the rest of the noise arrive
        assert hub.stats().malformed > 100
        assert letters
        assert topic.get("k") == b"19"
        assert hub.stats().settled >= 20
    assert all(letter.reason.startswith("quarantined: ") for letter in letters)


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


async def test_a_message_of_too_many_frames_is_not_kept(
    run_dir: Path, evil: Evil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq bounds each frame, and neither how many a message has nor what they sum up to."""
    letters: list[DeadLetter] = []
    monkeypatch.setattr(zmq_link, "FRAMES_LIMIT", 50)
    async with served(run_dir, letters.append, max_message_bytes=1 << 20) as (node, hub):
        outlet = await node.outlet(hub.address, "s", bytes)
        intruder, codec = evil(hub.address), Codec(bytes)
        intruder.send(wire.encode(Hello(wire.PROTOCOL, "run", "s", "producer", "evil", "evil", codec.name, codec.hash)))
        many, large = [b"x"] * 51, [b"x" * (1 << 20)] * 4  # 3 MiB and a little more are what the socket lets pass
        for number, frames in enumerate((many, large), 1):
            size = sum(map(len, frames))
            intruder.send_multipart([wire.encode(Put(number, f"evil{number}", size, 0)), *frames])
        await until(lambda: hub.stats().malformed == 2)
        await outlet.send(b"fine", "good")
        assert (hub.stats().accepted, hub.stats().malformed) == (1, 2)
    assert [(letter.key, letter.body) for letter in letters] == [("", b""), ("", b"")]


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
        async with served(run_dir, broken) as (node, hub):
            inlet = await node.inlet(hub.address, "s", bytes)
            outlet = await node.outlet(hub.address, "s", bytes)
            await outlet.send(b"x", "k")
            (await take_one(inlet)).poison("no")
            await inlet.receive()

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert isinstance(raised.value.exceptions[0], RuntimeError)
    assert "callback is broken" in str(raised.value.exceptions[0])
