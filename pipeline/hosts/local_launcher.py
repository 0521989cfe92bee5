"""Processes of a run on this machine: spawned, named, logged, ended with everything that they started.

Invariants: each process leads a process group of its own, so that what it starts can be ended with it; its output goes
to `logs/<name>.log`, its number to `replicas/<name>.pid`; the kernel ends it with this process, however this ends, or
with the parent of `--auto-resume`, if that keeps it; after `stop_all` none is alive but what is left to a next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pipeline
from models.weights.layout import list_left_behind
from pipeline.facts.run_directory import RunDir
from pipeline.facts.text import visible
from pipeline.hosts import die_with_parent as die_with_parent
from pipeline.hosts.kept_processes import KeptProcess, KeptProcesses
from pipeline.hosts.launcher import (
    ANYTHING,
    SOCKETS,
    STOP_GRACE_S,
    ProcessSpec,
    ProcessState,
    Resources,
    quiet,
    stop_together,
)
from pipeline.hosts.processes import HOST, group_state, held_port, kill_group, living, remove, shared_files
from pipeline.hosts.shared_files import SharedFiles

GROUP_GONE_S = 5.0
_TAIL_BYTES = 64 << 10
# "torch.OutOfMemoryError: CUDA out of memory" with or without a time before it, and what SGLang prints of a lost child.
_ERROR = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:(?:\w+\.)*\w*(?:Error|Exception): \S|.*\bcrashed with exit code\b).*")


def child_environment(threads: int) -> dict[str, str]:
    """Environment of worker processes: our modules come first, few threads each."""
    root = str(Path(pipeline.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": str(threads),
        **PASSIVE,
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }


# Threads that wait spin for some microseconds, then sleep. Spinning for milliseconds, as is the default of both
# libraries, they take the processor from those that they wait for as soon as anything else runs on the machine: a
# training step then took 15 times as long. Sleeping at once costs a wake-up at each operation of a small model: a step
# of two threads then takes longer than of one (0.080 s against 0.076 s, and 0.056 s with this count).
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


class LocalHandle:
    """A process of this machine."""

    def __init__(
        self,
        spec: ProcessSpec,
        process: asyncio.subprocess.Process | KeptProcess,
        log: Path,
        log_start: int,
        directory: Path,
    ) -> None:
        """`directory`: it goes with whoever the process ends with."""
        self.spec, self.log, self._directory = spec, log, directory
        self.pid = process.pid  # also the number of its group
        self._process, self.log_start = process, log_start
        self._shared: set[Path] = set()  # what it would leave in shared memory

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def host_lost(self) -> bool:
        return False

    async def wait(self) -> int:
        return await self._process.wait()

    def remember_shared(self) -> None:
        new = shared_files(self.pid) - self._shared
        if new:
            self._shared |= new
            with contextlib.suppress(OSError):  # the list is for those who come after a kill
                list_left_behind(self._directory, new)

    def state(self) -> ProcessState | None:
        return group_state(self.pid)

    async def kill(self) -> int:
        self.remember_shared()
        await self._kill_group()
        return await self.wait()

    async def stop(self) -> None:
        """Waits for the end; unblocked by it, or by the grace's end, which kills it."""
        if self.spec.sweep:
            self.remember_shared()
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            self._process.send_signal(signal.SIGTERM if self.spec.grace_s else signal.SIGKILL)
        ended = False
        with contextlib.suppress(TimeoutError):  # then it is killed
            async with asyncio.timeout(self.spec.grace_s or STOP_GRACE_S):
                await self.wait()
                ended = True
        if self.spec.sweep or not ended:
            await self._kill_group()

    def last_line(self) -> str:
        return last_line(self.log, self.log_start)

    def last_error(self) -> str:
        return last_error(self.log, self.log_start)

    async def _kill_group(self) -> None:
        """Waits until all of the group have ended, at most `GROUP_GONE_S` seconds: what they held is free then."""
        kill_group(self.pid)
        await self.wait()
        with contextlib.suppress(TimeoutError):  # the kernel is not done with one of them; nothing more can be done
            async with asyncio.timeout(GROUP_GONE_S):
                while living(self.pid):  # noqa: ASYNC110  (a group announces nothing)
                    await asyncio.sleep(0.01)
        remove(self._shared)


class LocalLauncher:
    """Implements `Launcher`. `threads`: how many each process may compute with. `kept`: those that outlive this one."""

    controller: str | None = None

    def __init__(self, rundir: RunDir, threads: int = 1, kept: KeptProcesses | None = None) -> None:
        self.rundir, self._kept = rundir, kept
        if kept is not None:
            rundir.servers = kept.directory
        self._environment = {**child_environment(threads), SOCKETS: str(rundir.sockets)}
        self.say: Callable[[str], None] = quiet
        self.waiting: Mapping[str, str] = {}
        self.handles: dict[str, LocalHandle] = {}

    def address(self, name: str) -> str:
        return HOST

    def held_port(self, name: str, port: int = 0) -> AbstractContextManager[int]:
        return held_port(port)

    async def place(self, name: str, beside: str = "", sees: SharedFiles | None = None) -> None:
        """See the Protocol. There is one host."""

    def expect(self, name: str) -> None:
        """See the Protocol. Processes share this host."""

    async def release(self, name: str) -> None:
        """See the Protocol. Nothing was kept for it."""

    async def spawn(self, spec: ProcessSpec, resources: Resources = ANYTHING) -> LocalHandle:
        return self._named(await self._start(spec, resources))

    def _named(self, handle: LocalHandle) -> LocalHandle:
        self.handles[handle.spec.name] = handle
        self.rundir.write_pid(handle.spec.name, handle.pid)
        return handle

    def left(self, name: str) -> str:
        return self._kept.note(name) if self._kept is not None else ""

    def take_over(self, spec: ProcessSpec) -> LocalHandle:
        assert self._kept is not None
        log = _log(self.rundir, spec.name)
        start = log.stat().st_size if log.exists() else 0
        return self._named(LocalHandle(spec, self._kept.take(spec.name), log, start, self._kept.directory))

    async def end_left(self, names: Collection[str]) -> None:
        for name in await self._kept.end_others(names) if self._kept is not None else ():
            self.say(f"{name}: ended, an earlier start of the run left it and this one has no such server")

    def leave(self) -> None:
        if self._kept is not None:
            self.handles = {name: handle for name, handle in self.handles.items() if not handle.spec.note}

    async def _start(self, spec: ProcessSpec, resources: Resources) -> LocalHandle:
        env = {**(self._environment if spec.ours else os.environ), **spec.env}
        if resources.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(resources.gpus)
        path = _log(self.rundir, spec.name)
        if self._kept is not None and spec.note:
            start = path.stat().st_size if path.exists() else 0
            kept = await self._kept.start(spec.name, spec.argv, env, path, spec.note)
            return LocalHandle(spec, kept, path, start, self._kept.directory)
        with path.open("ab") as log:
            start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-IS", str(die_with_parent.__file__), str(os.getpid())),
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=env,
                start_new_session=True,  # Ctrl-C is for the controller
            )
        return LocalHandle(spec, process, path, start, self.rundir.sockets)

    async def stop_all(self) -> None:
        await stop_together(self.handles.values())


def _log(rundir: RunDir, name: str) -> Path:
    return rundir.logs / f"{name}.log"


def last_line(log: Path, start: int = 0) -> str:
    return _last_of(_lines(log, start))


def last_error(log: Path, start: int = 0) -> str:
    """The last line of a log that names an exception; without one the last line.

    Servers of several processes say at the very end only that a child has failed.
    """
    lines = _lines(log, start)
    return next((line[:500] for line in reversed(lines) if _ERROR.match(line)), _last_of(lines))


def _last_of(lines: Sequence[str]) -> str:
    return lines[-1].split(": ", 1)[-1][:500] if lines else "no output"


def _lines(log: Path, start: int) -> list[str]:
    with contextlib.suppress(OSError), log.open("rb") as file:  # no log, no lines
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
        return [visible(line.strip()) for line in text.splitlines() if line.strip()]
    return []
