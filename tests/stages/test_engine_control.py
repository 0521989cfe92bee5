"""Engines that follow the weights: updates, their order, leaving engines, and entries of the engine directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from configs.schema.rollout import EngineConfig, UpdateConfig
from models.engines.client import EngineClient, WeightsUpdated
from models.engines.embedded.transformer import LiveWeights
from models.engines.protocol import ModelInfo, PauseMode
from models.engines.serve import EngineServer
from models.errors import CheckpointUnavailable
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.weights.delta import differences, full_versions
from models.weights.shared_memory_reader import SlotManifest, SlotReader
from stages.engines import weight_routes
from stages.engines.stage import END
from stages.messages import WeightsAnnouncement
from stages.ports import SameHost, Topic
from stages.topic_values import LEAVE, addresses, carrying, entries, updates_ended
from tests.models.weights.made_up import checkpoint, values
from tests.stages.engine_rig import SLOW_MS, Log, check_continued, core_of, freeze, sent_to, simulated, started
from tests.stages.fleet_rig import Fleet, TensorPublisher, Update, open_fleet
from tests.stages.stage_rig import Rig, before_calls, idle, make_config, make_group, until


async def test_a_pinned_version_is_held_until_it_is_released(fleet: Fleet) -> None:
    """Also by a stage that was started anew, and leaves an engine alone that serves what it should. Nothing older is
    applied then, and nothing newer after a drain."""
    await fleet.engine(0)
    pinned = fleet.weights.publish(1, pinned=True)
    fleet.rig.topic.publish("weights/pinned/1", msgspec.msgpack.encode(pinned))
    await fleet.landed(1)
    fleet.weights.publish(2)
    fleet.rig.topic.publish("eval/released", b"0")
    await idle()
    assert fleet.labels() == ["0.1"]
    assert (fleet.entry().version, fleet.entry().fetching) == (1, -1), "not even the slot is read"
    await fleet.lose_stage()
    assert fleet.served(), "clients go on while nobody owns the engine"
    calls = fleet.count_calls()
    await fleet.start_stage()
    await until(lambda: bool(fleet.stage.engines) and fleet.control().current is not None)
    await idle()
    assert {path for _, path in calls} == {"/model_info", "/ready"}, "asked, not touched"
    assert (fleet.labels(), fleet.entry().version, fleet.entry().state) == (["0.1"], 1, "serving")
    fleet.rig.topic.publish("eval/released", b"1")
    await fleet.landed(2)
    fleet.weights.announce(pinned)
    await idle()
    assert (fleet.entry().version, fleet.entry().fetching) == (2, -1)
    fleet.rig.topic.publish("drain", b"the run is complete")
    fleet.weights.publish(3)
    await idle()
    assert fleet.labels() == ["0.2"]


async def test_the_end_of_a_run_waits_for_an_update_in_progress(fleet: Fleet) -> None:
    """Else an external server stays paused, or ends because the slot it loads from is removed."""
    [server] = await fleet.serving()
    go, _ = await fleet.held_in_update()
    fleet.rig.topic.publish(END, b"")
    trainer = asyncio.ensure_future(updates_ended(await fleet.rig.node.topic("topic", replica="trainer"), 30.0))
    await idle()
    assert not fleet.running.done()
    assert not trainer.done(), "the slots stay"
    go.set()
    await asyncio.wait_for(asyncio.gather(fleet.running, trainer), 120.0)
    assert fleet.labels() == ["0.1"]
    assert not core_of(server).paused


async def test_an_update_that_never_ends_delays_the_end_of_a_run_by_half_the_drain(fleet: Fleet) -> None:
    await fleet.serving()
    run = msgspec.structs.replace(fleet.config.run, drain_s=0.5)
    fleet.stage.config = msgspec.structs.replace(fleet.config, run=run)
    await fleet.held_in_update()
    fleet.rig.topic.publish(END, b"")
    await asyncio.wait_for(asyncio.shield(fleet.running), 120.0)


async def test_an_engine_that_waited_takes_what_is_newest_then(in_turns: Fleet) -> None:
    """The slot of the version for which it waited is the next that the trainer writes into."""
    await in_turns.serving(2)
    go, asked = await in_turns.held_in_update(in_turns.servers[0].url)
    in_turns.weights.publish(2)
    await idle()
    go.set()
    await in_turns.all_landed(2)
    loaded = [[update.label for update in asked if update.url == server.url] for server in in_turns.servers]
    assert loaded == [["0.1", "0.2"], ["0.2"]]


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_torn_slot_is_never_served(fleet: Fleet, when: str) -> None:
    [server] = await fleet.serving()

    def tear() -> None:
        for version in (2, 3):  # the second of them into the slot of version 1
            fleet.weights.write(version)

    async def meanwhile(update: Update) -> None:
        if when == "during" and update.label == "0.1":
            tear()

    loads = fleet.before_updates(meanwhile)
    first = fleet.weights.write(1)
    if when == "before":
        tear()
    fleet.weights.announce(first)
    await until(lambda: fleet.failures() > 0)
    if when == "during":
        assert (fleet.served(), core_of(server).paused) == (False, True), "torn weights are loaded: nothing may run"
    else:
        assert (fleet.served(), core_of(server).paused) == (True, False), "it goes on with the weights it has"
        assert loads == [], "not even loaded"
    assert fleet.entry().version == 0
    await fleet.land(4)
    assert (fleet.served(), core_of(server).paused, fleet.labels()) == (True, False, ["0.4"])


async def test_an_engine_that_names_other_weights_than_it_was_given_is_not_ready(fleet: Fleet) -> None:
    fleet.patch.setattr("stages.engines.weight_transfer.LABEL_WAIT_S", 0.01)
    server = await fleet.engine(0)
    original = EngineClient.update_weights_from_disk
    lie = True

    async def update(
        client: EngineClient, path: str, label: str | None, flush_cache: bool = True, **claim: Any
    ) -> WeightsUpdated:
        done = await original(client, path, label, flush_cache, **claim)
        if lie:
            await core_of(server).relabel("another")
        return done

    fleet.patch.setattr(EngineClient, "update_weights_from_disk", update)
    fleet.weights.publish(0)
    await until(lambda: core_of(server).label == "another")
    await idle()
    assert not fleet.served()
    assert fleet.entry().version == -1
    lie = False
    await fleet.landed(0)


async def test_an_entry_counts_only_for_the_incarnation_that_has_the_address(rig: Rig) -> None:
    rig.applied(3)
    rig.topic.drop("engine/engine-0")
    assert entries(rig.topic) == {}, "its engine is lost: what arrives late is of a process that has died"
    rig.engine_at("http://engine-0", incarnation=1)
    assert entries(rig.topic) == {}, "a new process listens there, and carries nothing of that"
    assert addresses(rig.topic)["engine-0"].incarnation == 1
    rig.applied(4)
    assert entries(rig.topic)["engine-0"].label == "0.4"
    rig.engine_at("http://engine-0", incarnation=2)
    assert carrying(rig.topic) == {}


async def test_partial_output_goes_on_elsewhere_and_nothing_new_comes(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, engines=2, engine=simulated(SLOW_MS)) as world:
        world.hurry(1)
        await world.ask(make_group(0, 2))
        await freeze(world.engines[0], tokens=6)
        world.rig.topic.publish(f"{LEAVE}engine-0", b"")
        samples = await world.whole(2)
        await world.rig.topic_until(lambda: (entry := world.rig.entry()) is not None and entry.state == "left")
        assert sorted(carrying(world.rig.topic)) == ["engine-1"], "nobody waits for weights to land in it"
        assert core_of(world.engines[0]).schedule.running == 0
        await until(lambda: world.serving() == ["engine-1"])
        for group in range(1, 5):
            await world.rollouts(make_group(group, 1))
        world.weights.publish(1)
        await world.weights.landed(1, engine=1)
        assert core_of(world.engines[0]).label == "0.0", "it takes no weights any more"
    [first] = sent_to(log, world.engines[0])
    rest = list(sent_to(log, world.engines[1]))
    for sample in samples:
        check_continued(sample, first, rest, lost=False)


# Which engine gets requests after an update, and how many stand still: routes and checks on engines of our own.


@asynccontextmanager
async def open_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **update: object
) -> AsyncIterator[tuple[Fleet, TensorPublisher]]:
    config = msgspec.convert({"update_weight_transport": "delta", **update}, UpdateConfig)
    async with open_fleet(tmp_path, monkeypatch, update=config) as one:
        await one.engine(0)
        yield one, one.publisher(tmp_path / "source")


Following = Callable[..., AbstractAsyncContextManager[tuple[Fleet, TensorPublisher]]]


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Following:
    """Opens a simulated engine, and a publisher of the route delta."""
    return partial(open_following, tmp_path, monkeypatch)


async def test_differences_reach_an_embedded_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny_checkpoint(tmp_path / "model", TinyRecipe(hidden_size=32, num_layers=1, intermediate_size=64))
    delta = UpdateConfig(update_weight_transport="delta")
    async with open_fleet(tmp_path, monkeypatch, source=source, update=delta) as one:
        loads, publisher = one.before_updates(), one.publisher(source)
        server = EngineServer(EngineConfig(engine_device="cpu"), str(source), max_context_len=64, seed=0)
        await one.stack.enter_async_context(server)
        one.rig.engine_at(server.url)
        first = load_file(source / "model.safetensors")
        for version in range(3):
            tensors = {name: tensor * (1 + 1e-6 * version) for name, tensor in first.items()}
            announcement = publisher.write_tensors(version, tensors)
            topic = await one.rig.node.topic("topic", replica="trainer")
            await publisher.announce(topic, SameHost(), announcement)
            await one.landed(version)
        found = await server.core.checksums()
        assert publisher.delta_ratio > 1.5
        assert announcement.delta.endswith("0.2-from-0.1.delta")
        published = str(tmp_path / "published")
        assert not any(load.path.startswith(published) for load in loads), "loaded from the local copy"
        await server.core.update_weights(announcement.path, "again", False)
        assert await server.core.checksums() == found


@pytest.mark.parametrize(("room", "dtype"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
async def test_an_engine_that_compares_the_bytes_itself_saves_another_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool, dtype: Any
) -> None:
    """Without memory for a second set of weights it cannot, and does not where it casts them; then the stage does. A
    flipped byte stops it either way, and what was loaded with it is loaded again once it is as it should be."""
    compares = room and dtype == "float32"
    source = make_tiny_checkpoint(tmp_path / "model", TinyRecipe(hidden_size=32, num_layers=1, intermediate_size=64))
    looks: list[int] = []

    class Looking(SlotReader):
        def __init__(self, claim: SlotManifest, *, anew: bool = True) -> None:
            looks.append(claim.version)
            super().__init__(claim, anew=anew)

    claims: list[bool] = []

    def update(client: EngineClient, *_: object, claim: SlotManifest | None, **__: object) -> None:
        claims.append(claim is not None)

    monkeypatch.setattr(weight_routes, "SlotReader", Looking)
    before_calls(monkeypatch, EngineClient, "update_weights_from_disk", update)
    monkeypatch.setattr(LiveWeights, "has_room", lambda weights, sets: room)
    async with open_fleet(tmp_path, monkeypatch, source=source) as one:
        engine = EngineConfig(engine_device="cpu", engine_dtype=dtype)
        server = EngineServer(engine, str(source), max_context_len=64, seed=0)
        await one.stack.enter_async_context(server)
        one.rig.engine_at(server.url)
        first = load_file(source / "model.safetensors")
        publisher = one.publisher(source)
        for version in (0, 1):
            announcement = publisher.write_tensors(version, {n: t * (1 + version) for n, t in first.items()})
            one.weights.announce(announcement)
            await one.landed(version)
        assert set(looks) == (set() if compares else {0, 1})
        assert set(claims) == {compares}, "what the engine prepared may be gone by then"
        claims.clear()
        announcement = publisher.write_tensors(2, first)
        file = Path(announcement.path) / "model.safetensors"
        whole = file.read_bytes()
        with file.open("r+b") as opened:
            opened.seek(-1, 2)
            opened.write(bytes([whole[-1] ^ 0x40]))
        one.weights.announce(announcement)
        await until(lambda: one.failures() > 0)
        assert (claims, server.core.label) == ([], "0.1")
        with file.open("r+b") as opened:
            opened.write(whole)
        await one.landed(2)
        live = server.core._weights.names
        assert all(torch.equal(live[name], tensor.to(live[name].dtype)) for name, tensor in first.items())


async def test_an_engine_that_was_left_in_the_middle_of_an_update_is_loaded_in_full(following: Following) -> None:
    """What it carries may be a mixture, so that nothing is built on it: the trainer's slot, not the route's copy."""
    async with following() as (one, publisher):
        slot = publisher.publish(0, values(0))
        await one.landed(0)
        await one.lose_stage()
        left = msgspec.structs.replace(one.entry(), state="updating", fetching=1)
        one.rig.topic.publish("directory/engine-0", msgspec.msgpack.encode(left))
        loads = one.before_updates()
        await one.start_stage()
        await until(lambda: bool(one.stage.engines) and one.control().current is not None)
        assert [load.path for load in loads] == [str(slot)]
        slot = publisher.publish(1, values(1))
        await one.landed(1)
        assert [load.path for load in loads[1:]] != [str(slot)], "from then on by its route again"


@pytest.mark.parametrize("same_machine", [True, False])
async def test_without_a_way_the_slot_serves_or_nothing_changes(
    same_machine: bool, following: Following, tmp_path: Path
) -> None:
    async with following() as (one, publisher):
        publisher.publish(0, values(0))
        await one.landed(0)
        announcement = publisher.write_tensors(1, values(1))
        for path in [*full_versions(tmp_path / "run/weights").values()]:
            path.rename(path.with_name("elsewhere"))
        for _, path in differences(tmp_path / "run/weights").values():
            path.unlink()
        if not same_machine:
            announcement = msgspec.structs.replace(announcement, path=str(tmp_path / "not here"))
        one.weights.announce(announcement)
        if same_machine:
            await one.landed(1)
            return
        await until(lambda: one.failures() > 0)
        assert one.labels() == ["0.0"]
        assert one.served(), "it goes on with the weights that it has"
        assert not core_of(one.servers[0]).paused
        publisher.publish(2, values(2))
        await one.landed(2)


async def test_an_engine_whose_tensors_differ_is_not_admitted_and_is_loaded_in_full(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(check_weight_update_equal=True) as (one, publisher):
        loads = one.before_updates()
        publisher.publish(0, values(0))
        await one.landed(0)
        assert one.entry().checksum
        one.rig.applied(1, engine=9, checksum="another")
        slot = str(publisher.publish(1, values(1)))
        await until(lambda: one.failures() > 1)
        assert not one.served()
        assert core_of(one.servers[0]).paused
        assert one.entry().version == 0
        assert "engine-9 reported another" in caplog.text
        assert [load.path == slot for load in loads[1:3]] == [False, True], "by its route, then in full from the slot"
        one.rig.lose_engine(9)
        await one.landed(1)
        assert not core_of(one.servers[0]).paused


async def test_a_label_that_comes_late_is_waited_for(following: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    original = EngineClient.model_info

    async def model_info(client: EngineClient) -> ModelInfo:
        nonlocal asked
        asked += 1
        info = await original(client)
        return msgspec.structs.replace(info, weight_version="default") if asked < 3 else info

    monkeypatch.setattr(EngineClient, "model_info", model_info)
    async with following() as (one, publisher):
        publisher.publish(0, values(0))
        await one.landed(0)
        assert (asked, one.failures()) == (3, 0)


@pytest.mark.parametrize("flushed", [True, False])
async def test_weights_that_came_without_a_flush_count(
    flushed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    async def update(
        client: EngineClient, path: str, label: str | None, flush_cache: bool = True, **claim: Any
    ) -> WeightsUpdated:
        asked.append(flush_cache)
        named = label if flushed or not flush_cache else None
        request = {"model_path": path, "weight_version": named}
        await client.call("POST", "/update_weights_from_disk", request, 120.0)
        return WeightsUpdated("Weights were updated, but ...", cache_flushed=flushed)

    monkeypatch.setattr(EngineClient, "update_weights_from_disk", update)
    async with open_fleet(tmp_path, monkeypatch, mode="retract") as one:
        await one.serving()
        assert (one.labels(), one.failures()) == (["0.0"], 0)
    assert asked == ([True] if flushed else [True, False])


@pytest.mark.parametrize("rolling", [1, 2, 4, None])
async def test_at_most_so_many_engines_stand_still(
    rolling: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still: set[str] = set()
    most = 0
    full = asyncio.Event()
    original_pause = EngineClient.pause

    async def pause(client: EngineClient, mode: PauseMode) -> None:
        nonlocal most
        await original_pause(client, mode)
        still.add(client.base_url)
        most = max(most, len(still))
        if most >= (rolling or 4):
            full.set()
        async with asyncio.timeout(120):  # on a busy machine too, as many stand still as may
            await full.wait()
        await idle()  # one too many has every chance to come in

    async with open_fleet(tmp_path, monkeypatch, update=UpdateConfig(update_weight_rolling=rolling)) as one:
        await one.serving(4)
        monkeypatch.setattr(EngineClient, "pause", pause)
        before_calls(monkeypatch, EngineClient, "resume", lambda client: still.discard(client.base_url))
        for version in (1, 2):
            await one.land(version)
    assert most == (rolling or 4)


async def test_by_broadcasts_engines_update_one_after_the_other(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender holds a bucket on its GPU for each."""
    asked: list[tuple[str, int | None]] = []

    async def turn(topic: Topic, engine: str, announcement: WeightsAnnouncement, rolling: int | None) -> None:
        asked.append((announcement.transport, rolling))

    await fleet.serving()
    monkeypatch.setattr("stages.engines.engine_control.await_turn", turn)
    fleet.weights.announce(msgspec.structs.replace(fleet.weights.write(1), transport="distributed"))
    await until(lambda: bool(asked))
    assert asked[0] == ("distributed", 1)


@pytest.mark.parametrize("route", ["disk", "tensor", "distributed"])
async def test_bytes_that_are_not_the_announced_ones_are_never_sent(fleet: Fleet, route: str) -> None:
    """An engine of our own is asked to load them beside its weights, since it may compare them itself."""
    await fleet.serving()
    announcement = fleet.weights.write(1)
    with (Path(announcement.path) / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    calls = fleet.count_calls()
    fleet.weights.announce(msgspec.structs.replace(announcement, transport=route))
    await until(lambda: fleet.failures() > 0)
    assert {path for _, path in calls} <= {"/prepare_weights" if route == "disk" else "/server_info"}
    assert fleet.served()
    assert fleet.labels() == ["0.0"]
    await fleet.land(2)


@pytest.mark.parametrize("route", ["tensor", "distributed", "carrier pigeon"])
async def test_an_engine_without_the_route_says_so(fleet: Fleet, route: str) -> None:
    """Engines of our own take no tensors. The configuration check refuses such a run; here an engine was addressed."""
    fleet.patch.setattr("stages.engines.weight_routes.GROUP_TIMEOUT_S", 0.2)
    [server] = await fleet.serving()
    fleet.weights.announce(msgspec.structs.replace(fleet.weights.write(1), transport=route))
    await until(lambda: fleet.failures() > 0)
    assert core_of(server).label == "0.0"
    assert core_of(server).paused == (route == "tensor"), "a group is made before the engine stands still"
    assert fleet.served() == (route != "tensor")
    await fleet.land(2)
    assert not core_of(server).paused


def test_a_source_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointUnavailable, match=r"holds no \*.safetensors"):
        TensorPublisher(make_config(), tmp_path / "slots", tmp_path / "empty", tmp_path).write_tensors(0, values(0))


def test_a_full_directory_of_differences_leaves_the_disk_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    config = make_config(update={"update_weight_transport": "delta"})
    publisher = TensorPublisher(config, tmp_path / "slots", checkpoint(tmp_path / "source"), tmp_path / "run")
    monkeypatch.setattr("shutil.copytree", full)
    announcement = publisher.write_tensors(0, values(0))
    assert (announcement.transport, announcement.delta) == ("disk", "")
    publisher.close()
