"""The local runner: one spawned process per stage replica and per engine, supervised.

Invariants: a replica that ends without being asked to is reported as lost at once, so that its leases move on, and is
started again with backoff within a bounded budget; the trainer is not, since its state is in its last checkpoint;
nothing is left running when `run` returns, however it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

import pipeline
from configs.schema import EngineConfig
from pipeline.errors import EXIT_DISK_FULL, ReplicaFailed, UsageError
from pipeline.replica import ReplicaSpec
from pipeline.rundir import RunDir

ENGINE_START_S = 180.0
STOP_GRACE_S = 5.0
NOT_RESTARTED = ("train",)


class EngineSpec(Struct, frozen=True):
    """One engine process. `frozen`: the name under which stages ask it, for an engine that gets no new weights."""

    name: str
    config: EngineConfig
    model_path: str
    max_context: int | None
    port: int
    seed: int
    frozen: str = ""

    @property
    def topic(self) -> str:
        """Under which its address is published. What generates watches `engine/` alone."""
        return f"frozen/{self.frozen}" if self.frozen else f"engine/{self.name}"


class Lifecycle(Struct):
    """What the runner tells its controller."""

    lost: Callable[[str, str, str], None]  # stage, replica, why: release its leases, count the restart
    engine_up: Callable[[EngineSpec, str, int], None]  # url, incarnation


def backoff_s(restarts: int) -> float:
    """0.2, 0.4, 0.8 ... at most 10 seconds."""
    return float(min(0.2 * 2 ** max(restarts - 1, 0), 10.0))


def child_environment(processes: int) -> dict[str, str]:
    """Environment of worker processes: importable from the project and from where the user stands, few threads each."""
    root = str(Path(pipeline.__file__).parent.parent)
    paths = [root, os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // max(1, processes)))
    return {
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-50:] if line.strip()]
        if lines:
            return lines[-1].split(": ", 1)[-1][:500]
    return "no output"


class LocalRunner:
    """Processes on this machine."""

    def __init__(
        self,
        rundir: RunDir,
        specs: list[ReplicaSpec],
        engines: list[EngineSpec],
        lifecycle: Lifecycle,
        *,
        max_restarts: int,
    ) -> None:
        self.rundir, self.specs, self.engines, self.lifecycle = rundir, specs, engines, lifecycle
        self.max_restarts = max_restarts
        self.restarts: dict[str, int] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._ending = asyncio.Event()
        self._environment = child_environment(len(engines) + 1)

    def end(self) -> None:
        """The streams are ending: replicas finish by themselves, engines are stopped when the last one has."""
        self._ending.set()

    def alive(self) -> list[str]:
        """Replicas (not engines) whose process has not ended."""
        replicas = [spec.replica for spec in self.specs]
        return [r for r in replicas if (p := self._processes.get(r)) is not None and p.returncode is None]

    async def run(self) -> None:
        """Start everything; wait until all replicas have ended. Raises ReplicaFailed or UsageError."""
        try:
            async with asyncio.TaskGroup() as everything:
                engines = [everything.create_task(self._keep_engine(spec)) for spec in self.engines]
                async with asyncio.TaskGroup() as replicas:
                    for spec in self.specs:
                        replicas.create_task(self._keep(spec))
                for task in engines:
                    task.cancel()
        finally:
            await self._stop_all()

    async def _spawn(self, name: str, arguments: list[str]) -> asyncio.subprocess.Process:
        with (self.rundir.logs / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the controller
            )
        self._processes[name] = process
        (self.rundir.specs / f"{name}.pid").write_text(str(process.pid))
        return process

    async def _keep(self, spec: ReplicaSpec) -> None:
        """Waits for the process to end; starts it again unless it ended well, or may not be."""
        path = self.rundir.specs / f"{spec.replica}.json"
        path.write_bytes(msgspec.json.encode(spec))
        while True:
            process = await self._spawn(spec.replica, ["pipeline.worker", str(path)])
            code = await process.wait()
            if code == 0:
                return
            await self._again(spec.stage, spec.replica, code)

    async def _again(self, stage: str, replica: str, code: int) -> None:
        """Report the loss and wait out the backoff, or give up."""
        why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        log = self.rundir.logs / f"{replica}.log"
        if code == EXIT_DISK_FULL:
            raise UsageError(f"there is no space left for {self.rundir.path}; free some, or choose another --run-dir")
        if code == 2:
            raise UsageError(f"{replica}: {last_words(log)}")
        if stage in NOT_RESTARTED:
            said = "" if code < 0 else f": {last_words(log)}"
            raise ReplicaFailed(
                f"{replica} ended with {why}{said}; continue from the last checkpoint with --resume {self.rundir.path}"
            )
        self.lifecycle.lost(stage, replica, why)
        restarts = self.restarts[replica] = self.restarts.get(replica, 0) + 1
        if restarts > self.max_restarts:
            raise ReplicaFailed(
                f"{replica} ended {restarts} times, last with {why}: {last_words(log)}; see {log}, "
                "or raise --max-restarts"
            )
        await asyncio.sleep(backoff_s(restarts))

    async def _keep_engine(self, spec: EngineSpec) -> None:
        """Waits for the engine to end; starts it again with a new incarnation. Runs until cancelled."""
        incarnation = 0
        while True:
            ready = self.rundir.sockets / f"{spec.name}.{incarnation}.json"
            process = await self._spawn(spec.name, engine_command(spec, ready))
            async with asyncio.TaskGroup() as tasks:
                announce = tasks.create_task(self._announce(spec, ready, incarnation))
                code = await process.wait()
                announce.cancel()
            incarnation += 1
            await self._again("frozen" if spec.frozen else "engine", spec.name, code if code != 0 else 1)

    async def _announce(self, spec: EngineSpec, ready: Path, incarnation: int) -> None:
        """Waits for the ready file, bounded."""
        try:
            async with asyncio.timeout(ENGINE_START_S):
                while not ready.exists():  # noqa: ASYNC110  (a file announces nothing)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            log = self.rundir.logs / f"{spec.name}.log"
            raise ReplicaFailed(
                f"{spec.name} did not serve within {ENGINE_START_S:g} s: {last_words(log)}; see {log}"
            ) from None
        self.lifecycle.engine_up(spec, json.loads(ready.read_text())["url"], incarnation)

    async def _stop_all(self) -> None:
        alive = {name: p for name, p in self._processes.items() if p.returncode is None}
        for process in alive.values():
            with contextlib.suppress(ProcessLookupError):  # it ended in between
                process.terminate()
        with contextlib.suppress(TimeoutError):  # then they are killed
            async with asyncio.timeout(STOP_GRACE_S):
                for process in alive.values():
                    await process.wait()
        for process in alive.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it ended in between
                    process.kill()
                await process.wait()


def engine_command(spec: EngineSpec, ready: Path) -> list[str]:
    command = [
        "models.engines.serve",
        *("--engine", spec.config.engine),
        *("--model-path", spec.model_path),
        *("--port", str(spec.port)),
        *("--ready-file", str(ready)),
        *("--config", msgspec.json.encode(spec.config).decode()),
        *("--seed", str(spec.seed)),
    ]
    return command + (["--max-context-len", str(spec.max_context)] if spec.max_context else [])
