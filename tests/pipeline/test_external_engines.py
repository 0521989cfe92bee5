"""Engines that run already: checked, dropped while they are away, taken back, never ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_servers import FAKE, Told, configured, eventually, outside
from msgspec.structs import replace

from configs.schema import Config
from models.engines.protocol import ModelInfo
from models.engines.token import Token, TokenFile
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.facts.servers import EngineSpec, read_fleet
from pipeline.facts.stats import outage_text
from pipeline.hosts.local_launcher import LocalLauncher
from pipeline.hosts.machine import held_port
from pipeline.record.recorder import Recorder
from pipeline.supervise.announce import Announcer
from pipeline.supervise.external_servers import ExternalEngine, ExternalRouter, PolicyConfig, differs
from pipeline.supervise.restarts import Restarts
from pipeline.supervise.servers import supervisors
from stages.topic_values import Complaint, EngineEntry, RouterAddress, addresses
from tests.transport.memory_link import MemoryNetwork, MemoryNode


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


def external(told: Told, port: int, model: Path, **health: float) -> ExternalEngine:
    config = configured(**health)
    spec = EngineSpec("engine-0", config.engine, str(model), None, 0, 0, external=f"http://127.0.0.1:{port}")
    return ExternalEngine(spec, told, config.health)


def frozen_spec(config: Config, name: str, address: str) -> EngineSpec:
    return EngineSpec(f"frozen-{name}", config.engine, "", None, 0, 0, frozen=name, external=address)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["Tiny"], "vocab_size": 32}')
    return tmp_path


@contextlib.asynccontextmanager
async def watched(run: Callable[[], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run())
        yield
        task.cancel()


@pytest.mark.slow
async def test_an_external_engine_is_dropped_while_it_is_away_and_taken_back(fake: Path, policy: Path) -> None:
    told = Told()
    with held_port() as port:
        async with watched(external(told, port, policy).run):
            async with outside(fake, port) as process:
                assert (await told.until("up"))[3:] == ("0", "9.9")
                os.kill(process.pid, signal.SIGSTOP)
                away = await told.until("away")
                assert "2 failed health checks in a row (/model_info gave no answer" in away[2]
                assert process.returncode is None, "it is not ours to end"
                os.kill(process.pid, signal.SIGCONT)
                assert (await told.until("up", 2))[3] == "1"
            await told.until("away", 2)
            async with outside(fake, port, "Other"):
                await eventually(lambda: [("said",)] if any("it is left out" in line for line in told.lines) else [])
                assert [e[0] for e in told.events] == ["up", "away", "up", "away"]
            async with outside(fake, port):
                assert (await told.until("up", 3))[3] == "2"
    left_out = [line for line in told.lines if "left out" in line]
    assert left_out == [
        f"engine-0: http://127.0.0.1:{port} is back, but it serves a Other, the policy is a Tiny; it is left out"
    ]


async def test_an_external_engine_that_takes_no_weights_counts_as_away_and_is_tried_again(
    fake: Path, policy: Path
) -> None:
    told = Told()
    with held_port() as port:
        async with outside(fake, port) as process, watched(external(told, port, policy).run):
            await told.until("up")
            told.complaints["engine-0", 0] = "5 failures in a row: no room for them"
            assert (await told.until("away"))[2] == "5 failures in a row: no room for them"
            assert (await told.until("up", 2))[3] == "1"
            assert process.returncode is None, "it is not ours to end"
    assert any("answers again" in line for line in told.lines)


async def test_an_external_engine_of_another_model_is_refused(fake: Path, policy: Path) -> None:
    with held_port() as port:
        async with outside(fake, port, "Other"):
            with pytest.raises(
                UsageError, match="it serves a Other, the policy is a Tiny; start it with the checkpoint"
            ):
                await external(Told(), port, policy).run()


async def test_an_external_engine_that_is_not_there_is_told_with_the_cure(policy: Path) -> None:
    with held_port() as port:
        engine = external(Told(), port, policy, rollout_health_check_first_wait=0.3)
        with pytest.raises(
            UsageError, match=r"--rollout-external-engine-addrs .* no healthy engine answers .* start it"
        ):
            await engine.run()


@pytest.mark.parametrize(
    ("info", "theirs", "found"),
    [
        (ModelInfo(architectures=["Tiny"]), None, None),
        (ModelInfo(), None, None),
        (ModelInfo(architectures=["Tiny"], vocab_size=64), None, "its vocab_size is 64, the policy's is 32"),
        (
            ModelInfo(architectures=["Tiny"]),
            PolicyConfig(("Tiny",), 32, hidden_size=128),
            "its hidden_size is 128, the policy's is 64",
        ),
    ],
)
def test_models_are_told_apart_by_what_is_known(
    info: ModelInfo, theirs: PolicyConfig | None, found: str | None
) -> None:
    assert differs(PolicyConfig(("Tiny",), 32, 64, 2), info, theirs) == found


@pytest.mark.slow
async def test_a_frozen_engine_at_an_address_is_watched_too_and_may_serve_any_model(fake: Path, policy: Path) -> None:
    told, config = Told(), configured()
    with held_port() as port:
        address = f"http://127.0.0.1:{port}"
        watch = ExternalEngine(frozen_spec(config, "judge", address), told, config.health)
        async with outside(fake, port, "Other") as process, watched(watch.run):
            assert await told.until("up") == ("up", "frozen-judge", address, "0", "9.9")
            told.is_loading = True  # nobody gives it weights: that is no excuse for its scheduler
            os.kill(process.pid, signal.SIGSTOP)
            assert "/model_info gave no answer" in (await told.until("away"))[2]
            os.kill(process.pid, signal.SIGCONT)
            assert (await told.until("up", 2))[3] == "1"


async def test_a_frozen_engine_that_is_not_there_is_told_with_its_own_flag() -> None:
    config = configured(rollout_health_check_first_wait=0.3)
    with held_port() as port:
        spec = frozen_spec(config, "judge", f"http://127.0.0.1:{port}/")
        told = rf"--frozen-engine judge=http://127.0.0.1:{port}: no healthy engine answers there .* give a checkpoint"
        with pytest.raises(UsageError, match=told):
            await ExternalEngine(spec, Told(), config.health).run()


@pytest.mark.slow
async def test_a_router_at_an_address_is_dropped_while_it_is_away_and_comes_back_anew(fake: Path) -> None:
    told, config = Told(), configured()
    with held_port() as port:
        address = f"http://127.0.0.1:{port}"
        run = ExternalRouter("smg", address + "/", told, config.health).run
        async with outside(fake, port) as process, watched(run):
            assert await told.until("router") == ("router", "smg", address, "0", "")
            os.kill(process.pid, signal.SIGSTOP)
            assert "/health gave no answer" in (await told.until("away"))[2]
            assert process.returncode is None
            os.kill(process.pid, signal.SIGCONT)
            assert (await told.until("router", 2))[3] == "1", "it may have lost its workers"
    assert told.lines == [f"router: {address} answers again"]


async def test_a_router_that_is_not_there_is_told_with_the_cure() -> None:
    config = configured(rollout_health_check_first_wait=0.3)
    with held_port() as port:
        router = ExternalRouter("sglang", f"http://127.0.0.1:{port}", Told(), config.health)
        with pytest.raises(
            UsageError, match=r"--router-address .*: no router answers there .* one starts with the run"
        ):
            await router.run()


def with_addresses(config: Config) -> Config:
    return replace(
        config,
        engine=replace(config.engine, frozen_engine=("judge=http://j:1", "own=/models/own")),
        router=replace(config.router, router="smg", router_address="http://r:2"),
    )


async def test_what_was_given_by_address_is_watched_by_the_fleet(tmp_path: Path) -> None:
    config = with_addresses(configured())
    restarts = Restarts(Told(), 0)
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        specs = [frozen_spec(config, "judge", "http://j:1")]
        placement: Any = SimpleNamespace(config=config, external_token=TokenFile("f", Token("of-others")))
        none: Any = None  # nobody here has weights brought
        found, _ = await supervisors(placement, specs, LocalLauncher(rundir), restarts, none, in_process=False)
        engine, router = found.values()
    assert isinstance(engine, ExternalEngine)
    assert (engine.spec.name, engine.spec.frozen, engine.url) == ("frozen-judge", "judge", "http://j:1")
    assert isinstance(router, ExternalRouter)
    assert (router.kind, router.url, router.token) == ("smg", "http://r:2", Token("of-others"))


async def test_what_is_away_leaves_the_topic_and_the_words_say_what_follows(tmp_path: Path) -> None:
    config = with_addresses(configured())
    lines: list[str] = []
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        async with MemoryNode("run", "test", MemoryNetwork()) as node:
            topic = await node.topic_server("topic")
            recorder = Recorder(config, rundir)
            recorder.lines = lines.append
            announcer = Announcer(topic, {}, recorder)
            spec = frozen_spec(config, "judge", "http://j:1")
            announcer.engine_up(spec, "http://j:1", 0, "0.5.23")
            announcer.router_up(RouterAddress("smg", "http://r:2", 0), "", "")
            assert sorted(topic.items("")) == ["engine/frozen-judge", "router"]
            assert addresses(topic, "judge")["frozen-judge"].url == "http://j:1"
            assert read_fleet(rundir)["frozen-judge"].role == "frozen"
            announcer.engine_away(spec, "2 failed health checks in a row (refused)")
            topic.publish("router_state", b"")
            announcer.router_away("http://r:2", "a failed health check (refused)")
            assert sorted(topic.items("")) == []
            engine = EngineSpec("engine-0", config.engine, "", None, 0, 0, external="http://e:3")
            announcer.engine_up(engine, "http://e:3", 0, "0.5.23")
            assert list(addresses(topic, "policy")) == ["engine-0"]
            complaint = Complaint("engine-0", 0, "5 failures in a row")
            topic.publish("complaint/engine-0", msgspec.msgpack.encode(complaint))
            assert announcer.complaint("engine-0", 0) == "5 failures in a row"
            assert announcer.complaint("engine-0", 1) is None, "a later life is not blamed"
            entry = EngineEntry("engine-0", "http://e:3", 0, state="serving", run_generation=0, version=0, limit=8)
            for fetching, loads in ((-1, False), (0, True), (5, True)):
                known = replace(entry, fetching=fetching)
                topic.publish("directory/engine-0", msgspec.msgpack.encode(known))
                assert announcer.loading("engine-0") == loads
            assert announcer.loading("engine-1"), "it has no weights yet"
            topic.publish("device/engine-0", b"")
            announcer.engine_away(engine, "a failed health check (refused)")
            assert sorted(topic.items("")) == []
            announcer.router_up(RouterAddress("sglang", "http://r:4", 0), "", "")
            announcer.lost("router", "router", "exit code 1")
            assert sorted(topic.items("")) == [], "it is told of before another one is started"
    assert lines == [
        "frozen-judge: http://j:1 is lost after 2 failed health checks in a row (refused); its requests wait "
        "until it is back",
        "router: http://r:2 is lost after a failed health check (refused); new requests wait for it, its "
        "pending requests continue at the engines directly",
        "engine-0: http://e:3 is lost after a failed health check (refused); its work waits until it is back",
        "router ended with exit code 1; restarting it, new requests wait for it, its pending requests continue "
        "at the engines directly",
    ]


@pytest.mark.parametrize(
    ("scale", "kind", "words"),
    [
        ({}, "engine", "its work waits until it is back"),
        ({"engine": 2}, "engine", "its work goes to others"),
        ({"generate": 2}, "generate", "its work goes to others"),
        ({"generate": 1}, "generate", "its work waits until it is back"),
        ({"engine": 2}, "frozen", "its requests wait until it is back"),
        ({"engine": 2}, "engines", "the engines keep their weights until it is back"),
    ],
)
def test_work_goes_to_others_only_where_there_are_others(scale: dict[str, int], kind: str, words: str) -> None:
    config = configured()
    assert outage_text(replace(config, run=replace(config.run, scale=scale)), kind) == words
