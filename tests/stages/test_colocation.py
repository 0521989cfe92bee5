"""Trainer and engines that take turns on their devices: real links and engine servers, a trainer of hooks alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.schema import Config
from models.engines.client import EngineClient
from models.engines.core import MemoryTag
from models.engines.serve import EngineServer
from models.errors import EngineRefused
from stages.engines.colocation import EngineMemory, TrainerTurn, holder
from stages.engines.stage import END
from stages.ports import read_value
from stages.topic_values import EngineAddress, carrying
from tests.stages.engine_rig import SLOW_MS, core_of, freeze, generating, simulated, token_versions
from tests.stages.fleet_rig import Fleet, Update
from tests.stages.stage_rig import TOPIC, Rig, before_calls, idle, make_config, make_group, until

COLOCATED = make_config(asynchrony={"colocate": True, "max_staleness": 0})
GONE: set[MemoryTag] = {"kv_cache", "weights"}
CONTROL = ("pause_generation", "continue_generation", "memory_occupation", "update_weights")


@dataclass
class Backend:
    """A trainer whose state is either here or on the host."""

    calls: list[str] = field(default_factory=list)
    seen: Callable[[], object] = lambda: None

    def onload(self) -> None:
        self.calls.append(f"onload {self.seen()}")

    def offload(self) -> None:
        self.calls.append("offload")


async def in_torch(function: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function)


async def trainer(rig: Rig, config: Config = COLOCATED, backend: object = None) -> TrainerTurn:
    return TrainerTurn(config, await rig.node.topic(TOPIC, replica="train-0"), in_torch, backend)


def away(server: EngineServer) -> set[MemoryTag]:
    return core_of(server)._memory.away


async def handed_over(one: Fleet, turn: TrainerTurn, version: int) -> None:
    """The end of a batch: new weights, then the devices."""
    one.weights.publish(version)
    await turn.release()
    await one.all_landed(version)


async def taking_turns(one: Fleet, engines: int) -> tuple[TrainerTurn, Backend]:
    """The turns of a trainer; it is the engines' turn, and they serve version 0."""
    for index in range(engines):
        await one.engine(index)
    backend = Backend(seen=lambda: [away(server) == GONE for server in one.servers])
    turn = await trainer(one.rig, backend=backend)
    await handed_over(one, turn, 0)
    return turn, backend


@pytest.fixture
async def turn(fleet: Fleet) -> TrainerTurn:
    return (await taking_turns(fleet, 1))[0]


def control_calls(one: Fleet) -> list[tuple[str, str]]:
    """(engine, call) from now on, in the order in which they are made."""
    log: list[tuple[str, str]] = []

    def note(client: EngineClient, method: str, path: str, payload: Any, *_: Any) -> None:
        if any(part in path for part in CONTROL):
            about = getattr(payload, "tags", None) or getattr(payload, "mode", None) or ""
            log.append((client.base_url, f"{path.strip('/')} {about if isinstance(about, str) else '+'.join(about)}"))

    before_calls(one.patch, EngineClient, "call", note)
    return log


async def test_engines_give_their_memory_back_for_the_trainers_turn_and_take_it_with_new_weights(fleet: Fleet) -> None:
    turn, backend = await taking_turns(fleet, 2)
    calls = control_calls(fleet)
    await turn.acquire()
    assert [away(server) for server in fleet.servers] == [GONE, GONE]
    assert not any(fleet.served(index) for index in range(2)), "nothing is sent there"
    fleet.weights.publish(1)
    await idle()
    assert fleet.labels() == ["0.0", "0.0"], "announced, but it is not their turn"
    await turn.release()
    await fleet.all_landed(1)
    assert fleet.labels() == ["0.1", "0.1"]
    assert backend.calls == ["offload", "onload [True, True]", "offload"]
    for server in fleet.servers:
        assert away(server) == set()
        assert not core_of(server).paused
        assert [call for url, call in calls if url == server.url] == [
            "pause_generation abort",
            "release_memory_occupation kv_cache+weights",
            "resume_memory_occupation weights",
            "update_weights_from_disk ",
            "resume_memory_occupation kv_cache",
            "continue_generation ",
        ]
    for version in (2, 3):
        await turn.acquire()
        await handed_over(fleet, turn, version)
    assert fleet.labels() == ["0.3", "0.3"]
    assert [core_of(server).totals().memory_releases for server in fleet.servers] == [3, 3]
    assert [fleet.failures(index) for index in range(2)] == [0, 0]


async def test_an_evaluation_keeps_its_engines_until_it_is_over(fleet: Fleet) -> None:
    async with asyncio.TaskGroup() as tasks:
        await fleet.engine(0)
        turn = await trainer(fleet.rig)
        fleet.weights.publish(0, pinned=True)
        await turn.release()
        await fleet.landed(0)
        acquiring = tasks.create_task(turn.acquire())
        await idle()
        assert not acquiring.done()
        assert fleet.served(), "the evaluation goes on"
        fleet.rig.topic.publish("eval/released", b"0")
        await acquiring
        assert away(fleet.servers[0]) == GONE


async def test_an_engine_that_is_lost_is_not_waited_for(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.patch.setattr("stages.engines.colocation.PATIENCE_S", -1.0)
    async with asyncio.TaskGroup() as tasks:
        turn, _ = await taking_turns(fleet, 2)
        await fleet.servers[1].__aexit__(None, None, None)
        acquiring = tasks.create_task(turn.acquire())
        await until(lambda: away(fleet.servers[0]) == GONE)
        await until(lambda: any("for the memory of engine-1" in record.message for record in caplog.records))
        assert not acquiring.done()
        fleet.rig.lose_engine(1)
        await acquiring


async def test_frozen_engines_keep_their_memory_and_are_not_waited_for(fleet: Fleet, turn: TrainerTurn) -> None:
    """And get no weights."""
    server = EngineServer(simulated(), str(fleet.bare), max_context_len=None, seed=9)
    judge = await fleet.stack.enter_async_context(server)
    calls = fleet.count_calls()
    address = EngineAddress("frozen-judge", judge.url, 0, "judge")
    fleet.rig.topic.publish("engine/frozen-judge", msgspec.msgpack.encode(address))
    await fleet.rig.topic_until(lambda: fleet.rig.topic.get("directory/frozen-judge") is not None)
    await turn.acquire()
    assert (away(fleet.servers[0]), away(judge)) == (GONE, set())
    await handed_over(fleet, turn, 1)
    entry = fleet.stage.engines["frozen-judge"].entry
    assert (entry.policy, entry.state, entry.version, entry.label) == ("judge", "serving", -1, None)
    assert entry.limit == fleet.config.rollout.server_concurrency
    assert ([url for url, _ in calls if url == judge.url], core_of(judge).label) == ([], "default")
    assert list(carrying(fleet.rig.topic)) == ["engine-0"]


async def test_an_engine_that_comes_up_in_the_trainers_turn_gives_its_memory_back_first(
    fleet: Fleet, turn: TrainerTurn
) -> None:
    await turn.acquire()
    again = await fleet.engine(0, incarnation=1)
    await until(lambda: away(again) == GONE)
    assert core_of(again).label == "default", "it never had weights of this run"
    fleet.weights.publish(1)
    await turn.release()
    await until(lambda: core_of(again).label == "0.1")
    await fleet.landed(1)
    assert away(again) == set()


async def test_what_was_given_back_in_an_earlier_turn_does_not_count(fleet: Fleet, turn: TrainerTurn) -> None:
    """An engine that never took the memory again is reported for each turn, and asked only once."""
    await turn.acquire()
    first = read_value(turn.topic, "device/engine-0", EngineMemory)
    assert first.empty(0, turn._turn)
    assert not first.empty(0, turn._turn + 2)
    assert not first.empty(1, turn._turn)
    refusing = True

    def refuse(client: EngineClient, method: str, path: str, *_: Any) -> None:
        if refusing and "resume_memory" in path:
            raise EngineRefused(client.base_url, 400, "no memory just now")

    before_calls(fleet.patch, EngineClient, "call", refuse)
    fleet.weights.publish(1)
    await turn.release()
    await until(lambda: fleet.failures() > 0)
    await turn.acquire()
    assert core_of(fleet.servers[0]).totals().memory_releases == 1
    refusing = False
    await handed_over(fleet, turn, 2)
    assert fleet.labels() == ["0.2"]


async def test_at_a_drain_engines_give_their_memory_back_for_good_and_the_trainer_may_save(fleet: Fleet) -> None:
    """The stage ends only then; its last report counts in the turn that the trainer takes after it."""
    fleet.stage.config = msgspec.structs.replace(fleet.config, asynchrony=COLOCATED.asynchrony)
    turn, _ = await taking_turns(fleet, 1)
    gives, waits = asyncio.Event(), asyncio.Event()

    async def held(client: EngineClient, method: str, path: str, *_: Any) -> None:
        if "release_memory" in path:
            gives.set()
            await waits.wait()

    before_calls(fleet.patch, EngineClient, "call", held)
    fleet.rig.topic.publish("drain", b"interrupted")
    await asyncio.wait_for(gives.wait(), 60.0)
    fleet.rig.topic.publish(END, b"")
    await idle()
    assert not fleet.running.done()
    waits.set()
    await asyncio.wait_for(fleet.running, 60.0)
    assert away(fleet.servers[0]) == GONE
    await asyncio.wait_for(turn.acquire(), 60.0)


async def test_memory_is_taken_once_however_often_the_update_fails(fleet: Fleet, turn: TrainerTurn) -> None:
    await turn.acquire()
    tries = []

    async def refuse(update: Update) -> None:
        tries.append(set(away(fleet.servers[0])))
        if len(tries) < 3:
            raise EngineRefused(update.url, 400, "not now")

    fleet.before_updates(refuse)
    calls = control_calls(fleet)
    await handed_over(fleet, turn, 1)
    assert tries == [{"kv_cache"}] * 3, "the cache's memory comes last: loading may need room"
    assert [call for _, call in calls if "memory" in call or "continue" in call] == [
        "resume_memory_occupation weights",
        "resume_memory_occupation kv_cache",
        "continue_generation ",
    ]


async def test_the_stage_waits_until_nothing_runs_and_gives_nothing_back_before(
    fleet: Fleet, turn: TrainerTurn, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.patch.setattr("stages.engines.colocation.IDLE_LIMIT_S", 0.0)
    fleet.patch.setattr("stages.engines.colocation.IDLE_POLL_S", 0.0)
    async with asyncio.TaskGroup() as tasks:
        [server] = fleet.servers
        running = 1
        original = EngineClient.call

        async def call(client: EngineClient, method: str, path: str, *args: Any, **options: Any) -> bytes:
            body = await original(client, method, path, *args, **options)
            if path != "/v1/loads":
                return body
            loads = json.loads(body)
            loads["loads"][0]["num_running_reqs"] = running
            return msgspec.json.encode(loads)

        fleet.patch.setattr(EngineClient, "call", call)
        acquiring = tasks.create_task(turn.acquire())
        await until(lambda: fleet.failures() > 1)
        assert (away(server), acquiring.done()) == (set(), False)
        running = 0
        await acquiring
        assert away(server) == GONE
    assert any("1 requests run 0 s after a pause" in record.message for record in caplog.records)


async def test_a_stage_that_is_started_anew_in_the_trainers_turn_goes_on_with_it(
    fleet: Fleet, turn: TrainerTurn
) -> None:
    [server] = fleet.servers
    await turn.acquire()
    await fleet.lose_stage()
    await fleet.start_stage()
    await idle()
    assert (away(server), fleet.served()) == (GONE, False)
    assert core_of(server).totals().memory_releases == 1, "it knows what is away, and asks for nothing twice"
    await handed_over(fleet, turn, 1)
    assert (away(server), core_of(server).paused, fleet.labels()) == (set(), False, ["0.1"])


async def test_a_trainer_that_was_lost_in_its_turn_is_taken_over(fleet: Fleet, turn: TrainerTurn) -> None:
    await turn.acquire()
    second = await trainer(fleet.rig)
    await handed_over(fleet, second, 1)
    assert holder(second.topic).owner == "engine"
    assert holder(second.topic).turn > turn._turn
    assert fleet.labels() == ["0.1"]


async def test_a_rollout_that_the_turn_cuts_goes_on_from_its_tokens(tmp_path: Path) -> None:
    """Behind the generate stage: nothing is lost, and the tokens keep their versions. Waiting for the trainer does not
    count as waiting for an engine."""
    async with generating(tmp_path, engine=simulated(SLOW_MS)) as world:
        turn = await trainer(world.rig)
        await turn.release()
        await world.ready()
        world.stage.sampler.routes.wait_s = 0.05
        await world.ask(make_group(0, 1))
        server = world.engines[0]
        await freeze(server, 5)
        await turn.acquire()
        assert away(server) == GONE
        await asyncio.sleep(0.2)
        world.weights.publish(1)
        await turn.release()
        slice_ = await world.answer()
    [sample] = slice_.samples
    versions = token_versions(sample)
    assert sample.status == "completed"
    assert set(versions) == {0, 1}
    assert versions == sorted(versions)
