"""Servers as processes: started, waited for, watched, ended with all that they started, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_servers import PATIENCE_S, Told, configured, gone, outside, scheduler
from launching import ROOT, SIMULATED, SMALL, check_token, files_with, finish, here, made_model, start, succeed_here

from configs.schema import Config
from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.token import TokenFile, run_token
from models.fault_injection import FaultPlan
from pipeline.errors import ReplicaFailed, leaf
from pipeline.facts.run_directory import EngineSpec, Kind, RunDir
from pipeline.hosts.launcher import Handle, Launcher, ProcessSpec
from pipeline.hosts.local_launcher import LocalHandle, LocalLauncher
from pipeline.hosts.machine import held_port
from pipeline.supervise import engine_servers
from pipeline.supervise.engine_servers import EmbeddedOrSimulatedServer
from pipeline.supervise.health_probe import HealthProbe, HttpProbe, SchedulerProbe
from pipeline.supervise.restarts import Restarts, ServerSupervisor, StartCommand, SupervisedServer
from tests.stages.stage_rig import until

pytestmark = pytest.mark.slow


class FakeCharge(SupervisedServer):
    """The fake server, kept like SGLang's."""

    name, slow_start = "engine-0", True
    kind: Kind = "engine"

    def __init__(self, script: Path, reported: Told, config: Config, mode: str = "serve") -> None:
        self.script, self.told, self.config, self.mode = script, reported, config, mode
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
        assert [event[2] for event in kept.told.events if event[0] == "lost"] == ["engine-0"]
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


async def test_a_server_that_is_killed_while_it_starts_is_started_again(rundir: RunDir, fake: Path) -> None:
    """A kill from outside says nothing about the next start, so only --max-restarts bounds it."""
    kept, killed = Kept(rundir, fake, "never", restarts=2), [0]

    async def killed_thrice() -> None:
        async with kept.running():
            while len(killed) <= 3:
                await until(lambda: (rundir.specs / "engine-0.pid").exists() and kept.pid not in killed)
                killed.append(kept.pid)
                os.kill(kept.pid, signal.SIGKILL)
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises(BaseExceptionGroup) as raised:
        await killed_thrice()
    assert "engine-0 ended 3 times within 60 minutes, last with signal SIGKILL" in str(leaf(raised.value))


# The token of a run's servers: wanted by each of them, and seen by nobody.


def test_every_request_of_a_run_brings_its_token_and_shows_it_nowhere(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, "--use-tensorboard", "--num-rollout", "60")
    try:
        file = check_token(run_dir, process.pid, engine_0="/server_info")
    finally:
        done = finish(process, run_dir).check()
    assert not Path(file.path).exists()
    assert file.token.text not in done.out + done.err
    assert files_with(run_dir, file.token.text) == []


@pytest.fixture
def running_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server that runs already: its address, and the file with its token."""
    token, ready = run_token(tmp_path / "theirs").path, tmp_path / "ready.json"
    argv = [sys.executable, "-m", "models.engines.serve", "--engine", "embedded", "--model-path", made_model()[1]]
    argv += ["--token-file", token, "--ready-file", str(ready)]
    with subprocess.Popen(argv, cwd=ROOT) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"], Path(token)
        finally:
            process.kill()


def test_engines_that_run_already_want_their_own_token(tmp_path: Path, running_server: tuple[str, Path]) -> None:
    url, file = running_server
    (tmp_path / "wrong").touch(0o600)
    (tmp_path / "wrong").write_text("of-another-run")
    flags = [*SMALL, *made_model(), "--engine", "sglang", "--router", "none", "--rollout-external-engine-addrs", url]
    name = "--rollout-external-engine-token-file"
    for number, (more, words) in enumerate(
        [
            ([], "no token was sent"),
            ([name, str(tmp_path / "wrong")], "the token that was sent is not the one that it was started with"),
            ([name, str(tmp_path / "none")], "cannot be read (No such file or directory)"),
        ]
    ):
        refused = here(tmp_path / f"refused-{number}", *flags, *more)
        assert refused.code == 2, refused.err[-2000:]
        assert words in refused.err
        assert name in refused.err or number == 2
    done = succeed_here(tmp_path / "run", *flags, name, str(file))
    assert done.audit.outcomes["trained"] == 16
    assert files_with(done.run_dir, file.read_text()) == []


# An engine server that an earlier start of the run left: used if it is what would be started, idle at once, or ended.


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


async def running(client: EngineClient, requested: asyncio.Task[Any]) -> None:
    """Wait until the engine has begun with a request."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await client.loads())[0].num_running_reqs:
            assert not requested.done(), requested.exception()
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
        requested = tasks.create_task(client.generate(request()))
        await running(client, requested)
        await client.pause("in_place")  # as when the start before is killed in an update: nothing that runs would end

        second = Start(rundir, msgspec.structs.replace(spec, faults=plans[1]), process)  # a resume draws other faults
        async with second.running() as found:
            assert (found, second.handle.pid) == (url, process.pid)
            assert [output.aborted for output in await requested] == [True]
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
