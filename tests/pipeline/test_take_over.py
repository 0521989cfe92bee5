"""An engine server that an earlier start of the run left: used if it is what would be started, idle at once, or ended.

The server is a real one; how it outlives a controller is in test_auto_resume.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_servers import PATIENCE_S, Told, configured, gone
from launching import made_model

from configs.schema import Config
from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.token import TokenFile, run_token
from models.fault_injection import FaultPlan
from pipeline.facts.run_directory import RunDir
from pipeline.facts.servers import EngineSpec
from pipeline.hosts.launcher import ProcessSpec
from pipeline.hosts.local_launcher import LocalHandle, LocalLauncher
from pipeline.supervise import engine_servers
from pipeline.supervise.engine_servers import EmbeddedOrSimulatedServer
from pipeline.supervise.restarts import Restarts, ServerSupervisor

pytestmark = pytest.mark.slow

NAME = "engine-0"
SLOW = SimulatedEngineConfig(a_ms=50.0, length_mean=10_000.0, length_sigma=0.0, vocab_size=32)


class Next(LocalLauncher):
    """That of a start which finds the server of the start before."""

    def __init__(self, rundir: RunDir, before: LocalHandle | None = None) -> None:
        super().__init__(rundir)
        self.before = before

    def left(self, name: str) -> str:
        return self.before.spec.note if self.before is not None else ""

    def take_over(self, spec: ProcessSpec) -> LocalHandle:
        assert self.before is not None
        taken, self.before = self.before, None
        taken.spec = spec
        self.handles[spec.name] = taken
        return taken


class Start:
    """One start of the run, as far as its engine goes."""

    def __init__(self, rundir: RunDir, spec: EngineSpec, before: LocalHandle | None = None) -> None:
        self.told, self.launcher, self.config = Told(), Next(rundir, before), configured()
        self.specs: list[EngineSpec] = []
        server = EmbeddedOrSimulatedServer(spec, self.told, lambda engine, host: "")  # type: ignore[arg-type]
        self.server = server
        self._keeper = ServerSupervisor(server, self.launcher, Restarts(self.told, 5), self.config.health)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its address. The process is left as it is."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._keeper.run())
            yield (await self.told.until("up"))[2]
            task.cancel()

    @property
    def handle(self) -> LocalHandle:
        return self.launcher.handles[NAME]


@pytest.fixture
def spec(rundir: RunDir) -> EngineSpec:
    config = msgspec.structs.replace(Config().engine, engine="simulated", simulated=SLOW)
    assert isinstance(config, EngineConfig)
    return EngineSpec(NAME, config, made_model()[1], None, 0, 0, token=run_token(rundir.servers / "engine-token"))


def request() -> GenerateRequest:
    return GenerateRequest(input_ids=[1, 2, 3], sampling_params=SamplingParams(max_new_tokens=1000))


async def running(client: EngineClient, asked: asyncio.Task[Any]) -> None:
    """Wait until the engine has begun with a request."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await client.loads())[0].num_running_reqs:
            assert not asked.done(), asked.exception()
            await asyncio.sleep(0.01)


async def test_a_server_that_was_left_is_taken_over_idle_and_one_that_hangs_is_replaced(
    rundir: RunDir, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spec.token is not None
    token = spec.token.token
    plans = [FaultPlan((), 0, generation, "", "") for generation in range(2)]
    first = Start(rundir, msgspec.structs.replace(spec, faults=plans[0]))
    async with first.running() as url:
        pass
    process = first.handle
    async with EngineClient(url, token=token) as client, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.generate(request()))
        await running(client, asked)
        await client.pause("in_place")  # as when the start before is killed in an update: nothing that runs would end

        second = Start(rundir, msgspec.structs.replace(spec, faults=plans[1]), process)  # a resume draws other faults
        async with second.running() as found:
            assert (found, second.handle.pid) == (url, process.pid)
            assert [output.aborted for output in await asked] == [True]
            assert not await client.ready(), "nothing is generated before it has weights of this start"
            assert second.server.spec.taken_over
        [line] = second.told.lines
        assert line.startswith("engine-0: taken over from the start before in ")
        assert [event[0] for event in second.told.events] == ["up"], "it is no restart"

        frozen = Start(rundir, msgspec.structs.replace(spec, frozen="judge", faults=plans[1]), process)
        async with frozen.running():
            assert await client.ready(), "its weights are those that it was started with"

    monkeypatch.setattr(engine_servers, "LIMIT_S", 0.5)
    os.kill(process.pid, signal.SIGSTOP)
    third = Start(rundir, msgspec.structs.replace(spec, faults=plans[1]), process)
    async with third.running() as found:
        assert gone(process.pid)
        assert third.handle.pid != process.pid
        assert not third.server.spec.taken_over
    assert third.told.lines[0].startswith("engine-0: not taken over from the start before, a new one is started: ")
    assert [event[0] for event in third.told.events] == ["up"]
    await third.launcher.stop_all()


@pytest.mark.parametrize("what", ["other settings", "another token", "it has ended", "another version's note"])
async def test_a_server_that_is_not_what_is_wanted_is_ended(what: str, rundir: RunDir, spec: EngineSpec) -> None:
    first = Start(rundir, spec)
    async with first.running():
        pass
    process = first.handle
    if what == "other settings":
        spec = msgspec.structs.replace(spec, max_context=77)
    elif what == "another token":
        assert spec.token is not None
        other = run_token(rundir.servers / "another").token
        spec = msgspec.structs.replace(spec, token=TokenFile(spec.token.path, other))
        Path(spec.token.path).write_text(other.text)
    elif what == "it has ended":
        await process.kill()
    else:
        process.spec = msgspec.structs.replace(process.spec, note='{"url": "http://127.0.0.1:1"}')
    second = Start(rundir, spec, process)
    async with second.running():
        assert gone(process.pid)
        assert second.handle.pid != process.pid
    why = "settings" if what in ("other settings", "another version's note") else "http://127.0.0.1"
    assert why in second.told.lines[0]
    await second.launcher.stop_all()
