"""The engines of a run as processes: our own servers and SGLang's, each supervised by a `ServerSupervisor`; or, for
tests and debugging, our own as a thread of this process.

Invariants: an engine's processes form one group, so that its scheduler and detokenizer end with it; its port is held
for it where it runs; nothing here makes an engine generate; one that an earlier start of the run left is announced as
such, or ended.

Taking over a server that an earlier start of the run left: its note says how it was started; then it is asked to give
up its work. It is taken over only if it was started as it would be started now, but for port and seed. The question
takes a few seconds at most, and whatever is wrong is a reason to start a new server, never an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema import Config
from models.engines.access_token import Token
from models.engines.client import EngineClient
from models.engines.launch.command import RUNNER, server_launch, with_token
from models.engines.launch.environment import Installed
from models.engines.serve import EngineServer
from models.errors import EngineError
from models.fault_injection import FaultPlan
from pipeline.errors import ReplicaFailed, UsageError
from pipeline.facts.run_directory import EngineSpec
from pipeline.hosts.launcher import Handle, Launcher, ProcessSpec
from pipeline.hosts.machine import PortInUse
from pipeline.supervise.health_probe import HealthProbe, HttpProbe, SchedulerProbe
from pipeline.supervise.lifecycle import Lifecycle
from pipeline.supervise.restarts import StartCommand, SupervisedServer

LIMIT_S: Final = 10.0  # for a server to answer; it is busy with nothing


class Note(Struct, frozen=True):
    """The note about a server from one start of the run for the next. `digest`: of its command and files."""

    url: str
    digest: str


async def refusal(url: str, token: Token | None, *, frozen: bool) -> str | None:
    """Have a server give up all that it does; why it cannot be used, None if it can. Waits `LIMIT_S` at the most."""
    try:
        async with asyncio.timeout(LIMIT_S):
            async with EngineClient(url, token=token) as client:
                await client.server_info()  # SGLang's HTTP process has to ask its scheduler
                await client.resume()  # what stands still would not end its requests
                await client.abort()
                await client.pause("abort")  # also requests that arrived meanwhile
                if frozen:
                    await client.resume()
    except EngineError as error:
        return str(error)
    except TimeoutError:
        return f"it did not answer within {LIMIT_S:g} s"
    return None


# SGLang looks for SIGTERM every 5 s, then has its schedulers give their GPU memory back. On a CPU there is nothing to
# give back, and nothing is written: it may be killed.
GPU_GRACE_S: Final = 20.0
COMPLAINT_POLL_S: Final = 0.5  # between two looks for a complaint


FetcherOf = Callable[[str, str], str]  # name of an engine and its host -> the fetcher of its weights, "" for none


class EngineProcess(SupervisedServer):
    """Common part of our servers and SGLang's. `program`: facts about it that the command line does not have."""

    program = ""

    def __init__(self, spec: EngineSpec, lifecycle: Lifecycle, fetcher: FetcherOf) -> None:
        self.spec, self.lifecycle, self._fetcher = spec, lifecycle, fetcher
        self.name, self.kind = spec.name, spec.kind
        self._incarnation = 0
        assert spec.token is not None, "every engine that the run starts has the token of the run"
        self.token = spec.token

    @contextlib.contextmanager
    def start_command(self, incarnation: int, launcher: Launcher) -> Iterator[StartCommand]:
        """Raises UsageError if the port that the user chose is taken."""
        host, self._incarnation = launcher.address(self.name), incarnation
        self.spec = msgspec.structs.replace(self.spec, taken_over=False)
        if not self.spec.frozen:
            self.spec = msgspec.structs.replace(self.spec, fetcher=self._fetcher(self.name, host))
        try:
            with launcher.held_port(self.name, self.spec.port) as port:
                process, url = self._process(self.spec, incarnation, host, port)
                note = msgspec.json.encode(Note(url, self._digest(host))).decode()
                process = msgspec.structs.replace(process, note=note, gpus=self.spec.gpus)
                yield StartCommand(process, url, self.token.token)
        except PortInUse as error:
            raise UsageError(
                f"{self.name}: {error.strerror}; choose another --engine-port (the first of the engines' ports), or 0 "
                "for any free ones"
            ) from error

    async def take_over(self, launcher: Launcher) -> tuple[StartCommand, Handle] | None:
        """Waits for a server that was left to answer, and for the end of one that is of no use."""
        if not (left := launcher.left(self.name)):
            return None
        clock = asyncio.get_running_loop().time
        host, began, note = launcher.address(self.name), clock(), None
        with contextlib.suppress(msgspec.MsgspecError):  # another version wrote it
            note = msgspec.json.decode(left, type=Note)
        process = msgspec.structs.replace(self._process(self.spec, 0, host, 0)[0], note=left)
        handle, token = launcher.take_over(process), self.token.token
        why: str | None = "it was started with other settings"
        if note is not None and note.digest == self._digest(host):
            why = await refusal(note.url, token, frozen=bool(self.spec.frozen))
        if note is None or why is not None:
            await handle.kill()
            self.lifecycle.say(f"{self.name}: not taken over from the start before, a new one is started: {why}")
            return None
        self.spec = msgspec.structs.replace(self.spec, taken_over=True)
        self.lifecycle.say(f"{self.name}: taken over from the start before in {clock() - began:.1f} s, at {note.url}")
        return StartCommand(process, note.url, token, taken_over=True), handle

    def _digest(self, host: str) -> str:
        """Of all that the engine is started with: command line, variables, and the files of its model, by size and time
        of change, since the weights of a frozen one are nowhere else. Left out are its port, where that is any, and
        what differs from one start of the run to the next: its seed, and which requests meet a fault."""
        faults = self.spec.faults and msgspec.structs.replace(self.spec.faults, run_generation=0)
        process, _ = self._process(msgspec.structs.replace(self.spec, faults=faults), 0, host, 0)
        files = [
            (str(file), (found := file.stat()).st_size, found.st_mtime_ns)
            for place in process.files
            for file in sorted(Path(place).iterdir() if Path(place).is_dir() else ())
            if file.exists()
        ]
        more = (self.spec.port, self.spec.gpus, self.program)
        parts = (process.argv, dict(process.env), files, more)
        return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()

    @abstractmethod
    def _process(self, spec: EngineSpec, incarnation: int, host: str, port: int) -> tuple[ProcessSpec, str]:
        """What to start so that it listens there, and its address."""

    async def up(self, client: EngineClient, incarnation: int) -> None:
        info = await client.server_info()
        self.lifecycle.engine_up(self.spec, client.base_url, incarnation, info.version)


class EmbeddedOrSimulatedServer(EngineProcess):
    """Our server, embedded or simulated, as a separate process."""

    def _process(self, spec: EngineSpec, incarnation: int, host: str, port: int) -> tuple[ProcessSpec, str]:
        argv = [
            *(sys.executable, "-P", "-m", "models.engines.serve"),
            *("--engine", spec.config.engine),
            *("--model-path", spec.model_path),
            *("--host", host),
            *("--port", str(port)),
            *("--config", msgspec.json.encode(spec.config).decode()),
            *("--seed", str(spec.seed)),
            *("--token-file", self.token.path),
            *("--log-level", spec.log_level),
        ]
        if spec.max_context:
            argv += ["--max-context-len", str(spec.max_context)]
        if spec.faults is not None:  # each incarnation counts requests from one, and draws again
            plan = msgspec.structs.replace(spec.faults, replica=f"{self.name}/{incarnation}")
            argv += ["--fault-plan", msgspec.json.encode(plan).decode()]
        files = (spec.model_path, self.token.path)
        return ProcessSpec(self.name, tuple(argv), sweep=True, files=files), f"http://{host}:{port}"


class SglangServer(EngineProcess):
    """A real SGLang server in its own environment."""

    slow_start = True

    def __init__(
        self, spec: EngineSpec, config: Config, installed: Installed, lifecycle: Lifecycle, fetcher: FetcherOf
    ) -> None:
        super().__init__(spec, lifecycle, fetcher)
        self.config, self.installed = config, installed
        self.program = f"SGLang {installed.sglang}"

    def _process(self, spec: EngineSpec, incarnation: int, host: str, port: int) -> tuple[ProcessSpec, str]:
        launch = server_launch(
            self.config,
            self.installed,
            model_path=spec.model_path,
            port=port,
            max_context=spec.max_context,
            seed=spec.seed + 7919 * incarnation,  # or it would repeat what the incarnation before sampled
            host=host,
        )
        launch = with_token(launch, self.token.path)
        files = (spec.model_path, self.token.path, RUNNER)
        grace_s = GPU_GRACE_S if self.installed.cuda else 0.0
        process = ProcessSpec(self.name, launch.argv, launch.env, ours=False, grace_s=grace_s, sweep=True, files=files)
        return process, launch.url

    def look(self, first: HttpProbe, process: Handle) -> HealthProbe:
        probe, plan = SchedulerProbe(first, process, self._slow), self.spec.faults
        if plan is None:
            return probe
        return KillingProbe(probe, process, msgspec.structs.replace(plan, replica=f"{self.name}/{self._incarnation}"))

    def _slow(self) -> bool:
        return self.kind != "frozen" and self.lifecycle.loading(self.name)


class KillingProbe:
    """Checks, some of which kill the server on purpose (fault injection)."""

    def __init__(self, look: HealthProbe, process: Handle, plan: FaultPlan) -> None:
        self._look, self._process, self._plan = look, process, plan
        self._looks = itertools.count(1)

    async def __call__(self) -> str | None:
        if self._plan.drawn(f"{self._plan.replica}/{next(self._looks)}") is not None:
            await self._process.kill()
        return await self._look()


class InProcessEngine:
    """Our server in this process. Not started again: its crash ends the run with its reason."""

    def __init__(self, spec: EngineSpec, lifecycle: Lifecycle) -> None:
        self.spec, self.lifecycle = spec, lifecycle
        self._retired = False

    def retire(self) -> None:
        """End it for good; `run` returns then."""
        self._retired = True

    async def run(self) -> None:
        """Waits for its crash, which raises EngineError, for a complaint, or for its retirement; unblocked by
        cancellation. Raises ReplicaFailed for a complaint, since a thread cannot be ended and restarted."""
        spec = self.spec
        server = EngineServer(
            spec.config,
            spec.model_path,
            max_context_len=spec.max_context,
            seed=spec.seed,
            port=spec.port,
            faults=spec.faults,
            token=spec.token.token if spec.token is not None else None,
        )
        async with server:
            async with EngineClient(server.url, token=server.token) as client:
                info = await client.server_info()
            self.lifecycle.engine_up(spec, server.url, 0, info.version)
            async with asyncio.TaskGroup() as tasks:
                crash = tasks.create_task(server.wait())
                while not self._retired:
                    if (why := self.lifecycle.complaint(spec.name, 0)) is not None:
                        raise ReplicaFailed(f"{spec.name}: {why}; an engine in this process cannot be restarted")
                    await asyncio.sleep(COMPLAINT_POLL_S)
                crash.cancel()
