"""Processes of a run that start within milliseconds: one process imports what they need and is copied for each.

Most of a process's start on a laptop is the import of its libraries: a second for a stage, two for an engine, four for
a trainer. `launch.py` forks the server before it imports them, so that they are read while the run is made ready, and
once for all processes, also those that come back after a kill.

Invariants:
- a copy is like a process that was started by its command line: environment, directory, session, signals, limits and
  output are those of the request; its parent is the controller, with which the kernel ends it;
- the server never runs code of the user, computes nothing and has one thread, so that a copy finds no lock held;
- where there is a GPU, no process that computes is copied: its driver does not survive that;
- a run needs no server: without one, or when it has ended, processes are started by their command lines.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import itertools
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Final, NoReturn

import msgspec
from msgspec import Struct

from configs.schema import Config
from pipeline.errors import keep_exit_code
from pipeline.hosts.die_with_parent import die_with, kill_group
from pipeline.hosts.machine import ROOT, child_environment, show_as

STARTED_BY: Final = (sys.executable, "-P", "-m")
STAGE: Final = "pipeline.hosts.worker"
ENGINE: Final = "models.engines.serve"
STAGES: Final = (
    "numpy", STAGE, "uvloop", "stages.generate.stage", "stages.reward.stage", "stages.group.stage", "stages.evaluate",
    "stages.engines.stage", "stages.train.stage",
)  # fmt: skip
ENGINES: Final = ("torch", ENGINE, "models.engines.embedded.engine")
TRAINERS: Final = (
    "sympy", "torch.distributed.tensor", "torch._dynamo", "transformers", "transformers.modeling_utils",
    "models.train.build", "models.train.trainer", "models.train.huggingface.whole_models",
)  # fmt: skip
DRIVERS: Final = ("/dev/nvidiactl", "/dev/kfd")
PR_SET_CHILD_SUBREAPER, REQUEST_BYTES = 36, 1 << 20


class Adopted:
    """A process of this machine that another one started for this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def end(self, code: int) -> None:
        """It has ended."""
        self.returncode = code
        self._ended.set()


class Request(Struct, frozen=True):
    """A process that is wanted. `argv`: the name of its module, then its arguments. `files`: its limits of open files.
    `parent`: number of the process that asks."""

    number: int
    name: str
    argv: list[str]
    env: dict[str, str]
    directory: str
    files: tuple[int, int]
    parent: int


class Reply(Struct, frozen=True):
    """`number`: of the request. `pid`: of the process; 0 if there is none, for the reason in `error`."""

    number: int
    pid: int = 0
    error: str = ""


def has_gpu() -> bool:
    """Whether a driver is here, of whatever GPU: one that asks the driver itself cannot be copied any more."""
    return any(Path(driver).exists() for driver in DRIVERS)


def modules_of(config: Config) -> tuple[str, ...]:
    """What is imported for the processes of a run, in this order."""
    trains, engines = config.train.train_backend != "simulated", config.engine.engine == "embedded"
    if has_gpu() or not (trains or engines):
        return STAGES
    return (*STAGES, *ENGINES, *(TRAINERS if trains else ()))


def waits_for(argv: Sequence[str], modules: Sequence[str]) -> int:
    """How many of the modules a process needs; it is copied once they are imported."""
    if argv[0] == STAGE and not argv[3].startswith("train"):
        return len(STAGES)
    return len([name for name in modules if name not in TRAINERS]) if argv[0] == ENGINE else len(modules)


class ForkServer:
    """The server of the program `launch.py`. Made while that has one thread, and returned to the program alone."""

    def __init__(self, config: Config) -> None:
        self._modules = modules_of(config)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._starting: dict[int, asyncio.Future[Adopted | None]] = {}
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        parent = os.getpid()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            die_with(parent)
            self._socket.close()
            os.setsid()  # Ctrl-C is for the controller
            os.environ.update(child_environment(threads=1))
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nothing, number)
            os.closerange(3, theirs.fileno())
            os.closerange(theirs.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            serve(theirs, self._modules)
        theirs.close()
        self._socket.setblocking(False)

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Adopted | None:
        """The process, once it is there; None if it cannot be copied, or the server has ended. Raises OSError."""
        if self._pid == 0 or tuple(argv[:3]) != STARTED_BY or (has_gpu() and waits_for(argv[3:], ()) == 0):
            return None
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._read)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        number = next(self._numbers)
        request = Request(number, name, [*argv[3:]], {**env}, os.getcwd(), limits, os.getpid())
        started: asyncio.Future[Adopted | None] = loop.create_future()
        self._starting[number] = started
        adopt(True)
        try:
            try:
                with open(os.devnull, "rb") as nothing:
                    files = [nothing.fileno(), log.fileno(), log.fileno()]
                    socket.send_fds(self._socket, [msgspec.json.encode(request)], files)
            except OSError:  # the server has ended, or is behind, or the environment is too large for a message
                return None
            return await started
        finally:
            del self._starting[number]
            adopt(bool(self._starting))

    def _read(self) -> None:
        try:
            data = self._socket.recv(REQUEST_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.close()
            return
        reply = msgspec.json.decode(data, type=Reply)
        process = self._adopted(reply.pid) if reply.pid else None
        started = self._starting.get(reply.number)
        if started is None or started.done():  # the caller was cancelled
            if process is not None:
                kill_group(process.pid)
        elif process is None:
            started.set_exception(OSError(reply.error))
        else:
            started.set_result(process)

    def _adopted(self, pid: int) -> Adopted:
        """A child of this process from now on, which waits for it."""
        process, handle, loop = Adopted(pid), os.pidfd_open(pid), asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(handle)
            os.close(handle)
            process.end(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        loop.add_reader(handle, ended)
        return process

    def close(self) -> None:
        """End the server; its copies go on."""
        if self._pid == 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._pid = 0
        for started in self._starting.values():
            if not started.done():
                started.set_result(None)


def serve(connection: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Import the modules, and copy this process whenever one is wanted whose modules are there. Ends with the
    connection. In a copy the program runs, and ends the process."""
    waiting, ready = list[tuple[Request, list[int]]](), 0
    gc.disable()  # to look for garbage takes a quarter of an import's time, and there is none
    while True:
        while select.select([connection], [], [], None if ready == len(modules) and not waiting else 0)[0]:
            data, files, *_ = socket.recv_fds(connection, REQUEST_BYTES, 3)
            if not data:
                sys.exit(0)
            waiting.append((msgspec.json.decode(data, type=Request), files))
        for request, files in [*waiting]:
            if waits_for(request.argv, modules) <= ready:
                waiting.remove((request, files))
                if _copied(connection, request):
                    _become(connection, request, files, [number for _, others in waiting for number in others])
                for number in files:
                    os.close(number)
        if ready < len(modules):
            with contextlib.suppress(Exception):  # the process that needs it says so
                import_module(modules[ready])
            ready += 1
            gc.freeze()
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # of torch's libraries; see `_end`


def _copied(connection: socket.socket, request: Request) -> bool:
    """Whether this is the copy. It becomes a child of the process that asked, since its own parent ends at once."""
    ours, theirs = socket.socketpair()
    error = "it could not be copied, for lack of memory or processes"
    try:
        between = os.fork()
    except OSError as fault:
        between, error = -1, str(fault)
    if between == 0:
        ours.close()
        _part_from(theirs, request.parent)
        return True
    theirs.close()
    if between > 0:
        os.waitpid(between, 0)
    with ours, contextlib.suppress(ConnectionError):  # it was killed at once, which the process that asked will see
        pid = ours.recv(20)
        reply = Reply(request.number, int(pid)) if pid else Reply(request.number, error=error)
        connection.send(msgspec.json.encode(reply))
        if pid:
            ours.send(b"go")
    return False


def _part_from(server: socket.socket, parent: int) -> None:
    """Returns in the copy, once it leads a session, has its new parent, and that knows its number: a copy that nobody
    knows of ends. The process between, which is its first parent, ends at once."""
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == between:
        time.sleep(0.0005)
    os.setsid()
    die_with(parent)
    with server, contextlib.suppress(ConnectionError):
        server.send(str(os.getpid()).encode())
        if server.recv(2):
            return
    os._exit(1)


def _become(connection: socket.socket, request: Request, files: Sequence[int], others: Sequence[int]) -> NoReturn:
    """Run the program of a request in this copy, to its end. `others`: files of requests that wait."""
    connection.close()
    for file in others:
        os.close(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, request.files)
        os.chdir(request.directory)
        _settle(request)
        program = import_module(request.argv[0])
        sys.argv = [str(program.__file__), *request.argv[1:]]
        code = program.main(request.argv[1:])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    _end(code)


def _end(code: object) -> NoReturn:
    """As `sys.exit`, but imports stay as they are: to take them apart copies each page of them, 0.3 s with torch."""
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as in copies that multiprocessing makes
    atexit._run_exitfuncs()
    keep_exit_code()
    os._exit((code or 0) & 0xFF)


def _settle(request: Request) -> None:
    """What a start by the command line would have set from the environment."""
    os.environ.clear()
    os.environ.update(request.env)
    if not sys.flags.safe_path:
        del sys.path[0]  # the place of the program
    sys.path[:] = [str(ROOT), *(place for place in sys.path if place != str(ROOT))]
    show_as(request.name, request.argv)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # else all copies would draw the same; Python's own does so by itself
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    gc.enable()


def adopt(adopts: bool) -> None:
    """Whether processes whose parent has ended become children of this one instead of the system's first process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts))
