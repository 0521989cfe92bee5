"""Engines of other nodes: the fetcher there brings the weights and puts them in, as the engines stage orders."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from configs.schema.rollout import UpdateConfig
from models.errors import TornWeights
from stages.engines.stage import FetcherStage
from stages.messages import WeightsAnnouncement
from stages.ports import Ports, SameHost
from stages.topic_values import Complaint
from tests.models.weights.made_up import checkpoint, values
from tests.stages.engine_rig import core_of
from tests.stages.fleet_rig import Fleet, TensorPublisher, Update, before_updates, fleet, hold_updates
from tests.stages.stage_rig import idle, make_config, make_context, until


class Elsewhere(SameHost):
    """A node that sees nothing of the trainer's: what it is to load is copied there. `broken`: why that fails."""

    def __init__(self, home: Path) -> None:
        self.home, self.fetched, self.broken = home, Counter[str](), ""

    async def local(self, announcement: WeightsAnnouncement) -> WeightsAnnouncement:
        if self.broken:
            raise TornWeights(self.broken)
        copy = self.home / announcement.label
        if not copy.exists():
            self.fetched[announcement.label] += 1
            shutil.copytree(announcement.path, copy)
        return msgspec.structs.replace(announcement, path=str(copy))


class Node:
    """A node other than the engines stage's, with its fetcher."""

    def __init__(self, one: Fleet, name: str, home: Path) -> None:
        self.one, self.name, self.weights = one, name, Elsewhere(home)
        self.lives = 0

    async def start(self) -> None:
        topic = await self.one.rig.node.topic(self.one.rig.topic.address, replica=f"{self.name}{self.lives}")
        self.lives += 1
        self.stage = FetcherStage(make_context(self.one.config, self.weights.home.parent, replica=self.name))
        self.running = asyncio.ensure_future(self.stage.run(Ports(self.name, {}, {}, topic, self.weights)))

    async def lose(self) -> None:
        self.running.cancel()
        await asyncio.wait((self.running,))
        await self.stage.close()


async def node(one: Fleet, name: str, tmp_path: Path) -> Node:
    found = Node(one, name, tmp_path / f"node-of-{name}")
    one.stack.push_async_callback(found.lose)
    await found.start()
    return found


@contextmanager
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Update]]:
    with monkeypatch.context() as patch:
        yield before_updates(patch)


async def test_each_node_fetches_a_version_once_and_its_engines_load_it_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        nodes = [await node(one, f"fetcher-{i}", tmp_path) for i in range(2)]
        for index, fetcher in enumerate(["", "fetcher-0", "fetcher-1", "fetcher-1"]):
            await one.engine(index, fetcher=fetcher)
        for version in range(3):
            with loads(monkeypatch) as loaded:
                slot = one.weights.publish(version)
                for index in range(4):
                    await one.landed(version, engine=index)
            homes = [str(there.weights.home / slot.label) for there in nodes]
            assert sorted(load.path for load in loaded) == sorted([slot.path, homes[0], homes[1], homes[1]])
        assert one.labels() == ["0.2"] * 4
        wanted = {"0.0": 1, "0.1": 1, "0.2": 1}
        assert [dict(there.weights.fetched) for there in nodes] == [wanted, wanted]
        assert [one.failures(index) for index in range(4)] == [0] * 4


async def test_a_fetcher_that_is_killed_finds_its_order_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed once the engine stands still: what takes its place puts the weights in, and the engine goes on."""
    async with fleet(tmp_path, monkeypatch) as one:
        there = await node(one, "fetcher-0", tmp_path)
        server = await one.engine(0, fetcher="fetcher-0")
        one.weights.publish(0)
        await one.landed(0)
        asked, hold, _ = hold_updates(monkeypatch)
        one.weights.publish(1)
        await asked.wait()
        assert core_of(server).paused
        await there.lose()
        hold.set()
        await idle()
        assert core_of(server).paused, "nothing goes on before it is certain what it carries"
        await there.start()
        await one.landed(1)
        assert (core_of(server).label, core_of(server).paused, one.failures()) == ("0.1", False, 0)


async def test_what_a_lost_engines_stage_had_ordered_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        there = await node(one, "fetcher-0", tmp_path)
        server = await one.engine(0, fetcher="fetcher-0")
        one.weights.publish(0)
        await one.landed(0)
        there.weights.broken = "not yet"
        one.weights.publish(1)
        await until(lambda: one.failures() > 0)
        await one.lose_stage()
        there.weights.broken = ""
        await one.start_stage()
        await one.landed(1)
        await idle()
        assert one.rig.topic.get("order/fetcher-0/engine-0") == b""
        assert (core_of(server).label, core_of(server).paused) == ("0.1", False)


async def test_an_engine_that_its_fetcher_cannot_serve_goes_to_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch, max_failures=3) as one:
        there = await node(one, "fetcher-0", tmp_path)
        for index, fetcher in enumerate(["fetcher-0", ""]):
            await one.engine(index, fetcher=fetcher)
        one.weights.publish(0)
        for index in range(2):
            await one.landed(0, engine=index)
        monkeypatch.setattr("stages.engines.weight_transfer.TURN_TIMEOUT_S", 0.0)
        there.weights.broken = "version 1 could not be fetched"
        with loads(monkeypatch) as loaded:
            slot = one.weights.publish(1)
            await one.landed(1, engine=1)
            await until(lambda: one.rig.topic.get("complaint/engine-0") is not None)
        assert [load.path for load in loaded] == [slot.path], "only the other engine"
        told = msgspec.msgpack.decode(one.rig.topic.get("complaint/engine-0") or b"", type=Complaint)
        assert told.reason.endswith("the update to version 1 failed: fetcher-0: version 1 could not be fetched")
        assert (one.labels(), one.entry().state) == (["0.0", "0.1"], "away")
        there.weights.broken = ""
        one.rig.lose_engine(0)
        again = await one.engine(0, incarnation=1, fetcher="fetcher-0")
        await one.landed(1)
        assert core_of(again).label == "0.1"


async def test_an_engine_that_is_lost_on_the_way_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its whole node is gone, so that no answer will ever come; it comes back on another one."""
    async with fleet(tmp_path, monkeypatch) as one:
        gone = await node(one, "fetcher-0", tmp_path)
        await one.engine(0, fetcher="fetcher-0")
        await one.engine(1)
        one.weights.publish(0)
        for index in range(2):
            await one.landed(0, engine=index)
        await gone.lose()
        one.weights.publish(1)
        await until(lambda: one.entry(0).fetching == 1)
        one.rig.lose_engine(0)
        await one.landed(1, engine=1)
        await node(one, "fetcher-1", tmp_path)
        again = await one.engine(0, incarnation=1, fetcher="fetcher-1")
        await one.landed(1)
        assert core_of(again).label == "0.1"


async def test_differences_are_put_together_on_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(update={"update_weight_transport": "delta"})
    update = msgspec.convert({"update_weight_transport": "delta"}, UpdateConfig)
    source = checkpoint(tmp_path / "source")
    async with fleet(tmp_path, monkeypatch, update=update, source=source) as one:
        nodes = [await node(one, f"fetcher-{i}", tmp_path) for i in range(2)]
        for index in range(2):
            await one.engine(index, fetcher=f"fetcher-{index}")
        publisher = TensorPublisher(config, tmp_path / "published", source, tmp_path / "run")
        one.stack.callback(publisher.close)
        topic = await one.rig.node.topic("topic", replica="trainer")
        for version in range(4):
            with loads(monkeypatch) as loaded:
                announcement = publisher.write_tensors(version, values(version))
                await publisher.announce(topic, SameHost(), announcement)
                for index in range(2):
                    await one.landed(version, engine=index)
            paths = {load.path for load in loaded}
            assert len(paths) == 2, "each node has a copy of its own"
            assert announcement.path not in paths
            assert all(Path(path).parent.name.startswith("sluice-mirror-") for path in paths), paths
        assert [one.failures(index) for index in range(2)] == [0, 0]
        assert nodes
