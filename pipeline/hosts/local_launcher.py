"""Processes of a run on this machine: copied or started, named, logged, ended with everything that they started.

Invariants:
- each process leads its own process group, so that its children can be ended with it; its output goes to
  `logs/<name>.log`, its number to `replicas/<name>.pid`;
- the kernel ends it with this process, or with the parent of `--auto-resume` if that started it (auto_resume.py);
- after `stop_all` none is alive but those left to a next start;
- a server that an earlier start left is listed under its name until it is taken over or ended. Its process number is
  still valid then, since the parent has not waited for it. Nothing here waits for a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from models.weights.slot_directory import list_left_behind, remove_left_behind, torch_files
from pipeline.facts.run_directory import RunDir
from pipeline.hosts import machine
from pipeline.hosts.die_with_parent import kill_group, prefix
from pipeline.hosts.fork_server import Adopted, ForkServer
from pipeline.hosts.launcher import SOCKETS, STOP_GRACE_S, Handle, Launcher, ProcessSpec, at_most

GROUP_GONE_S = 5.0
READ_BYTES = 1 << 16
Line = tuple[str, str, int, str]  # kind, name, number of the process, text


class KeptProcesses:
    """All of one controller.

    Args:
        connection: of the sockets' pair; what an earlier start left is read from it now.
        directory: what servers have in common lies there.
    """

    def __init__(self, connection: int, directory: str) -> None:
        self.directory = Path(directory)
        self._socket = socket.socket(fileno=connection)
        self._socket.set_inheritable(False)
        self._rest = b""
        self._left: dict[str, tuple[Adopted, str]] = {}  # by an earlier start: by name, with their notes
        self._running: dict[int, Adopted] = {}
        self._starting: dict[str, asyncio.Future[Adopted]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending = asyncio.Lock()
        self._ready = False
        while not self._ready:  # it was sent before this process was started
            self._read()
        self._socket.setblocking(False)

    def note(self, name: str) -> str:
        """The note of a server that an earlier start left under this name; empty if there is none."""
        return self._left[name][1] if name in self._left else ""

    def take(self, name: str) -> Adopted:
        """The server of that name, which is the caller's from now on."""
        self._attach()
        return self._left.pop(name)[0]

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, note: str) -> Adopted:
        """Have a server started. Waits for the parent, a moment. Raises OSError."""
        self._attach()
        started: asyncio.Future[Adopted] = asyncio.get_running_loop().create_future()
        self._starting[name] = started
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        request = {"name": name, "argv": [*argv], "env": {**env}, "log": str(log), "note": note, "files": files}
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._socket, json.dumps(request).encode() + b"\n")
        return await started

    async def end_others(self, names: Collection[str]) -> list[str]:
        """End the servers of an earlier start whose names this start does not use; returns those servers."""
        others = [name for name in self._left if name not in names]
        for name in others:
            process = self.take(name)
            kill_group(process.pid)
            await process.wait()
        return others

    def _attach(self) -> None:
        """Receive the ends of processes in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:  # the parent has ended, and the kernel ends this process
            self._ready = True
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take_in(*msgspec.json.decode(line, type=Line))

    def _take_in(self, kind: str, name: str, pid: int, text: str) -> None:
        match kind:
            case "kept":
                self._running[pid] = Adopted(pid)
                self._left[name] = self._running[pid], text
            case "ready":
                self._ready = True
            case "started":
                self._running[pid] = Adopted(pid)
                if not (started := self._starting.pop(name)).cancelled():
                    started.set_result(self._running[pid])
            case "failed":
                if not (started := self._starting.pop(name)).cancelled():
                    started.set_exception(OSError(text))
            case "ended":
                self._running.pop(pid).end(int(text))


Started = asyncio.subprocess.Process | Adopted


class LocalHandle(Handle):
    """A process of this machine."""

    def __init__(self, spec: ProcessSpec, process: Started, log: Path, log_start: int, directory: Path) -> None:
        """`directory`: removed with the process."""
        self.spec, self.log, self._directory = spec, log, directory
        self.pid = process.pid  # also the number of its group
        self._process, self.log_start = process, log_start
        self._shared: set[Path] = set()  # files that its end would leave in shared memory

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        return await self._process.wait()

    def remember_shared(self) -> None:
        new = machine.shared_memory_files(self.pid) - self._shared
        if new:
            self._shared |= new
            with contextlib.suppress(OSError):  # the list is for the next start after a kill
                list_left_behind(self._directory, new)

    def state(self) -> machine.ProcessState | None:
        return machine.group_state(self.pid)

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
        async with at_most(self.spec.grace_s or STOP_GRACE_S):
            await self.wait()
        if self.spec.sweep or self.alive:
            await self._kill_group()

    async def _kill_group(self) -> None:
        """Waits until all of the group have ended, at most `GROUP_GONE_S` seconds: what they held is free then."""
        kill_group(self.pid)
        await self.wait()
        async with at_most(GROUP_GONE_S):  # then the kernel is not done with one of them; nothing more can be done
            while machine.living(self.pid):  # noqa: ASYNC110  (a group announces nothing)
                await asyncio.sleep(0.01)
        for path in self._shared:
            path.unlink(missing_ok=True)


class LocalLauncher(Launcher):
    """`threads`: for computation, of each process. `kept`: servers that outlive this process. `forks`: starts what it
    can."""

    def __init__(
        self, rundir: RunDir, threads: int = 1, kept: KeptProcesses | None = None, forks: ForkServer | None = None
    ) -> None:
        self.rundir, self._kept, self._forks = rundir, kept, forks
        if kept is not None:
            rundir.servers = kept.directory
        self._environment = {**machine.child_environment(threads), SOCKETS: str(rundir.sockets)}
        self.say = lambda line: None
        self.waiting = {}
        self.handles: dict[str, LocalHandle] = {}
        self._starts = Counter[str]()

    def address(self, name: str) -> str:
        return machine.HOST

    def held_port(self, name: str, port: int = 0) -> AbstractContextManager[int]:
        return machine.held_port(port)

    async def spawn(self, spec: ProcessSpec) -> LocalHandle:
        return self._named(await self._start(spec))

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

    async def _start(self, spec: ProcessSpec) -> LocalHandle:
        env = {**(self._environment if spec.ours else os.environ), **spec.env}
        if spec.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
        path = _log(self.rundir, spec.name)
        self._starts[spec.name] += 1
        with contextlib.suppress(OSError), path.open("a") as log:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{now} controller {os.getpid()} starts {spec.name}, start {self._starts[spec.name]}\n")
        if self._kept is not None and spec.note:
            start = path.stat().st_size if path.exists() else 0
            kept = await self._kept.start(spec.name, spec.argv, env, path, spec.note)
            return LocalHandle(spec, kept, path, start, self._kept.directory)
        if (ended := self.handles.get(spec.name)) is not None:
            remove_left_behind(torch_files(ended.pid))
        with path.open("ab") as log:
            start = log.tell()
            process: Started | None = None
            if self._forks is not None and spec.ours and not spec.env and not spec.gpus:
                process = await self._forks.start(spec.name, spec.argv, env, log)
            if process is None:
                process = await asyncio.create_subprocess_exec(
                    *prefix(),
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env=env,
                    start_new_session=True,  # Ctrl-C is for the controller
                )
        if spec.ours and not spec.sweep:  # a stage, which may pass weights in shared memory
            with contextlib.suppress(OSError):  # the list is for the next start after a kill
                list_left_behind(self.rundir.sockets, [torch_files(process.pid)])
        return LocalHandle(spec, process, path, start, self.rundir.sockets)


def _log(rundir: RunDir, name: str) -> Path:
    return rundir.logs / f"{name}.log"
