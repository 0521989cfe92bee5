"""Servers as processes: started, waited for, watched, ended with all that they started, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fake_servers import FAKE, PATIENCE_S, Told, configured, gone, outside, scheduler

from configs.schema import Config
from models.engines.client import EngineClient
from pipeline.errors import ReplicaFailed, leaf
from pipeline.facts.run_directory import RunDir
from pipeline.facts.servers import EngineSpec, Kind
from pipeline.hosts.launcher import Handle, Launcher, ProcessSpec
from pipeline.hosts.local_launcher import LocalLauncher
from pipeline.hosts.machine import held_port
from pipeline.supervise.health_probe import HealthProbe, HttpProbe, SchedulerProbe
from pipeline.supervise.restarts import Restarts, ServerSupervisor, StartCommand, SupervisedServer

pytestmark = pytest.mark.slow


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE)
    return path


class FakeCharge(SupervisedServer):
    """The fake server, kept like SGLang's."""

    name, slow_start = "engine-0", True
    kind: Kind = "engine"

    def __init__(self, script: Path, told: Told, config: Config, mode: str = "serve") -> None:
        self.script, self.told, self.config, self.mode = script, told, config, mode
        self.births = 0

    @contextlib.contextmanager
    def start_command(self, incarnation: int, launcher: Launcher) -> Iterator[StartCommand]:
        self.births += 1
        with launcher.held_port(self.name) as port:
            argv = (sys.executable, str(self.script), str(port), self.mode)
            process = ProcessSpec(self.name, argv, ours=False, grace_s=0.0, sweep=True)
            yield StartCommand(process, f"http://{launcher.address(self.name)}:{port}")

    def look(self, first: HttpProbe, process: Handle) -> HealthProbe:
        return SchedulerProbe(first, process, lambda: self.told.loading(self.name))

    async def up(self, client: EngineClient, incarnation: int) -> None:
        info = await client.server_info()
        spec = EngineSpec(self.name, self.config.engine, "", None, 0, 0)
        self.told.engine_up(spec, client.base_url, incarnation, info.version)


class Kept:
    """A keeper over a fake server."""

    def __init__(self, rundir: RunDir, fake: Path, mode: str = "serve", restarts: int = 5, **health: float) -> None:
        self.told, self.config, self.rundir = Told(), configured(**health), rundir
        self.server = FakeCharge(fake, self.told, self.config, mode)
        self.launcher = LocalLauncher(rundir)
        self.restarts = Restarts(self.told, restarts)
        self.keeper = ServerSupervisor(self.server, self.launcher, self.restarts, self.config.health)

    @property
    def pid(self) -> int:
        return int((self.rundir.specs / "engine-0.pid").read_text())

    async def child(self) -> int:
        url = [e for e in self.told.events if e[0] == "up"][-1][2]
        async with EngineClient(url) as client:
            return await scheduler(client)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(self.keeper.run())
                yield
                task.cancel()
        finally:
            await self.launcher.stop_all()


# ------------------------------------------------------------------ the engines stage's word


async def test_an_engine_that_takes_no_weights_is_started_anew_and_its_next_life_is_not_blamed(
    rundir: RunDir, fake: Path
) -> None:
    kept = Kept(rundir, fake)
    async with kept.running():
        await kept.told.until("up")
        first = kept.pid
        kept.told.complaints["engine-0", 0] = "5 failures in a row: no room for them"
        assert await kept.told.until("lost") == ("lost", "engine", "engine-0", "5 failures in a row: no room for them")
        assert gone(first)
        assert (await kept.told.until("up", 2))[3] == "1"
        await asyncio.sleep(3 * kept.config.health.rollout_health_check_interval)
    assert [event[0] for event in kept.told.events] == ["up", "lost", "up"]


async def test_engines_that_take_no_weights_end_the_run_when_the_budget_of_restarts_is_spent(
    rundir: RunDir, fake: Path
) -> None:
    kept = Kept(rundir, fake, restarts=1)
    for incarnation in range(3):
        kept.told.complaints["engine-0", incarnation] = "5 failures in a row: no room for them"
    try:
        with pytest.raises(ReplicaFailed, match=r"engine-0 ended 2 times .*, last with 5 failures in a row: no room"):
            await kept.keeper.run()
    finally:
        await kept.launcher.stop_all()


# ------------------------------------------------------------------ one server


async def test_a_server_is_announced_when_it_serves_and_again_after_its_death(rundir: RunDir, fake: Path) -> None:
    kept = Kept(rundir, fake)
    async with kept.running():
        first = await kept.told.until("up")
        assert first[3:] == ("0", "9.9")
        assert any("engine-0: up after" in line for line in kept.told.lines)
        child, pid = await kept.child(), kept.pid
        os.kill(pid, signal.SIGKILL)
        second = await kept.told.until("up", 2)
        assert second[3] == "1"
        assert gone(child), "what a dead server leaves behind is ended with it"
        assert kept.told.events[1] == ("lost", "engine", "engine-0", "signal SIGKILL")
        assert kept.restarts.counts == {"engine-0": 1}
        child, pid = await kept.child(), kept.pid
    assert gone(child)
    assert gone(pid)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_hung_server_is_ended_and_started_again(rundir: RunDir, fake: Path, whole: bool) -> None:
    kept = Kept(rundir, fake)
    async with kept.running():
        await kept.told.until("up")
        child, pid = await kept.child(), kept.pid
        os.kill(pid if whole else child, signal.SIGSTOP)  # a stopped scheduler leaves /health as it is
        lost = await kept.told.until("lost")
        why = "/health gave no answer within 0.5 s" if whole else "is stopped"
        assert "2 failed health checks in a row" in lost[3]
        assert why in lost[3]
        assert gone(child), "it is ended before its loss is told"
        assert gone(pid)
        assert (await kept.told.until("up", 2))[3] == "1"


async def test_a_scheduler_may_be_silent_while_it_loads_weights(fake: Path) -> None:
    loading = True
    with held_port() as port:
        async with outside(fake, port), EngineClient(f"http://127.0.0.1:{port}", connect_timeout_s=5.0) as client:
            look = SchedulerProbe(HttpProbe(client, 0.5), None, lambda: loading)
            assert await look() is None
            os.kill(await scheduler(client), signal.SIGSTOP)
            assert await look() is None
            loading = False
            fault = await look()
            assert fault == "the scheduler does not answer: /server_info gave no answer within 0.5 s"


async def test_a_server_that_never_comes_up_ends_the_run_with_its_last_words(rundir: RunDir, fake: Path) -> None:
    kept = Kept(rundir, fake, "broken")
    with pytest.raises(BaseExceptionGroup) as raised:
        async with kept.running():
            await asyncio.sleep(PATIENCE_S)
    error = leaf(raised.value)
    assert isinstance(error, ReplicaFailed)
    assert "engine-0 ended with exit code 1 before it served, 2 times" in str(error)
    assert "ValueError: the checkpoint has no head" in str(error), "not the last line, which says nothing"
    assert kept.server.births == 2


async def test_waiting_for_a_server_is_bounded(rundir: RunDir, fake: Path) -> None:
    kept = Kept(rundir, fake, "never", rollout_health_check_first_wait=3.0)
    with pytest.raises(BaseExceptionGroup) as raised:
        async with kept.running():
            await asyncio.sleep(PATIENCE_S)
    assert "did not serve within --rollout-health-check-first-wait 3 s: still loading" in str(leaf(raised.value))
    assert gone(kept.pid)


async def test_restarts_have_a_budget(rundir: RunDir, fake: Path) -> None:
    kept = Kept(rundir, fake, restarts=1)

    async def killed_twice() -> None:
        async with kept.running():
            for life in (1, 2):
                await kept.told.until("up", life)
                os.kill(kept.pid, signal.SIGKILL)
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises(BaseExceptionGroup) as raised:
        await killed_twice()
    assert "engine-0 ended 2 times within 60 minutes, last with signal SIGKILL" in str(leaf(raised.value))
    assert "--max-restarts" in str(leaf(raised.value))
