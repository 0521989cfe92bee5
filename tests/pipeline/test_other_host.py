"""Engines, generation and rewards on another host: nothing is shared with it but the network."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from launching import SIMULATED, SMALL, made_model, succeed_here
from namespace_launcher import THERE, NamespaceLauncher, NamespacesRefused, OtherHost, hidden
from scripted_run import Scripted, scripted
from test_kill import killed_after

import launch as program
import pipeline.run
from models.errors import TornWeights, WeightsError
from models.weights.shared_memory_reader import SlotReader
from models.weights.shared_memory_writer import SlotWriter
from pipeline.hosts import rendezvous
from pipeline.hosts.rendezvous import SOURCE, FetchedWeights, OfferedWeights, WeightsServer
from pipeline.record.journal import Audit, audit
from stages.messages import RolloutSlice, WeightsAnnouncement
from tests.models.weights.made_up import checkpoint, values
from transport import ByteServer, Node
from transport.errors import AddressRefused, LinkError, LinkRefused
from transport.security import create_keys, load_security


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OtherHost]:
    try:
        with OtherHost(*hidden(tmp_path / "run")) as made:
            yield made
    except NamespacesRefused as refused:
        pytest.skip(f"this machine has no namespaces for a second host: {refused}")


@pytest.fixture
def over(host: OtherHost, monkeypatch: pytest.MonkeyPatch) -> OtherHost:
    """Runs of this process place their processes on the other host."""
    launchers = functools.partial(NamespaceLauncher, {host: THERE})
    monkeypatch.setattr(pipeline.run, "run", functools.partial(pipeline.run.run, launchers=launchers))
    return host


def books_of(run_dir: Path, *flags: str) -> Audit:
    assert program.main(["--run-dir", str(run_dir), *flags]) == 0
    books = audit(run_dir / "ledger.jsonl")
    assert books.open == 0
    assert books.twice == ()
    return books


@pytest.mark.full
def test_engines_of_two_hosts_carry_the_same_weights_though_a_fetcher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither host sees a file of the trainer's or of the other; checksums of the engines' tensors are compared."""
    run_dir = tmp_path / "run"

    with contextlib.ExitStack() as stack:
        try:
            hosts = [stack.enter_context(OtherHost(*hidden(run_dir))) for _ in range(2)]
        except NamespacesRefused as refused:
            pytest.skip(f"this machine has no namespaces for other hosts: {refused}")
        launchers = functools.partial(NamespaceLauncher, dict(zip(hosts, [("engine-0",), ("engine-1",)], strict=True)))
        monkeypatch.setattr(pipeline.run, "run", functools.partial(pipeline.run.run, launchers=launchers))
        flags = ["--scale", "engine=2", "--check-weight-update-equal", "--num-rollout", "8"]
        with killed_after(run_dir, 2, "fetcher-1"):
            books = books_of(run_dir, *SMALL, *made_model(), *flags)
    assert books.outcomes["trained"] == 32
    assert json.loads((run_dir / "summary.json").read_text())["restarts"] == {"fetcher-1": 1}
    logs = {name: (run_dir / "logs" / f"{name}.log").read_text() for name in ("engines-0", "fetcher-0", "fetcher-1")}
    fetched = [re.findall(r"version (\d+): fetched", logs[name]) for name in ("fetcher-0", "fetcher-1")]
    assert len(fetched[0]) == len(set(fetched[0])), "each version once"
    assert all(versions[0] == "0" and int(versions[-1]) > 3 for versions in fetched), fetched
    assert "fetched" not in logs["engines-0"]
    for number, host in enumerate(hosts):
        assert f"http://{host.there}:" in (run_dir / "logs" / f"engine-{number}.log").read_text()
    assert "failed" not in logs["engines-0"]


@pytest.mark.slow
def test_weights_arrive_where_no_file_of_the_trainer_is_seen_and_a_peer_without_a_key_gets_nothing(
    over: OtherHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(run: Scripted) -> None:
        await run.until(lambda: run.runner.topic.get(SOURCE) is not None)
        topic = run.runner.topic.address
        train = run.controller.placement.addresses["train"]
        weights = msgspec.msgpack.decode(run.runner.topic.get(SOURCE) or b"", type=WeightsServer)
        bound = [topic, weights.address, train]
        assert all(address.startswith(f"tcp://{over.here}:") for address in bound)
        assert "|" in weights.address, "a key of the trainer's own"
        create_keys(tmp_path / "made", ["worker"])  # of the thief's own; what the run's server is called, anybody knows
        (tmp_path / "made" / "server.pub").write_text(load_security(run.keys[0]).server_public)
        for security in (load_security(tmp_path / "made", "worker"), None):
            async with Node(run.runner.entry.run_id, "thief", security, give_up_s=1.0, close_s=0.1) as node:
                with pytest.raises((LinkError, AddressRefused)):
                    await node.topic(topic)
                with pytest.raises((LinkError, AddressRefused)):
                    await node.outlet(train, "train", RolloutSlice)
                with pytest.raises((LinkError, AddressRefused)):
                    await (await node.byte_client(weights.address)).stat(weights.files[0])
        *_, its = run.runner.entry.process("reward-7").argv  # what each process of the run is given
        security = load_security(Path(its), "reward-7")
        async with Node(run.runner.entry.run_id, "reward-7", security, give_up_s=5.0, close_s=0.1) as node:
            there = await node.topic(topic)
            with pytest.raises(LinkRefused, match="'reward-7' may not write 'weights' on the topic; only train may"):
                await there.publish("weights", b"")
            with pytest.raises(LinkRefused, match="'reward-7' is no producer of stream 'train'"):
                await node.outlet(train, "train", RolloutSlice)
        async with Node(run.runner.entry.run_id, "train-0", security, give_up_s=1.0, close_s=0.1) as node:
            with pytest.raises(LinkError):
                await node.topic(topic)
        await run.steps(4)

    flags, run_dir = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "4000"], tmp_path / "run"
    scripted(monkeypatch, run_dir, script, lambda place: program.main(["--run-dir", str(place), *flags]))
    assert audit(run_dir / "ledger.jsonl").outcomes["trained"] >= 16
    logs = "".join(path.read_text() for path in (run_dir / "logs").glob("[efg]*.log"))
    assert all(f"version {version}: fetched" in logs for version in (0, 1))
    trace = {path.name.partition("-")[0] for path in (run_dir / "trace").iterdir()}
    assert "train" in trace
    assert not trace & {"generate", "reward"}, "the run directory is the other host's own"


@pytest.mark.full
@pytest.mark.parametrize(("there", "replicas"), [(True, 1), (True, 2), (False, 2)])
def test_sync_trains_the_same_batches_though_a_replica_is_killed(
    there: bool, replicas: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--num-rollout", "8"]
    alone = succeed_here(tmp_path / "alone", *flags).audit.batches
    assert len(alone) == 8
    if there:
        request.getfixturevalue("over")
    flags += ["--scale", f"generate={replicas}", "--scale", f"engine={replicas}"]
    with killed_after(tmp_path / "run", 2, "generate-0"):
        assert books_of(tmp_path / "run", *flags).batches == alone
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"] == {"generate-0": 1}


# Weights between hosts: fetched once, to the byte, and refused when they are not what was announced.


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotWriter]:
    with closing(SlotWriter(tmp_path / "slots", checkpoint(tmp_path / "source"))) as writer:
        yield writer


def write(slots: SlotWriter, version: int) -> WeightsAnnouncement:
    slot = slots.write(version, 0, iter(values(version).items()))
    return WeightsAnnouncement(0, version, slot.path, slot.digest, slot.generation)


def contents(announcement: WeightsAnnouncement) -> list[bytes]:
    slot = SlotReader(announcement)
    return [data.tobytes() for _, data in slot.tensors()]


Hosts = Callable[..., AbstractAsyncContextManager[tuple[OfferedWeights, FetchedWeights]]]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """The trainer's side, and the other, on hosts that are `apart` or the same."""

    @asynccontextmanager
    async def opened(*, apart: bool = True) -> AsyncIterator[tuple[OfferedWeights, FetchedWeights]]:
        async with Node("run", "controller") as home, Node("run", "engines-0", give_up_s=1.0) as away:
            topic = await home.topic_server(f"ipc://{tmp_path}/topic")
            offered = OfferedWeights(home, await home.topic(topic.address), "127.0.0.1")
            fetched = FetchedWeights(away, await away.topic(topic.address), f"copies-of-{uuid4().hex}", tmp_path)
            original = offered.offer

            async def as_of_its_host(slot: Path) -> None:
                with monkeypatch.context() as patch:
                    if apart:
                        patch.setattr(rendezvous, "host_id", lambda: "the trainer's")
                    await original(slot)

            monkeypatch.setattr(offered, "offer", as_of_its_host)
            try:
                yield offered, fetched
            finally:
                fetched.close()

    return opened


async def fetch(offered: OfferedWeights, fetched: FetchedWeights, one: WeightsAnnouncement) -> WeightsAnnouncement:
    """As over a topic: an announcement comes after the offer of its slot."""
    await offer(offered, fetched, one)
    return await fetched.local(one)


async def offer(offered: OfferedWeights, fetched: FetchedWeights, one: WeightsAnnouncement) -> None:
    slot, topic = Path(one.path), fetched._topic
    await offered.offer(slot)
    revision = 0
    async with asyncio.timeout(120):
        while f"{slot.name}/".encode() not in (topic.get(SOURCE) or b""):
            revision = await topic.wait(revision, SOURCE)


async def test_a_version_is_fetched_once_for_all_engines(slots: SlotWriter, hosts: Hosts) -> None:
    async with hosts() as (offered, fetched):
        for version in range(4):
            one = write(slots, version)
            first = await fetch(offered, fetched, one)
            chunks = offered._server.chunks
            others = await asyncio.gather(*(fetched.local(one) for _ in range(5)))
            assert {other.path for other in others} == {first.path} != {one.path}
            assert offered._server.chunks == chunks
            assert contents(first) == contents(one)
            assert (first.label, first.digest, first.generation) == (one.label, one.digest, one.generation)


async def test_on_the_trainers_host_a_slot_is_used_as_it_lies(slots: SlotWriter, hosts: Hosts) -> None:
    async with hosts(apart=False) as (offered, fetched):
        one = write(slots, 0)
        await offer(offered, fetched, one)
        assert await fetched.local(one) is one
        assert await offered.local(one) is one
        assert offered._server.chunks == 0


async def test_a_copy_is_offered_until_it_is_removed(slots: SlotWriter, hosts: Hosts, tmp_path: Path) -> None:
    async with hosts() as (offered, fetched):
        slot = write(slots, 0)
        copies = [msgspec.structs.replace(slot, path=str(tmp_path / f"evaluated-{number}")) for number in range(2)]
        for copy in copies:
            assert not fetched.kept(copy)
            shutil.copytree(slot.path, copy.path)
            assert contents(await fetch(offered, fetched, copy)) == contents(slot)
            assert fetched.kept(copy)
            shutil.rmtree(copy.path)
        assert [fetched.kept(copy) for copy in copies] == [False, True]
        held = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        assert not [name for name in held if f"{copies[0].path}/" in name], "it would keep the memory"


async def test_a_slot_that_is_overwritten_meanwhile_is_refused(slots: SlotWriter, hosts: Hosts) -> None:
    async with hosts() as (offered, fetched):
        old = write(slots, 0)
        await fetch(offered, fetched, old)
        old = write(slots, 1)
        await offer(offered, fetched, old)
        write(slots, 2)
        newest = write(slots, 3)  # in the place of version 1
        assert newest.path == old.path
        with pytest.raises(WeightsError):
            await fetched.local(old)
        assert contents(await fetched.local(newest)) == contents(newest)


async def test_a_trainer_that_is_gone_is_an_error_of_the_update(slots: SlotWriter, hosts: Hosts) -> None:
    """The engine goes on with what it has, and the update is tried again."""
    async with hosts() as (offered, fetched):
        await fetch(offered, fetched, write(slots, 0))
        second = write(slots, 1)
        await offer(offered, fetched, second)
        server = offered._server
        assert isinstance(server, ByteServer)
        await server.close()
        with pytest.raises(WeightsError, match=r"version 1 could not be fetched from tcp://127\.0\.0\.1"):
            await fetched.local(second)


async def test_a_fetch_from_a_trainer_that_is_gone_ends_when_another_one_offers(
    slots: SlotWriter, hosts: Hosts
) -> None:
    async with hosts() as (offered, fetched):
        fetched._node._give_up_s = None  # it would wait for ever
        one = write(slots, 0)
        await offer(offered, fetched, one)
        offered._server.shut(0)
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(expect_gone(fetched, one))
            while not fetched._turn.locked():  # noqa: ASYNC110  (a lock announces nothing)
                await asyncio.sleep(0.01)
            assert not task.done()
            offered._server, offered._files = None, {}
            await offered.offer(Path(one.path))
        assert contents(await fetched.local(one)) == contents(one)


async def expect_gone(fetched: FetchedWeights, one: WeightsAnnouncement) -> None:
    with pytest.raises(TornWeights, match="is gone; another one offers newer"):
        await fetched.local(one)
