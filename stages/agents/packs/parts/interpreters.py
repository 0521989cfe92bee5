"""Python interpreters for a model's code: warm, in the jail of `stages.sandbox`, below bubblewrap if installed.

Invariants: an interpreter is there for one episode only; what code does is an answer (`Ran`), never an exception; a
machine that cannot isolate code runs none (InfrastructureError). Everything ends with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from stages.agents.environment import InfrastructureError
from stages.sandbox.run import ENVIRONMENT, PYTHON, make_directory

Sandbox = Literal["auto", "bubblewrap", "jail"]

_ROOT = Path(__file__).resolve().parents[4]
_NEEDED = ("__init__.py", "workers/__init__.py", "workers/guard.py", "sandbox")  # of stages, below bubblewrap
_PROGRAM = (
    "import sys; sys.path.append({root!r}); from stages.sandbox.session import main; sys.path.pop(); main({control})"
)
_START_S: Final = 120.0  # to start Python and to import what is wanted
_GRACE_S: Final = 30.0  # for the jail itself, beyond the time of the code
_LINE_BYTES: Final = 8 << 20


class Ran(Struct, frozen=True):
    """How a piece of code went: see `stages.sandbox.session`."""

    how: Literal["ok", "failed", "exit", "killed", "timeout", "output", "isolation"]
    output: str
    size: int
    lost: bool


class Interpreter:
    """The interpreter of one episode."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, made_by: Interpreters) -> None:
        self._reader, self._writer, self._made_by = reader, writer, made_by

    async def run(self, code: str, seconds: float) -> Ran:
        """Waits for a free processor and for the code. Raises InfrastructureError. Cancelled, it ends the code."""
        async with self._made_by.slots:
            try:
                self._writer.write(json.dumps({"code": code, "seconds": seconds}).encode() + b"\n")
                async with asyncio.timeout(seconds + _GRACE_S):
                    line = await self._reader.readline()
                ran = msgspec.json.decode(line, type=Ran)
            except (TimeoutError, OSError, ValueError) as error:
                self._writer.close()
                raise InfrastructureError(f"the jail of an interpreter is gone ({error!r})") from error
            except asyncio.CancelledError:
                self._writer.close()
                raise
        if ran.how == "isolation":
            raise InfrastructureError(f"code cannot be isolated on this machine ({ran.output}), so none is run")
        return ran

    async def close(self) -> None:
        """End the interpreter, also in the middle of a piece of code."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class Interpreters:
    """Where interpreters of one kind come from: a process that has imported `imports`, started when it is needed.

    `memory_bytes` and `cpu_s` (of processor time) are those of one interpreter.
    """

    def __init__(
        self,
        imports: Sequence[str] = (),
        *,
        memory_bytes: int = 1 << 30,
        cpu_s: int = 60,
        sandbox: Sandbox = "auto",
    ) -> None:
        if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
            raise ValueError("sandbox is 'bubblewrap', but no bwrap is installed; install it, or set sandbox = 'jail'")
        self._imports, self._memory_bytes, self._cpu_s = tuple(imports), memory_bytes, cpu_s
        self.sandbox = sandbox  # "auto" becomes what it is at the start
        self._starting, self._asking = asyncio.Lock(), asyncio.Lock()
        self.slots = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0))))
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._directory = ""

    async def open(self) -> Interpreter:
        """A new one, some milliseconds after the first. Raises InfrastructureError."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                await self._start()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._hand_over(theirs)
            reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"the process that makes interpreters is gone ({error})") from error
        return Interpreter(reader, writer, self)

    async def _hand_over(self, session: socket.socket) -> None:
        """Waits while more sessions are asked for than the process has come to. Raises OSError, if it never does."""
        async with self._asking, asyncio.timeout(_START_S):
            while self._control is not None:
                try:
                    socket.send_fds(self._control, [b"s"], [session.fileno()])
                    return
                except BlockingIOError:
                    await _writable(self._control)
        raise ConnectionError("it was ended")

    def close(self) -> None:
        """End the process and all interpreters."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory or "/nonexistent", ignore_errors=True)
        self._process, self._control, self._directory = None, None, ""

    async def _start(self) -> None:
        tried = ["bubblewrap", "jail"] if self.sandbox == "auto" else [self.sandbox]
        if shutil.which("bwrap") is None:
            tried = ["jail"]
        for sandbox in tried:
            self.close()
            if await self._started(below_bubblewrap=sandbox == "bubblewrap"):
                self.sandbox = "bubblewrap" if sandbox == "bubblewrap" else "jail"
                return
        self.close()
        raise InfrastructureError("the process that makes interpreters does not start; its error output says why")

    async def _started(self, *, below_bubblewrap: bool) -> bool:
        self._directory = make_directory()
        os.chmod(self._directory, 0o711)  # interpreters are another user's, and must get to their own below it
        paths = [path for path in sys.path if path.endswith("-packages")] if self._imports else []
        ours, theirs = socket.socketpair()
        with theirs:
            control = theirs.fileno()
            command = [*PYTHON, _PROGRAM.format(root=str(_ROOT), control=control)]
            if below_bubblewrap:
                command = [*_bubblewrap(self._directory, paths), *command]
            self._process = _spawn(command, control)
        self._control = ours
        setup = {
            "directory": self._directory,
            "imports": self._imports,
            "paths": paths,
            "memory_bytes": self._memory_bytes,
            "cpu_s": self._cpu_s,
        }
        ours.sendall(json.dumps(setup).encode() + b"\n")
        ours.setblocking(False)
        try:
            async with asyncio.timeout(_START_S):
                ready = await asyncio.get_running_loop().sock_recv(ours, 16)
        except (TimeoutError, OSError):
            return False
        return bool(ready)


async def _writable(link: socket.socket) -> None:
    """Waits until the socket takes more, or its other end is gone."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(link, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(link)


def _spawn(command: Sequence[str], control: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        cwd="/",
        start_new_session=True,
    )


def _bubblewrap(directory: str, paths: Sequence[str]) -> list[str]:
    """No network, no other processes; of the files: Python, the jail's source, `paths`, and `directory` to write."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in ("/lib", "/lib64", "/bin"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    python = {sys.prefix, sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parents[1])}
    readable = [*sorted(python), *paths, *(str(_ROOT / "stages" / name) for name in _NEEDED)]
    for path in readable:
        if not path.startswith("/usr/"):
            command += ["--ro-bind", path, path]
    return [*command, "--bind", directory, directory, "--"]
