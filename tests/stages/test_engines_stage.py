"""The single owner of the engines: what outlives it, what it says of lost engines, and when it calls for help."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.engines.client import EngineClient
from models.engines.protocol import Load
from models.errors import EngineRefused
from models.weights.shared_memory_reader import SlotManifest, SlotReader
from stages.base import Activity
from stages.engines.load_watch import LoadWatch
from stages.engines.stage import END
from stages.topic_values import Complaint, EngineAddress, carrying
from tests.stages.engine_rig import carried, core_of
from tests.stages.fleet_rig import Fleet, Update, before_updates, fleet, hold_updates
from tests.stages.stage_rig import idle, until


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that engines are asked from now on."""
    paths: list[str] = []
    original = EngineClient.call

    async def call(client: EngineClient, method: str, path: str, *args: Any, **options: Any) -> bytes:
        paths.append(path)
        return await original(client, method, path, *args, **options)

    monkeypatch.setattr(EngineClient, "call", call)
    return paths


def refuse_updates(monkeypatch: pytest.MonkeyPatch, url: str) -> list[str]:
    """The engine at the address takes no weights from now on; returns the labels that it was given."""
    tries: list[str] = []

    async def refuse(update: Update) -> None:
        if update.url == url:
            tries.append(str(update.label))
            raise EngineRefused(url, 400, "no room for them")

    before_updates(monkeypatch, refuse)
    return tries


def complaint(one: Fleet, engine: int = 0) -> Complaint | None:
    value = one.rig.topic.get(f"complaint/engine-{engine}")
    return None if value is None else msgspec.msgpack.decode(value, type=Complaint)


async def test_nothing_is_said_of_an_engine_that_died_while_its_slot_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor drops what was known of it; the failed update must not bring that back."""
    go, reading = threading.Event(), threading.Event()
    original = SlotReader.__init__

    def read(self: SlotReader, claim: SlotManifest) -> None:
        reading.set()
        go.wait()
        original(self, claim)

    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving(2)
        monkeypatch.setattr(SlotReader, "__init__", read)
        one.weights.publish(1)
        await until(reading.is_set)
        assert one.entry(0).fetching == 1
        await one.servers[0].__aexit__(None, None, None)
        one.rig.lose_engine(0)
        await idle()
        go.set()
        await one.landed(1, engine=1)
        await until(lambda: one.failures(0) > 0)
        await idle()
        assert one.rig.topic.get("directory/engine-0") is None
        assert list(carrying(one.rig.topic)) == ["engine-1"], "the gate counts the engines that are there"
        again = await one.engine(0, incarnation=1)
        await one.landed(1)
        assert (core_of(again).label, one.entry(0).incarnation) == ("0.1", 1)


async def test_a_stage_that_is_started_anew_leaves_an_engine_alone_that_serves_what_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving()
        await one.lose_stage()
        assert one.served(), "clients go on while nobody owns the engine"
        calls = count_calls(monkeypatch)
        await one.start_stage()
        await until(lambda: bool(one.stage.engines) and one.control().current is not None)
        await idle()
        assert set(calls) == {"/model_info", "/ready"}, "asked, not touched"
        assert (one.entry().version, one.entry().state) == (0, "serving")
        one.weights.publish(1)
        await one.landed(1)
        assert one.labels() == ["0.1"]


@pytest.mark.parametrize("left", ["updating", "paused", "mislabelled", "loading", "by an earlier start of the run"])
async def test_an_engine_that_was_left_in_doubt_is_brought_up_in_full_and_resumed(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        server = await one.engine(0)
        announcement = one.weights.publish(0)
        await one.landed(0)
        await one.lose_stage()
        if left == "paused":
            await core_of(server).pause("in_place")
        elif left == "mislabelled":
            await core_of(server).relabel("0.7")
        elif left == "by an earlier start of the run":  # it names the very version that comes, and nobody knows it
            one.rig.topic.drop("directory/engine-0")
            address = EngineAddress("engine-0", server.url, 0, taken_over=True)
            one.rig.topic.publish("engine/engine-0", msgspec.msgpack.encode(address))
            one.weights.announce(msgspec.structs.replace(announcement, transport="tensor"))
            await core_of(server).pause("abort")
        else:
            state = {"updating": {"state": "updating", "fetching": 1}, "loading": {"state": "loading"}}[left]
            entry = msgspec.structs.replace(one.entry(), **state)
            one.rig.topic.publish("directory/engine-0", msgspec.msgpack.encode(entry))

        async def look(_: Update) -> None:
            assert not one.served(), "nothing is sent to it before it is certain again"

        loads = before_updates(monkeypatch, look)
        await one.start_stage()
        await until(lambda: bool(one.stage.engines) and one.control().updates > 0)
        await one.landed(0)
        assert [update.label for update in loads] == ["0.0"]
        assert (one.labels(), core_of(server).paused, one.entry().fetching) == (["0.0"], False, -1)


async def test_a_pin_outlives_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.engine(0)
        pinned = one.weights.publish(1, pinned=True)
        one.rig.topic.publish("weights/pinned/1", msgspec.msgpack.encode(pinned))
        await one.landed(1)
        await one.lose_stage()
        one.weights.publish(2)
        await one.start_stage()
        await until(lambda: bool(one.stage.engines) and one.control().current is not None)
        await idle()
        assert one.labels() == ["0.1"]
        one.rig.topic.publish("eval/released", b"1")
        await one.landed(2)


async def test_an_engine_that_takes_no_weights_goes_to_its_supervisor_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch, max_failures=3) as one:
        await one.serving(2)
        tries = refuse_updates(monkeypatch, one.servers[0].url)
        monkeypatch.setattr("stages.engines.weight_transfer.TURN_TIMEOUT_S", 0.0)
        one.weights.publish(1)
        await until(lambda: complaint(one) is not None)
        told = complaint(one)
        assert told is not None
        assert (told.engine, told.incarnation, tries) == ("engine-0", 0, ["0.1"] * 3)
        assert told.reason.startswith("3 failures in a row: the update to version 1 failed:")
        assert "no room for them" in told.reason
        assert (one.entry().state, one.entry().detail) == ("away", told.reason)
        await one.landed(1, engine=1)
        one.weights.publish(2)
        await one.landed(2, engine=1)
        await idle()
        assert len(tries) == 3, "nothing is asked of it any more"
        one.rig.lose_engine(0)
        again = await one.engine(0, incarnation=1)
        await one.landed(2)
        assert core_of(again).label == "0.2"


async def test_a_retry_does_not_wait_for_an_engine_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.engine(0)
        refuse_updates(monkeypatch, one.servers[0].url)
        monkeypatch.setattr("stages.engines.engine_control.RETRY_S", 1e6)
        one.weights.publish(0)
        await until(lambda: one.failures() == 1)
        one.rig.lose_engine(0)
        await one.engine(0, incarnation=1)
        await one.landed(0)


async def test_frozen_engines_are_in_the_directory_and_get_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        server = await one.engine(0)
        judge = EngineAddress("frozen-judge", server.url, 0, "judge")
        one.rig.topic.publish("engine/frozen-judge", msgspec.msgpack.encode(judge))
        one.rig.topic.drop("engine/engine-0")
        await one.rig.topic_until(lambda: one.rig.topic.get("directory/frozen-judge") is not None)
        calls = count_calls(monkeypatch)
        one.weights.publish(0)
        await idle()
        entry = one.stage.engines["frozen-judge"].entry
        assert (entry.policy, entry.state, entry.version, entry.label) == ("judge", "serving", -1, None)
        assert entry.limit == one.config.rollout.server_concurrency
        assert (calls, core_of(server).label) == ([], "default")
        assert carrying(one.rig.topic) == {}


async def test_at_a_drain_all_engines_give_back_what_they_run_and_the_stage_ends_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving(2)
        calls = count_calls(monkeypatch)
        one.rig.topic.publish("drain", b"the run is complete")
        await until(lambda: len(calls) == 2)
        await idle()
        assert (calls, one.running.done()) == (["/abort_request"] * 2, False)
        one.rig.topic.publish(END, b"")
        await one.running


class Loaded:
    """Loads as an engine would tell them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.load = Load()
        monkeypatch.setattr(EngineClient, "loads", self._loads)

    async def _loads(self) -> list[Load]:
        return [self.load]


async def test_a_limit_that_follows_the_load_travels_in_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(monkeypatch)
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving()
        topic = await one.rig.node.topic(one.rig.topic.address, replica="watch")
        watch = LoadWatch(one.config, one.stage.engines, activity := Activity())
        most = one.config.rollout.server_concurrency
        assert one.entry().limit == most
        loaded.load = Load(token_usage=0.99, num_running_reqs=80, num_waiting_reqs=20, busy_s=3.0)
        await watch.look(topic)
        assert one.entry().limit == 75, "three quarters of what is in flight"
        assert (activity.extra["engine_busy_s"], activity.extra["in_flight_limit"]) == (3.0, 75.0)
        assert activity.extra["limit_cuts"] == 1.0
        loaded.load = Load(token_usage=0.85, num_running_reqs=60)
        one.rig.topic.publish("retracted/generate-0", b"2")
        await idle()
        await watch.look(topic)
        assert one.entry().limit == 45, "its clients were told of retractions"
        loaded.load = Load(token_usage=0.85, num_running_reqs=40)
        await watch.look(topic)
        assert one.entry().limit == 45, "each counts once"
        loaded.load = Load(token_usage=0.1)
        await watch.look(topic)
        assert one.entry().limit == 45 + most // 32
        assert one.entry().version == carried(one.rig) == 0


async def test_an_engine_that_is_being_updated_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded(monkeypatch)
    async with fleet(tmp_path, monkeypatch) as one:
        await one.serving()
        loading, go, _ = hold_updates(monkeypatch)
        one.weights.publish(1)
        await loading.wait()
        loaded.load = Load(token_usage=0.99, num_running_reqs=100)
        topic = await one.rig.node.topic(one.rig.topic.address, replica="watch")
        watch = LoadWatch(one.config, one.stage.engines, Activity())
        await watch.look(topic)
        assert one.entry().limit == one.config.rollout.server_concurrency
        go.set()
        await one.landed(1)
        await watch.look(topic)
        assert one.entry().limit == 75
