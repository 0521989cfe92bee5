"""Pack: problems with a Python interpreter as a tool, as in ReTool (arXiv 2504.11536).

    [[environment]]
    name = "python_tool"
    path = "stages.agents.packs.python_tool:PythonTool"
    options = { deadline_s = 5.0, imports = ["numpy"] }

The model calls `python` with code; variables live until the end of the episode. Warm interpreters wait in the jail of
`stages.sandbox`, below bubblewrap if installed; `docs/packs.md` lists what this protects against.

Invariants: an interpreter serves one episode only; failing code gives an answer (`Ran`), never an exception; a machine
that cannot isolate code runs no code (InfrastructureError). All interpreters end with this process, however it ends.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from stages.agents.environment import InfrastructureError, Task
from stages.agents.tool_episode import ToolEpisode
from stages.sandbox.run import ENVIRONMENT, PYTHON, make_directory
from stages.sandbox.session import Ran
from stages.tools.tool import TextTool, Tool, ToolCallError

Sandbox = Literal["auto", "bubblewrap", "jail"]

_ROOT = Path(__file__).resolve().parents[3]
_NEEDED = ("__init__.py", "workers/__init__.py", "workers/guard.py", "sandbox")  # of stages, below bubblewrap
_PROGRAM = (
    "import sys; sys.path.append({root!r}); from stages.sandbox.session import main; sys.path.pop(); main({control})"
)
_START_S: Final = 120.0  # to start Python and import `imports`
_GRACE_S: Final = 30.0  # overhead of the jail, beyond the time of the code
_LINE_BYTES: Final = 8 << 20


class Interpreter:
    """The interpreter of one episode."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: Interpreters) -> None:
        self._reader, self._writer, self._source = reader, writer, source

    async def run(self, code: str, seconds: float) -> Ran:
        """Run code. Waits for a free processor and for the code; cancellation ends the code. Raises
        InfrastructureError."""
        async with self._source.slots:
            try:
                self._writer.write(json.dumps({"code": code, "seconds": seconds}).encode() + b"\n")
                async with asyncio.timeout(seconds + _GRACE_S):
                    line = await self._reader.readline()
                ran = msgspec.json.decode(line, type=Ran)
            except (TimeoutError, OSError, ValueError) as error:
                self._writer.close()
                raise InfrastructureError(f"the jail of an interpreter is lost ({error!r})") from error
            except asyncio.CancelledError:
                self._writer.close()
                raise
        if ran["how"] == "isolation":
            raise InfrastructureError(f"code cannot be isolated on this machine ({ran['output']}), so none is run")
        return ran

    async def close(self) -> None:
        """End the interpreter, even while it runs code."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class Interpreters:
    """A source of interpreters: a process that has imported `imports`, started on demand.

    `memory_bytes` and `cpu_s` (processor time) are the limits of one interpreter.
    """

    def __init__(
        self, imports: Sequence[str] = (), memory_bytes: int = 1 << 30, cpu_s: int = 60, sandbox: Sandbox = "auto"
    ) -> None:
        if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
            raise ValueError("sandbox is 'bubblewrap', but no bwrap is installed; install it, or set sandbox = 'jail'")
        self._imports, self._memory_bytes, self._cpu_s = tuple(imports), memory_bytes, cpu_s
        self.sandbox = sandbox  # "auto" is resolved at the start
        self._starting, self._asking = asyncio.Lock(), asyncio.Lock()
        self.slots = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0))))
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._directory = ""

    async def open(self) -> Interpreter:
        """A new interpreter; after the first, in some milliseconds. Raises InfrastructureError."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                await self._start()
        parent_end, child_end = socket.socketpair()
        try:
            with child_end:
                await self._hand_over(child_end)
            reader, writer = await asyncio.open_connection(sock=parent_end, limit=_LINE_BYTES)
        except OSError as error:
            parent_end.close()
            raise InfrastructureError(f"the process that makes interpreters is lost ({error})") from error
        return Interpreter(reader, writer, self)

    async def _hand_over(self, session: socket.socket) -> None:
        """Send a socket to the process. Waits while its queue is full; raises OSError if it stays full."""
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
        tried: tuple[Sandbox, ...] = ("bubblewrap", "jail") if self.sandbox == "auto" else (self.sandbox,)
        for sandbox in tried if shutil.which("bwrap") is not None else tried[-1:]:
            self.close()
            if await self._started(below_bubblewrap=sandbox == "bubblewrap"):
                self.sandbox = sandbox
                return
        self.close()
        raise InfrastructureError("the process that makes interpreters does not start; see its error output")

    async def _started(self, *, below_bubblewrap: bool) -> bool:
        self._directory = make_directory()
        os.chmod(self._directory, 0o711)  # interpreters run as another user and must reach their directory below it
        paths = [path for path in sys.path if path.endswith("-packages")] if self._imports else []
        parent_end, child_end = socket.socketpair()
        with child_end:
            control = child_end.fileno()
            command = [*PYTHON, _PROGRAM.format(root=str(_ROOT), control=control)]
            if below_bubblewrap:
                command = [*_bubblewrap(self._directory, paths), *command]
            self._process = _spawn(command, control)
        self._control = parent_end
        setup = {
            "directory": self._directory,
            "imports": self._imports,
            "paths": paths,
            "memory_bytes": self._memory_bytes,
            "cpu_s": self._cpu_s,
        }
        parent_end.sendall(json.dumps(setup).encode() + b"\n")
        parent_end.setblocking(False)
        try:
            async with asyncio.timeout(_START_S):
                ready = await asyncio.get_running_loop().sock_recv(parent_end, 16)
        except (TimeoutError, OSError):
            return False
        return bool(ready)


async def _writable(link: socket.socket) -> None:
    """Waits until the socket accepts more, or its peer is gone."""
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
    """No network, no other processes; readable: Python, the jail's source and `paths`; writable: `directory`."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in ("/lib", "/lib64", "/bin"):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    python = {sys.prefix, sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parents[1])}
    for path in [*sorted(python), *paths, *(str(_ROOT / "stages" / name) for name in _NEEDED)]:
        if not path.startswith("/usr/"):
            command += ["--ro-bind", path, path]
    return [*command, "--bind", directory, directory, "--"]


_ENDS: Final = {
    "exit": "the code ended the interpreter",
    "killed": "the code had more memory, threads or files than it may",
    "output": "the code printed too much",
}
_warm: dict[tuple[tuple[str, ...], int, int, Sandbox], Interpreters] = {}  # of this process, for all its episodes


@dataclass
class PythonTool(ToolEpisode):
    """Options besides those of every tool pack: `deadline_s` of a call, `imports` (packages to load beforehand),
    `memory_mb`, `cpu_s` of the whole episode, `sandbox` ("auto", "bubblewrap" or "jail")."""

    deadline_s: float = 5.0
    imports: Sequence[str] = ()
    memory_mb: int = 1024
    cpu_s: int = 60
    sandbox: Sandbox = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = (tuple(self.imports), self.memory_mb << 20, self.cpu_s, self.sandbox)
        if kind not in _warm:
            _warm[kind] = Interpreters(*kind)
        self._interpreters = _warm[kind]
        self._interpreter: Interpreter | None = None  # made by the first call: waiting episodes have no process

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        description = "Run Python code and see what it prints; the value of a last expression is printed too."
        example = "the code, for example print(3 ** 20)"
        return [TextTool("python", f"{description} Variables are kept.", "code", example, self._ran)]

    async def close(self) -> None:
        if self._interpreter is not None:
            await self._interpreter.close()

    async def _ran(self, code: str) -> str:
        """The output of the code. Raises ToolCallError with a text for the model."""
        if self._interpreter is None:
            self._interpreter = await self._interpreters.open()
        ran = await self._interpreter.run(code, self.deadline_s)
        printed = ran["output"].strip()
        if ran["how"] == "ok":
            return printed or "(nothing was printed)"
        if ran["how"] == "failed":
            raise ToolCallError(printed)
        late = f"no end within {self.deadline_s:g} s of time, or of processor time in all"
        raise ToolCallError(f"{_ENDS.get(ran['how'], late)}; all variables are gone\n{printed}".strip())
