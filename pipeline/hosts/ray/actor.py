"""A process of a run on a node of a Ray cluster: the actor there that owns it, and the controller's handle for it.

Invariants:
- the process ends with the actor, however that ends, and the actor with the controller's job; a process whose actor is
  gone counts as killed;
- the actor's directory is private. It is removed with the actor, or by the next actor on the node if it was killed;
- files that the node lacks are copied there before the start; the process's log is readable here while it runs;
- only numbers, texts and bytes go through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import msgspec

from models.errors import first_line
from models.weights.slot_directory import PREFIX, SHARED_MEMORY, DirectoryLease, remove_stale
from pipeline.facts.run_directory import RunDir
from pipeline.hosts.launcher import Handle, ProcessSpec, SharedFiles, at_most
from pipeline.hosts.local_launcher import LocalHandle, LocalLauncher
from pipeline.hosts.machine import PortInUse, held_port

OUTPUT_WAIT_S: Final = 2.0  # longest wait for new output
POLL_S: Final = 0.1  # between two looks at the log
CHUNK_BYTES: Final = 1 << 20
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR


class ProcessActor:
    """Owner of one process; a name's next incarnation may be started by the same one."""

    def __init__(self, cwd: str, threads: str) -> None:
        """`cwd`: where the user started the run; used where it exists here too."""
        import ray

        self.node = str(ray.get_runtime_context().get_node_id())
        self.address = str(ray.util.get_node_ip_address())
        if os.path.isdir(cwd):
            os.chdir(cwd)
        os.environ["OMP_NUM_THREADS"] = threads  # Ray sets it to the CPUs that it counts for the actor
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(self.address))
        home = Path(tempfile.gettempdir())
        for place in (home, SHARED_MEMORY):
            remove_stale(place)  # files of killed processes
        self._lease = DirectoryLease(home / f"{PREFIX}actor-{token_hex(4)}")
        rundir = RunDir(self._lease.directory)
        rundir.sockets = self._lease.directory
        for directory in (rundir.logs, rundir.specs):
            directory.mkdir()
        self._launcher = LocalLauncher(rundir)
        self._handle: LocalHandle | None = None
        self._turn = asyncio.Lock()  # a run that ends while a process is being started must find it, and end it
        self._held: dict[int, ExitStack] = {}
        self._copies: dict[str, str] = {}  # copied files, by their path on the controller's host

    async def ready(self) -> tuple[str, str, str]:
        """Id and address of the node, and the GPUs that Ray gave the actor."""
        return self.node, self.address, os.environ.get("CUDA_VISIBLE_DEVICES", "")

    async def hold_port(self, port: int) -> int | str:
        """A port of this node, kept until it is released; why not, if it cannot be."""
        with ExitStack() as stack:
            try:
                number = stack.enter_context(held_port(port, self.address))
            except PortInUse as error:
                return str(error.strerror)
            self._held[number] = stack.pop_all()
        return number

    async def release_port(self, port: int) -> None:
        if (stack := self._held.pop(port, None)) is not None:
            stack.close()

    async def lacking(self, encoded: bytes) -> str | None:
        """The files that a trainer needs and this node lacks, as a sentence."""
        return await asyncio.to_thread(msgspec.msgpack.decode(encoded, type=SharedFiles).lacking)

    async def missing(self, paths: list[str]) -> list[str]:
        """Those that are neither seen here nor were brought."""
        return [path for path in paths if path not in self._copies and not os.path.exists(path)]

    async def copy_file(self, path: str, file: str, content: bytes, mode: int) -> None:
        """Add bytes to a file of what lies at `path` on the controller's host; `file`: its place in that, or empty."""
        copy = self._copies.setdefault(path, str(self._lease.directory / f"file-{len(self._copies)}"))
        target = Path(copy, file) if file else Path(copy)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode), "ab") as opened:
            opened.write(content)

    async def spawn(self, encoded: bytes) -> tuple[int, int]:
        """Start a process; its number on this node, and where its part of the log begins."""
        spec = msgspec.msgpack.decode(encoded, type=ProcessSpec)
        argv = tuple(self._copies.get(argument, argument) for argument in spec.argv)
        if spec.ours:  # by the Python of this node
            argv = (sys.executable, *argv[1:])
        async with self._turn:
            self._handle = await self._launcher.spawn(msgspec.structs.replace(spec, argv=argv))
        return self._handle.pid, self._handle.log_start

    async def output(self, offset: int) -> tuple[bytes, int | None]:
        """What the process has printed from `offset` on, and its exit status once that was all.

        Waits for more output or for its end, at most `OUTPUT_WAIT_S`.
        """
        handle = self._handle
        if handle is None:  # the run ended before it was started
            return b"", -signal.SIGKILL
        async with at_most(OUTPUT_WAIT_S):
            while not (content := _read(handle.log, offset)) and handle.alive:
                async with at_most(POLL_S):
                    await handle.wait()
        ended = not handle.alive  # before the last read: its output is in the log by then
        content = _read(handle.log, offset)
        return content, await handle.wait() if ended and len(content) < CHUNK_BYTES else None

    async def remember_shared(self) -> None:
        if self._handle is not None:
            self._handle.remember_shared()

    async def kill(self) -> None:
        """Kill the process and its remaining children."""
        async with self._turn:
            if self._handle is not None:
                await self._handle.kill()

    async def stop(self) -> None:
        """Ask the process to end; kill it after its grace."""
        async with self._turn:
            await self._launcher.stop_all()

    async def close(self) -> None:
        """Remove what this actor keeps on its node, and weights that its process left there when it was killed."""
        self._lease.release()
        remove_stale()


def interface_of(address: str) -> str:
    """The network interface that has an address; the loopback one if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return "lo"


def _read(log: Path, offset: int) -> bytes:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)


ANSWER_TIMEOUT_S: Final = 30.0  # without an answer of an actor, after which its process counts as lost
KILLED: Final = -9


@cache
def gone() -> tuple[type[BaseException], ...]:
    """What Ray raises where an actor is not there any more, or not heard of: it crashed, it was killed for memory, its
    node or placement is gone; and our own timeout. Not what code of an actor raises, which another start repeats."""
    from ray import exceptions as ray

    code = ray.RayTaskError, ray.CrossLanguageError, ray.UserCodeException, ray.UnserializableException
    start = ray.AuthenticationError, ray.RuntimeEnvSetupError
    return (*(kind for kind in ray.RayError.__subclasses__() if kind not in (*code, *start)), TimeoutError)


class PlacedActor:
    """An actor on its node."""

    def __init__(self, actor: Any, node: str, address: str, gpus: str = "") -> None:
        self.actor, self.node, self.address, self.gpus = actor, node, address, gpus
        self.lost = False
        self.silent = False  # lost since nothing was heard of it, so that its node may be gone as well
        self.missed = False  # lost, and its node was chosen for the next one

    def end(self) -> None:
        """At once, together with its process."""
        import ray

        self.lost = True
        with contextlib.suppress(Exception):  # it may be gone in any way
            ray.kill(self.actor, no_restart=True)


class RayHandle(Handle):
    """A process somewhere in the cluster."""

    def __init__(self, spec: ProcessSpec, placed: PlacedActor, log: Path) -> None:
        self.spec, self.log, self._placed = spec, log, placed
        log.touch()
        self.log_start = log.stat().st_size
        self._offset = 0  # of the log there: what has been copied
        self._code: int | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> int:
        """Start it; its number there, 0 if its actor is gone."""
        actor = self._placed.actor
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await _copy_files(actor, self.spec.files)
                number, self._offset = await actor.spawn.remote(msgspec.msgpack.encode(self.spec))
                return int(number)
        except gone() as error:
            self._lose(error)
            return 0

    @property
    def alive(self) -> bool:
        return self._code is None

    @property
    def host_lost(self) -> bool:
        return self._placed.lost

    async def wait(self) -> int:
        """See the Protocol. The waiting task copies the log."""
        while self._code is None:
            async with self._turn:
                if self._code is None:
                    await self._follow()
        return self._code

    async def _follow(self) -> None:
        """One answer of the actor: new output, and perhaps the exit status."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                content, code = await self._placed.actor.output.remote(self._offset)
        except gone() as error:
            self._lose(error)
            return
        if content:
            with self.log.open("ab") as file:
                file.write(content)
        self._offset += len(content)
        self._code = code

    def _lose(self, error: BaseException) -> None:
        why = first_line(error) if str(error) else f"no answer for {ANSWER_TIMEOUT_S:g} s"
        with self.log.open("a") as file:
            file.write(f"the Ray actor of {self.spec.name} is gone: {why}\n")
        self._placed.silent = isinstance(error, TimeoutError)
        self._placed.end()
        self._code = KILLED

    async def kill(self) -> int:
        await self._ask("kill")
        return await self.wait()

    async def stop(self) -> None:
        """Waits for the end, which the actor brings about after the grace at the latest."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask("stop"))
            tasks.create_task(self.wait())

    async def _ask(self, method: str) -> None:
        if self._placed.lost:
            return
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S + self.spec.grace_s):
                await getattr(self._placed.actor, method).remote()
        except gone() as error:
            if self._code is None:
                self._lose(error)

    def remember_shared(self) -> None:
        if self.alive:
            self._placed.actor.remember_shared.remote()


async def _copy_files(actor: Any, files: tuple[str, ...]) -> None:
    """Copy missing files to the actor's node."""
    there = [path for path in files if Path(path).exists()]
    for path in await actor.missing.remote(there) if there else []:
        home = Path(path)
        for file in sorted(home.rglob("*")) if home.is_dir() else [home]:
            if file.is_file():
                inside = str(file.relative_to(home)) if home.is_dir() else ""
                mode = file.stat().st_mode & 0o777
                with file.open("rb") as opened:
                    await actor.copy_file.remote(path, inside, opened.read(CHUNK_BYTES), mode)
                    while content := opened.read(CHUNK_BYTES):
                        await actor.copy_file.remote(path, inside, content, mode)
