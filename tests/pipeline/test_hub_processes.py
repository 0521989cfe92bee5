"""Hubs in processes of their own: what the controller sees of them, and that their deaths lose nothing."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_servers import Told
from launching import SIMULATED, SMALL, finish, made_model, start
from test_kill import kill, wait_for_steps

import launch as program
from configs.load import load
from configs.schema import Config
from pipeline.graph import build
from pipeline.hosts import hub_process
from pipeline.hosts.hub_process import serve
from pipeline.hosts.launcher import ProcessSpec
from pipeline.hosts.rendezvous import CONFIG, Entry, spec_key, stream_address
from pipeline.hosts.replica import ReplicaSpec
from pipeline.hosts.stream_hub import FACTS_PREFIX, KEEPER, HubProcessSpec, facts_key, stream_key
from pipeline.hosts.stream_ports import PortSpec, StreamPorts
from pipeline.placement import HOLDERS, Placement
from pipeline.record.run_directory import RunDir
from pipeline.supervise import silence
from pipeline.supervise.hub_processes import HubProcesses
from pipeline.supervise.remote_hubs import Commands, Keeper, RemoteHub, ShardedHub
from pipeline.supervise.restarts import Restarts
from pipeline.supervise.weight_fetchers import WeightFetchers
from stages.base import TrainOptions
from stages.engines.stage import END
from transport import DeadLetter, Node, StreamSpec, TopicServer
from transport.ports.shards import shard_of, shards_of, stream_of
from transport.testing.net import until


class World:
    """The controller's side, and hub processes as tasks: one for each shard of a stream."""

    def __init__(self, node: Node, topic: TopicServer, directory: Path, shards: int) -> None:
        self.node, self.topic = node, topic
        self.letters: list[DeadLetter] = []
        self.specs = [
            StreamSpec(name, f"ipc://{directory}/{number}", max_attempts=1, senders_keep=True)
            for number, name in enumerate(shards_of("jobs", shards))
        ]
        self.spec = self.specs[0]
        self.hub = ShardedHub([RemoteHub(spec.name, Commands(f"hub-{i}", topic)) for i, spec in enumerate(self.specs)])
        self.keeper = Keeper(node, topic, {"jobs": bytes}, self.letters.append)
        self.entry = Entry("run", topic.address)

    async def hub_process(self, incarnation: int, number: int = 0) -> None:
        spec = HubProcessSpec((self.specs[number],), self.keeper.address, incarnation)
        self.topic.publish(spec_key(f"hub-{number}"), msgspec.msgpack.encode(spec))
        await serve(self.entry, f"hub-{number}")

    def ports(self, node: Node, replica: str) -> tuple[StreamPorts, PortSpec]:
        return StreamPorts(node, self.topic, replica), PortSpec("jobs", "", "builtins:bytes", shards=len(self.specs))


@asynccontextmanager
async def world(directory: Path, shards: int = 1) -> AsyncIterator[World]:
    directory.chmod(0o700)
    async with asyncio.timeout(30), Node("run", "controller-0") as node:
        topic = await node.topic_server(f"ipc://{directory}/topic", private=(FACTS_PREFIX,))
        topic.publish(CONFIG, msgspec.msgpack.encode(Config()))
        made = World(node, topic, directory, shards)
        await made.keeper.open(f"ipc://{directory}/hubs", made.specs)
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(made.keeper.run())
            yield made
            keeping.cancel()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A path of sockets is short."""
    with tempfile.TemporaryDirectory(prefix="h") as directory:
        yield Path(directory)


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def test_the_controller_asks_a_hub_elsewhere_as_one_of_its_own(short_dir: Path) -> None:
    async with world(short_dir) as w, asyncio.TaskGroup() as tasks:
        process = tasks.create_task(w.hub_process(0))
        address = await stream_address(w.topic, "jobs")
        outlet = await w.node.outlet(address, "jobs", bytes, replica="a-0")
        inlet = await w.node.inlet(address, "jobs", bytes, window_items=1, replica="b-0")
        for number in range(3):
            await outlet.send(b"x", f"{number}")
        lease = await inlet.receive()
        assert lease is not None
        assert sorted((held.key, held.holder) for held in await w.hub.account()) == [("0", "b-0"), ("1", ""), ("2", "")]
        w.hub.peer_lost("b-0")  # it is blamed, and one failure is enough
        await until(lambda: [letter.key for letter in w.letters] == ["0"])
        assert w.letters[0].body.endswith(b"x")
        lease.done()  # too late
        w.hub.finish()
        emptied = tasks.create_task(w.hub.wait_empty())
        while (lease := await inlet.receive()) is not None:
            assert not emptied.done()
            lease.done()
        await emptied
        stats = w.hub.stats()
        assert (stats.accepted, stats.settled, stats.dead_letters, stats.queued) == (3, 2, 1, 0)
        await end(process)


async def test_what_a_sender_left_is_kept_here_and_given_to_the_next_hub(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_process, "RESUME_S", 0.5)
    async with world(short_dir) as w, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(w.hub_process(0))
        address = await stream_address(w.topic, "jobs")
        async with Node("run", "a-0") as other:
            outlet = await other.outlet(address, "jobs", bytes)
            await outlet.send(b"body", "1")
        assert [held.key for held in await w.hub.account()] == ["1"], "its sender has left, with the hub's leave"
        await end(first)
        second = tasks.create_task(w.hub_process(1))
        inlet = await w.node.inlet(address, "jobs", bytes, replica="b-0")
        lease = await inlet.receive()
        assert lease is not None
        assert lease.message == b"body"
        assert w.hub.stats().accepted == 2, "the figures go on where those of the first ended"
        lease.done()
        w.hub.finish()
        assert await inlet.receive() is None
        assert w.letters == []
        await end(second)


async def test_shards_are_one_stream_and_one_of_them_may_die(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_process, "RESUME_S", 0.5)
    keys = [f"{group}/{part}" for group in range(6) for part in range(2)]
    counts = Counter(shard_of(key, 2) for key in keys)
    assert min(counts.values()) > 1
    async with world(short_dir, shards=2) as w, asyncio.TaskGroup() as tasks:
        processes = [tasks.create_task(w.hub_process(0, number)) for number in (0, 1)]
        async with Node("run", "a-0") as other:
            streams, port = w.ports(other, "a-0")
            outlet = await streams.outlet(port)
            for key in keys:
                await outlet.send(b"x", key)
        assert sorted(held.key for held in await w.hub.account()) == sorted(keys)
        streams, port = w.ports(w.node, "b-0")
        inlet = await streams.inlet(port)
        following = tasks.create_task(streams.follow())
        leases = [lease for _ in range(3) if (lease := await inlet.receive()) is not None]
        await end(processes[1])
        processes[1] = tasks.create_task(w.hub_process(1, 1))
        account = {held.key: held.holder for held in await w.hub.account()}
        assert sorted(account) == sorted(keys)
        assert all(account[lease.key] == "b-0" for lease in leases), "what was begun is held, also after the death"
        leases[0].poison("bad")
        await until(lambda: [(letter.stream, letter.key) for letter in w.letters] == [("jobs", leases[0].key)])
        for lease in leases[1:]:
            lease.done()
        w.hub.finish()
        emptied = tasks.create_task(w.hub.wait_empty())
        found = []
        while (lease := await inlet.receive()) is not None:
            assert not emptied.done()
            found.append(lease.key)
            lease.done()
        assert sorted([*found, *(lease.key for lease in leases)]) == sorted(keys), "each once"
        await emptied
        stats = w.hub.stats()
        assert (stats.queued, stats.leased, stats.dead_letters, stats.consumers) == (0, 0, 1, 1)
        assert stats.settled == len(keys) - 1
        for task in (following, *processes):
            await end(task)


async def test_a_port_that_connects_to_a_hub_that_dies_connects_to_the_next(short_dir: Path) -> None:
    async with world(short_dir) as w, asyncio.TaskGroup() as tasks:
        w.topic.publish(stream_key("jobs"), f"ipc://{short_dir}/nobody".encode())
        streams, port = w.ports(w.node, "a-0")
        opening = tasks.create_task(streams.outlet(port))
        await asyncio.sleep(0)
        assert not opening.done(), "nobody is there"
        process = tasks.create_task(w.hub_process(0))
        await opening
        await until(lambda: w.hub.stats().producers == 1)
        await end(process)


def placement(tmp_path: Path, *flags: str) -> Placement:
    config = load([*SMALL, *flags]).config
    with RunDir(tmp_path / secrets.token_hex(4)).open(resume=False) as rundir:
        graph = build(config)
        return Placement(config, rundir, graph, "id", model_path="m", train=TrainOptions(), vocab_size=None)


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_hold_no_more_of_a_replica_than_one_hub_but_all_of_one_that_joins(shards: int, tmp_path: Path) -> None:
    flags = ["--hub-processes", "3"]
    one = {spec.replica: spec for spec in placement(tmp_path, *flags).replicas()}
    placed = placement(tmp_path, *flags, "--hub-shards", str(shards))
    for names in placed.hub_processes.values():
        assert len(set(map(stream_of, names))) == len(names), "two shards of a stream are in no process together"
    for spec in placed.replicas():
        for name, port in spec.inlets.items():
            whole = one[spec.replica].inlets[name]
            assert port.shards == shards
            if spec.stage in HOLDERS:
                assert (port.window_items, port.window_bytes) == (whole.window_items, whole.window_bytes)
                assert port.window_items >= placed.room
            else:
                assert whole.window_items <= port.window_items * shards <= whole.window_items + shards
                assert whole.window_bytes <= port.window_bytes * shards <= whole.window_bytes + shards


class Started:
    """A process that does nothing by itself. Implements what is used of `Launcher` and `Handle`."""

    controller: str | None = None

    def __init__(self) -> None:
        self.starts, self.code, self.ended, self.log = 0, -9, asyncio.Event(), Path("hub-0.log")

    async def place(self, name: str, beside: str = "") -> None: ...

    async def spawn(self, spec: ProcessSpec) -> Started:
        self.starts += 1
        self.ended.clear()
        return self

    async def wait(self) -> int:
        await self.ended.wait()
        return self.code

    async def kill(self) -> int:
        self.end(-9)
        return -9

    def end(self, code: int) -> None:
        self.code = code
        self.ended.set()

    async def release(self, name: str) -> None: ...

    def last_line(self) -> str:
        return ""


async def test_a_hub_process_that_tells_nothing_is_ended_and_started_again(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "HANG_S", 1.0)
    started: Any = Started()
    async with world(short_dir) as w, asyncio.TaskGroup() as tasks:
        placement: Any = SimpleNamespace(rundir=SimpleNamespace(path=short_dir))
        processes = HubProcesses(placement, started, w.topic, {"hub-0": [w.spec]}, w.keeper.address)
        running = tasks.create_task(processes.run(w.entry, Restarts(Told(), 5)))
        for number in range(12):  # for longer than it may be silent
            w.topic.publish(facts_key("hub-0"), str(number).encode())
            await asyncio.sleep(0.1)
            assert started.starts == 1
        await until(lambda: started.starts == 2)
        told = msgspec.msgpack.decode(w.topic.get(spec_key("hub-0")) or b"", type=HubProcessSpec)
        assert told.incarnation == 1, "it waits for the peers of the one before"
        await end(running)


async def test_a_fetcher_that_tells_nothing_does_not_hold_the_engines_of_its_node(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "HANG_S", 1.0)
    started: Any = Started()
    started.controller = "10.0.0.1"
    async with world(short_dir) as w, asyncio.TaskGroup() as tasks:
        spec = ReplicaSpec("fetcher", "fetcher-0", "", 0, 1, 1, str(short_dir), {}, {})
        placement: Any = SimpleNamespace(rundir=SimpleNamespace(path=short_dir), replica=lambda *_: spec)
        fetchers = WeightFetchers(placement, w.topic, started, Restarts(Told(), 5), w.entry)
        fetchers.tasks = tasks
        assert fetchers.beside("engine-1", "10.0.0.2") == "fetcher-0"
        await until(lambda: started.starts == 1)
        await until(lambda: started.starts == 2)
        w.topic.publish(END, b"")
        started.end(0)  # well, as after the end of the run


def test_one_process_for_all_has_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        program.main(["--run-dir", str(tmp_path / "run"), *SMALL, "--runner", "inprocess", "--hub-processes", "2"]) == 2
    )
    assert "--hub-processes 2 wants processes, but --runner inprocess starts none" in capsys.readouterr().err


@pytest.mark.parametrize("processes", ["0", "2"])
def test_shards_want_a_process_each(processes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--hub-processes", processes, "--hub-shards", "3"]
    assert program.main(["--run-dir", str(tmp_path / "run"), *flags]) == 2
    said = capsys.readouterr().err
    assert f"--hub-shards 3 divides each stream among processes, but --hub-processes is {processes}" in said


def test_a_stage_may_not_be_called_as_a_part_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "named.toml"
    recipe.write_text(f'[[stage]]\nname = "{KEEPER}"\npath = "x:Y"\nafter = "reward"\n')
    flags = ["--config", str(recipe), *SMALL, "--hub-processes", "1"]
    assert program.main(["--run-dir", str(tmp_path / "run"), *flags]) == 2
    assert "stage.keeper has the name of a part of --hub-processes" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_hub_processes_lose_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "24", "--max-restarts", "20"]
    flags += ["--hub-processes", "2", "--hub-shards", "2"]
    process = start(run_dir, *flags)
    for steps, hub in ((2, "hub-0"), (8, "hub-1"), (23, "hub-0")):
        wait_for_steps(process, run_dir, steps)
        kill(run_dir, hub)
    done = finish(process, run_dir).check()
    assert (done.summary["groups"]["trained"], done.summary["groups"]["failed"]) == (96, 0)
    assert sum(done.summary["restarts"].values()) >= 2, "the end may come before the last of them is back"
    assert "its streams wait until it is back" in done.out + done.err
