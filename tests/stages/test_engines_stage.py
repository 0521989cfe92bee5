"""The engines stage: what survives its loss, lost engines, complaints, and fetchers on other nodes."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.engines.client import EngineClient
from models.engines.protocol import Load
from models.errors import EngineRefused, TornWeights
from models.weights.shared_memory_reader import SlotManifest, SlotReader
from stages.base import Activity
from stages.engines.load_watch import CALM_USAGE, CUT, HIGH_USAGE, STEPS, IdleMeter, Limit, LoadWatch
from stages.engines.stage import END, FetcherStage
from stages.messages import WeightsAnnouncement
from stages.ports import Ports, SameHost
from stages.topic_values import EngineAddress, carrying
from tests.stages.engine_rig import carried, core_of
from tests.stages.fleet_rig import Fleet, Update, open_fleet
from tests.stages.stage_rig import idle, make_context, until


def refuse_updates(one: Fleet) -> list[str]:
    """The first engine takes no weights from now on; returns the labels that it was given."""
    tries: list[str] = []
    url = one.servers[0].url

    async def refuse(update: Update) -> None:
        if update.url == url:
            tries.append(str(update.label))
            raise EngineRefused(url, 400, "no room for them")

    one.before_updates(refuse)
    return tries


async def test_nothing_is_reported_about_an_engine_that_died_while_its_slot_was_verified(fleet: Fleet) -> None:
    """Its supervisor drops what was known of it; the failed update must not bring that back."""
    go, reading = threading.Event(), threading.Event()
    original = SlotReader.__init__

    def read(self: SlotReader, claim: SlotManifest, *, anew: bool = True) -> None:
        reading.set()
        go.wait()
        original(self, claim, anew=anew)

    await fleet.serving(2)
    fleet.patch.setattr(SlotReader, "__init__", read)
    fleet.weights.publish(1)
    await until(reading.is_set)
    await fleet.servers[0].__aexit__(None, None, None)
    fleet.rig.lose_engine(0)
    await idle()
    go.set()
    await fleet.landed(1, engine=1)
    await until(lambda: fleet.failures(0) > 0)
    await idle()
    assert fleet.rig.topic.get("directory/engine-0") is None
    assert list(carrying(fleet.rig.topic)) == ["engine-1"], "the gate counts the engines that are there"
    again = await fleet.engine(0, incarnation=1)
    await fleet.landed(1)
    assert (core_of(again).label, fleet.entry(0).incarnation) == ("0.1", 1)


@pytest.mark.parametrize("left", ["updating", "paused", "mislabelled", "loading", "by an earlier start of the run"])
async def test_an_engine_that_was_left_in_doubt_is_brought_up_in_full_and_resumed(fleet: Fleet, left: str) -> None:
    server = await fleet.engine(0)
    announcement = await fleet.land(0)
    await fleet.lose_stage()
    if left == "paused":
        await core_of(server).pause("in_place")
    elif left == "mislabelled":
        await core_of(server).relabel("0.7")
    elif left == "by an earlier start of the run":  # it names the very version that comes, and nobody knows it
        fleet.rig.topic.drop("directory/engine-0")
        address = EngineAddress("engine-0", server.url, 0, taken_over=True)
        fleet.rig.topic.publish("engine/engine-0", msgspec.msgpack.encode(address))
        fleet.weights.announce(msgspec.structs.replace(announcement, transport="tensor"))
        await core_of(server).pause("abort")
    else:
        state = {"updating": {"state": "updating", "fetching": 1}, "loading": {"state": "loading"}}[left]
        entry = msgspec.structs.replace(fleet.entry(), **state)
        fleet.rig.topic.publish("directory/engine-0", msgspec.msgpack.encode(entry))

    async def look(_: Update) -> None:
        assert not fleet.served(), "nothing is sent to it before it is certain again"

    loads = fleet.before_updates(look)
    await fleet.start_stage()
    await until(lambda: bool(fleet.stage.engines) and fleet.control().current is not None)
    await fleet.landed(0)
    assert [update.label for update in loads] == ["0.0"]
    assert (fleet.labels(), core_of(server).paused, fleet.entry().fetching) == (["0.0"], False, -1)


async def test_an_engine_that_takes_no_weights_goes_to_its_supervisor_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fleet(tmp_path, monkeypatch, max_failures=3) as one:
        await one.serving(2)
        tries = refuse_updates(one)
        monkeypatch.setattr("stages.engines.weight_transfer.TURN_TIMEOUT_S", 0.0)
        one.weights.publish(1)
        reported = await one.rig.complaint()
        assert (reported.engine, reported.incarnation, tries) == ("engine-0", 0, ["0.1"] * 3)
        assert reported.reason.startswith("3 failures in a row: the update to version 1 failed:")
        assert "no room for them" in reported.reason
        assert (one.entry().state, one.entry().detail) == ("away", reported.reason)
        await one.landed(1, engine=1)
        one.weights.publish(2)
        await one.landed(2, engine=1)
        await idle()
        assert len(tries) == 3, "nothing is asked of it any more"
        one.rig.lose_engine(0)
        again = await one.engine(0, incarnation=1)
        await one.landed(2)
        assert core_of(again).label == "0.2"


async def test_a_retry_does_not_wait_for_an_engine_that_is_lost(fleet: Fleet) -> None:
    await fleet.engine(0)
    refuse_updates(fleet)
    fleet.patch.setattr("stages.engines.engine_control.RETRY_S", 1e6)
    fleet.weights.publish(0)
    await until(lambda: fleet.failures() == 1)
    fleet.rig.lose_engine(0)
    await fleet.engine(0, incarnation=1)
    await fleet.landed(0)


async def test_at_a_drain_all_engines_give_back_what_they_run_and_the_stage_ends_on_command(fleet: Fleet) -> None:
    await fleet.serving(2)
    calls = fleet.count_calls()
    fleet.rig.topic.publish("drain", b"the run is complete")
    await until(lambda: len(calls) == 2)
    await idle()
    assert ([path for _, path in calls], fleet.running.done()) == (["/abort_request"] * 2, False)
    fleet.rig.topic.publish(END, b"")
    await fleet.running


class Watched:
    """A look at loads that the test makes up."""

    def __init__(self, one: Fleet) -> None:
        self.one, self.load, self.activity = one, Load(), Activity()
        one.patch.setattr(EngineClient, "loads", self._loads)

    async def _loads(self) -> list[Load]:
        return [self.load]

    async def look(self, usage: float, running: int = 0, **load: Any) -> int:
        """The limit in the engine's entry after it."""
        self.load = Load(token_usage=usage, num_running_reqs=running, **load)
        if not hasattr(self, "watch"):
            self.topic = await self.one.rig.node.topic(self.one.rig.topic.address, replica="watch")
            self.watch = LoadWatch(self.one.config, self.one.stage.engines, self.activity)
        await self.watch.look(self.topic)
        return self.one.entry().limit


async def test_a_limit_that_follows_the_load_travels_in_the_entry(fleet: Fleet) -> None:
    watched = Watched(fleet)
    await fleet.serving()
    most = fleet.config.rollout.server_concurrency
    assert fleet.entry().limit == most
    assert await watched.look(0.99, 80, num_waiting_reqs=20, busy_s=3.0) == 75, "three quarters of what is in flight"
    extra = watched.activity.extra
    assert (extra["engine_busy_s"], extra["in_flight_limit"], extra["limit_cuts"]) == (3.0, 75.0, 1.0)
    fleet.rig.topic.publish("retracted/generate-0", b"2")
    await idle()
    assert await watched.look(0.85, 60) == 45, "its clients were told of retractions"
    assert await watched.look(0.85, 40) == 45, "each counts once"
    assert await watched.look(0.1) == 45 + most // 32
    assert fleet.entry().version == carried(fleet.rig) == 0
    go, _ = await fleet.held_in_update()
    assert await watched.look(0.99, 40) == 45 + most // 32, "an engine that is being updated is not judged"
    go.set()
    await fleet.landed(1)
    assert await watched.look(0.99, 40) == 30


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


async def test_each_node_fetches_a_version_once_and_its_engines_load_it_from_there(
    fleet: Fleet, tmp_path: Path
) -> None:
    nodes = [await node(fleet, f"fetcher-{i}", tmp_path) for i in range(2)]
    for index, fetcher in enumerate(["", "fetcher-0", "fetcher-1", "fetcher-1"]):
        await fleet.engine(index, fetcher=fetcher)
    loaded = fleet.before_updates()
    for version in range(3):
        slot = await fleet.land(version)
        homes = [str(there.weights.home / slot.label) for there in nodes]
        assert sorted(load.path for load in loaded) == sorted([slot.path, homes[0], homes[1], homes[1]])
        loaded.clear()
    assert fleet.labels() == ["0.2"] * 4
    wanted = {"0.0": 1, "0.1": 1, "0.2": 1}
    assert [dict(there.weights.fetched) for there in nodes] == [wanted, wanted]
    assert [fleet.failures(index) for index in range(4)] == [0] * 4


async def test_a_fetcher_that_is_killed_finds_its_order_again(fleet: Fleet, tmp_path: Path) -> None:
    """Killed once the engine stands still: what takes its place puts the weights in, and the engine goes on."""
    there = await node(fleet, "fetcher-0", tmp_path)
    [server] = await fleet.serving(1, ["fetcher-0"])
    hold, _ = await fleet.held_in_update()
    assert core_of(server).paused
    await there.lose()
    hold.set()
    await idle()
    assert core_of(server).paused, "nothing goes on before it is certain what it carries"
    await there.start()
    await fleet.landed(1)
    assert (core_of(server).label, core_of(server).paused, fleet.failures()) == ("0.1", False, 0)


async def test_what_a_lost_engines_stage_had_ordered_is_taken_back(fleet: Fleet, tmp_path: Path) -> None:
    there = await node(fleet, "fetcher-0", tmp_path)
    [server] = await fleet.serving(1, ["fetcher-0"])
    there.weights.broken = "not yet"
    fleet.weights.publish(1)
    await until(lambda: fleet.failures() > 0)
    await fleet.lose_stage()
    there.weights.broken = ""
    await fleet.start_stage()
    await fleet.landed(1)
    await idle()
    assert fleet.rig.topic.get("order/fetcher-0/engine-0") == b""
    assert (core_of(server).label, core_of(server).paused) == ("0.1", False)


async def test_an_engine_that_is_lost_on_the_way_blocks_no_other(fleet: Fleet, tmp_path: Path) -> None:
    """Its whole node is gone, so that no answer will ever come; it comes back on another fleet."""
    gone = await node(fleet, "fetcher-0", tmp_path)
    await fleet.serving(2, ["fetcher-0"])
    await gone.lose()
    fleet.weights.publish(1)
    await until(lambda: fleet.entry(0).fetching == 1)
    fleet.rig.lose_engine(0)
    await fleet.landed(1, engine=1)
    await node(fleet, "fetcher-1", tmp_path)
    again = await fleet.engine(0, incarnation=1, fetcher="fetcher-1")
    await fleet.landed(1)
    assert core_of(again).label == "0.1"


# The load of engines: their idle share, and the limit of samples in flight.


def test_what_was_sampled_before_the_first_second_counted_does_not_mix_with_the_account() -> None:
    meter = IdleMeter()
    meter.observe_idle(0.0, 0.0, 0)
    meter.observe_idle(2.0, 0.0, 1)
    assert meter.observe_idle(4.0, 0.5, 1) is None
    assert meter.observe_idle(6.0, 1.5, 1) == pytest.approx(0.5)


def test_an_engine_that_was_started_anew_begins_anew() -> None:
    meter = IdleMeter()
    meter.observe_idle(0.0, 100.0, 1)
    meter.observe_idle(2.0, 102.0, 1)
    assert meter.observe_idle(4.0, 1.0, 1) is None
    assert meter.observe_idle(6.0, 3.0, 1) == 0.0
    meter.forget()
    assert meter.observe_idle(8.0, 3.0, 1) is None


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 20.0), st.integers(0, 3)), max_size=30))
def test_a_share_is_a_share(looks: list[tuple[float, float, int]]) -> None:
    meter, now = IdleMeter(), 0.0
    for step, busy, running in looks:
        now += step
        share = meter.observe_idle(now, busy, running)
        assert share is None or 0.0 <= share <= 1.0


Reading = tuple[float, int, int]  # usage, waiting, retractions
READINGS = st.tuples(st.floats(0.0, 1.0), st.integers(0, 1000), st.integers(0, 3))
CALM, FULL = (0.1, 0, 0), (HIGH_USAGE, 0, 0)


@settings(deadline=None)
@given(most=st.integers(1, 600), looks=st.lists(st.tuples(READINGS, st.integers(0, 2000)), max_size=60))
def test_the_limit_stays_within_its_bounds_and_takes_one_step_at_a_time(
    most: int, looks: list[tuple[Reading, int]]
) -> None:
    limit = Limit(most)
    for reading, in_flight in looks:
        before = limit.value
        after = limit.observe(*reading, in_flight)
        assert 1 <= after <= most
        assert after <= before + max(1, most // STEPS)
        if after < before:
            assert in_flight <= before, "the cut before had its effect"
            assert after == max(1, int(CUT * max(in_flight, 1)))
            assert reading[0] >= HIGH_USAGE or any(reading[1:])


@settings(deadline=None)
@given(most=st.integers(1, 600), looks=st.lists(st.tuples(READINGS, st.integers(0, 2000)), max_size=30))
def test_a_calm_engine_gets_all_its_samples_back(most: int, looks: list[tuple[Reading, int]]) -> None:
    limit = Limit(most)
    for reading, in_flight in looks:
        limit.observe(*reading, in_flight)
    for _ in range(2 * STEPS):
        limit.observe(*CALM, limit.value)
    assert limit.value == most


def test_a_full_cache_is_answered_once_until_the_samples_have_come_down() -> None:
    limit = Limit(100)
    assert limit.observe(*FULL, 80) == 60
    assert limit.observe(*FULL, 78) == 60, "what runs needs its time to end"
    assert limit.observe(*FULL, 60) == 45
    assert limit.cuts == 2
    assert limit.observe((HIGH_USAGE + CALM_USAGE) / 2, 0, 0, 45) == 45, "between the marks nothing changes"
    assert limit.observe(*CALM, 45) == 48
    limit.restart()
    assert limit.value == 100, "of an engine that was started anew"
