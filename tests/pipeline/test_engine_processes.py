"""Servers as processes: started, waited for, watched, ended with all that they started, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_servers import PATIENCE_S, Told, configured, eventually, gone, outside, scheduler
from launching import SIMULATED_TRAINER, SMALL, files_with, here, made_model, succeed_here

from configs.schema import Config
from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from models.engines.access_token import Token, TokenFile, run_token
from models.engines.client import EngineClient
from models.engines.protocol import GenerateRequest, SamplingParams
from models.engines.serve import EngineServer
from models.fault_injection import FaultPlan
from pipeline.errors import ReplicaFailed, leaf
from pipeline.facts.run_directory import EngineSpec, Kind, RunDir
from pipeline.hosts.launcher import Handle, Launcher, ProcessSpec
from pipeline.hosts.local_launcher import LocalHandle, LocalLauncher
from pipeline.supervise import engine_servers
from pipeline.supervise.engine_servers import EmbeddedOrSimulatedServer
from pipeline.supervise.health_probe import HealthProbe, HttpProbe, SchedulerProbe
from pipeline.supervise.restarts import Restarts, ServerSupervisor, StartCommand, SupervisedServer
from tests.hostile_engine import SpoiltEngine, serving

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


# ------------------------------------------------------------------ one server


async def test_a_server_is_announced_again_after_its_death_and_when_it_takes_no_weights(
    rundir: RunDir, fake: Path
) -> None:
    """The word of the engines stage is of one life; the next is not blamed."""
    kept = Kept(rundir, fake)
    async with kept.running():
        assert (await kept.told.until("up"))[3:] == ("0", "9.9")
        assert any("engine-0: up after" in line for line in kept.told.lines)
        child, pid = await kept.child(), kept.pid
        os.kill(pid, signal.SIGKILL)
        assert (await kept.told.until("up", 2))[3] == "1"
        assert gone(child), "what a dead server leaves behind is ended with it"
        assert await kept.told.until("lost") == ("lost", "engine", "engine-0", "signal SIGKILL")
        pid = kept.pid
        kept.told.complaints["engine-0", 1] = "5 failures in a row: no room for them"
        why = ("lost", "engine", "engine-0", "5 failures in a row: no room for them")
        assert await kept.told.until("lost", 2) == why
        assert gone(pid)
        assert (await kept.told.until("up", 3))[3] == "2"
        await asyncio.sleep(3 * kept.config.health.rollout_health_check_interval)
        child, pid = await kept.child(), kept.pid
    assert [event[0] for event in kept.told.events] == ["up", "lost", "up", "lost", "up"]
    assert gone(child)
    assert gone(pid)


async def test_an_end_that_is_noticed_after_the_looks_is_the_reason_still(
    rundir: RunDir, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: two looks have failed long before."""
    wait = LocalHandle.wait

    async def late(handle: LocalHandle) -> int:
        code = await wait(handle)
        await asyncio.sleep(0.6)
        return code

    monkeypatch.setattr(LocalHandle, "wait", late)
    kept = Kept(rundir, fake)
    async with kept.running():
        await kept.told.until("up")
        os.kill(kept.pid, signal.SIGKILL)
        assert await kept.told.until("lost") == ("lost", "engine", "engine-0", "signal SIGKILL")


async def test_a_hung_server_is_ended_and_started_again(rundir: RunDir, fake: Path) -> None:
    kept = Kept(rundir, fake)
    async with kept.running():
        for life, why in enumerate(("is stopped", "/health gave no answer within 0.5 s"), 1):
            assert (await kept.told.until("up", life))[3] == str(life - 1)
            child, pid = await kept.child(), kept.pid
            os.kill(child if life == 1 else pid, signal.SIGSTOP)  # a stopped scheduler leaves /health as it is
            lost = await kept.told.until("lost", life)
            assert "2 failed health checks in a row" in lost[3]
            assert why in lost[3]
            assert gone(child), "it is ended before its loss is told"
            assert gone(pid)
        await kept.told.until("up", 3)


async def test_a_scheduler_may_be_silent_while_it_loads_weights(fake: Path, port: int) -> None:
    loading = True
    async with outside(fake, port), EngineClient(f"http://127.0.0.1:{port}", connect_timeout_s=5.0) as client:
        look = SchedulerProbe(HttpProbe(client, 0.5), None, lambda: loading)
        assert await look() is None
        os.kill(await scheduler(client), signal.SIGSTOP)
        assert await look() is None
        loading = False
        fault = await look()
        assert fault == "the scheduler does not answer: /server_info gave no answer within 0.5 s"


@pytest.mark.parametrize(
    ("mode", "restarts", "kills", "wait_s", "words"),
    [
        # Not its last line, which says nothing.
        ("broken", 5, 0, 300.0, ["ended with exit code 1 before it served, 2 times", "ValueError: the checkpoint has"]),
        ("never", 5, 0, 3.0, ["did not serve within --rollout-health-check-first-wait 3 s: still loading"]),
        ("serve", 1, 2, 300.0, ["ended 2 times within 60 minutes, last with signal SIGKILL", "--max-restarts"]),
        # A kill from outside says nothing about the next start, so only --max-restarts bounds it.
        ("never", 2, 3, 300.0, ["ended 3 times within 60 minutes, last with signal SIGKILL"]),
    ],
)
async def test_what_ends_the_run(
    mode: str, restarts: int, kills: int, wait_s: float, words: list[str], rundir: RunDir, fake: Path
) -> None:
    kept, killed = Kept(rundir, fake, mode, restarts, rollout_health_check_first_wait=wait_s), [0]

    async def until_the_end() -> None:
        async with kept.running():
            while len(killed) <= kills:
                if mode == "serve":
                    await kept.told.until("up", len(killed))
                await eventually(lambda: (rundir.specs / "engine-0.pid").exists() and kept.pid not in killed)
                killed.append(kept.pid)
                os.kill(kept.pid, signal.SIGKILL)
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises(BaseExceptionGroup) as raised:
        await until_the_end()
    error = leaf(raised.value)
    assert isinstance(error, ReplicaFailed)
    for one in ("engine-0", *words):
        assert one in str(error)
    assert kept.server.births == (2 if mode == "broken" else max(1, kills))
    assert gone(kept.pid)


# The token of servers; that of a run's own servers is in tests/pipeline/test_engine_faults.py.


class WithToken(SpoiltEngine):
    """A server that runs already, with a token of its own."""

    def __init__(self, token: Token) -> None:
        super().__init__(EngineConfig(), made_model()[1], {})
        self.token = token

    async def serve(self, up: threading.Event, stop: asyncio.Event) -> None:
        async with EngineServer(self.config, self.model, max_context_len=None, seed=0, token=self.token) as self.server:
            self.url = self.server.url
            up.set()
            await stop.wait()


def test_engines_that_run_already_want_their_own_token(tmp_path: Path) -> None:
    file, name = run_token(tmp_path / "theirs"), "--rollout-external-engine-token-file"
    (tmp_path / "wrong").touch(0o600)
    (tmp_path / "wrong").write_text("of-another-run")
    with serving(WithToken(file.token)) as server:
        flags = [*SMALL, *made_model(), *SIMULATED_TRAINER, "--engine", "sglang", "--router", "none"]
        flags += ["--rollout-external-engine-addrs", server.url]
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
        done = succeed_here(tmp_path / "run", *flags, name, file.path)
    assert done.audit.outcomes["trained"] == 16
    assert files_with(done.run_dir, file.token.text) == []


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
    config = EngineConfig(engine="simulated", simulated=SLOW)
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


async def test_a_server_that_is_not_what_is_wanted_is_ended(rundir: RunDir, spec: EngineSpec) -> None:
    first = Start(rundir, spec)
    async with first.running():
        pass

    async def replaced(why: str, spec: EngineSpec, process: LocalHandle) -> LocalHandle:
        """The process of a start that finds this one."""
        start = Start(rundir, spec, process)
        async with start.running():
            assert gone(process.pid)
            assert start.handle.pid != process.pid
        assert why in start.told.lines[0]
        return start.handle

    spec = msgspec.structs.replace(spec, max_context=77)
    process = await replaced("settings", spec, first.handle)
    other = run_token(rundir.servers / "another").token
    Path(spec.token.path).write_text(other.text)
    spec = msgspec.structs.replace(spec, token=TokenFile(spec.token.path, other))
    process = await replaced("http://127.0.0.1", spec, process)
    await process.kill()
    process = await replaced("http://127.0.0.1", spec, process)
    process.spec = msgspec.structs.replace(process.spec, note='{"url": "http://127.0.0.1:1"}')  # of another version
    process = await replaced("settings", spec, process)
    await process.kill()
