"""Processes of the tests that start within milliseconds, as copies of one that has imported everything.

The controller of pytest-xdist starts a server once. Its workers are copies of that server, and each of them begins
with a server of its own, for the programs and the ranks of its tests.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from types import ModuleType
from typing import Any, Final

import msgspec
from execnet.gateway_base import Popen2IO
from execnet.gateway_io import Popen2IOMaster

from pipeline.hosts.die_with_parent import die_with
from pipeline.hosts.fork_server import ENGINES, STAGES, TRAINERS, Reply, Request, adopt, serve

ROOT: Final = Path(__file__).resolve().parents[1]
MODULES: Final = (
    *STAGES, *ENGINES, *TRAINERS, "launch", "pipeline.run", "matplotlib.pyplot", "tests.copies", "requests",
    "pyarrow.parquet", "tensorboard.backend.event_processing.event_accumulator", "pydantic", "jsonschema",
)  # fmt: skip
LOOKED_AT: Final = ("PYTHON", "OMP_", "MKL_", "LD_", "CUDA", "HF_", "TRANSFORMERS_", "TORCH", "NCCL", "GLOO", "SLUICE_")

LARGE_PAGE, MADV_COLLAPSE = 2 << 20, 25

STARTING: Final = threading.Lock()
Env = tuple[tuple[str, str], ...]


def looked_at(env: Mapping[str, str]) -> Env:
    """Variables that are read when something is imported."""
    return tuple(sorted((key, value) for key, value in env.items() if key.startswith(LOOKED_AT)))


class Server:
    """A process that has imported what tests need, and is copied."""

    def __init__(self, env: Mapping[str, str] | None) -> None:
        """With `env`: a process that is started in it. Without: a copy of this process, which has one thread."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers = itertools.count()
        if env is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                env={**env, "PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        else:
            parent = os.getpid()
            if os.fork() == 0:
                die_with(parent)
                self._socket.close()
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, 0)
                os.dup2(nothing, 1)
                serve(theirs, MODULES)
        theirs.close()

    def start(self, argv: Sequence[str], env: Mapping[str, str], directory: str, files: Sequence[int]) -> int:
        limits, words = getrlimit(RLIMIT_NOFILE), [__name__, *argv]
        request = Request(next(self._numbers), argv[0], words, {**env}, directory, limits, os.getpid())
        with STARTING:
            adopt(True)  # the copy, whose first parent ends at once
            try:
                socket.send_fds(self._socket, [msgspec.json.encode(request)], [*files])
                reply = msgspec.json.decode(self._socket.recv(1 << 16), type=Reply)
            finally:
                adopt(False)
        assert reply.pid, reply.error
        return reply.pid


SERVERS: Final[dict[tuple[int, Env], Server]] = {}


def _server(env: Env) -> Server:
    """One for each process of the tests, and each set of variables."""
    key = (os.getpid(), env)
    if key not in SERVERS:
        SERVERS[key] = Server({**os.environ, **dict(env)})
    return SERVERS[key]


class Copy(subprocess.Popen[Any]):
    """`subprocess.Popen` of what `main` runs with these words."""

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        """As that of the class, whose arguments these are."""
        cwd, env, pipes = given[4] or os.getcwd(), given[5] or os.environ, given[9:15]
        files = [pipes[0] if pipes[0] >= 0 else 0, pipes[3] if pipes[3] >= 0 else 1, pipes[5] if pipes[5] >= 0 else 2]
        self.pid = _server(looked_at(env)).start(args, env, str(cwd), files)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class CopiedProgram(Copy):
    """`subprocess.Popen` of `launch.py` with these arguments."""

    def __init__(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        super().__init__(
            ["launch", *argv], cwd=cwd, env={**env}, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )


def copied_call(target: Callable[..., None], *args: Any) -> Copy:
    """A process that calls a function of a module. The arguments are pickled."""
    with tempfile.NamedTemporaryFile(delete=False) as file:
        pickle.dump(sys.path, file)
        pickle.dump((target, args), file)
    return Copy(["call", file.name], stdin=subprocess.DEVNULL)


class CopiedWorker(Popen2IOMaster):
    """How the controller of pytest-xdist starts and reaches a worker, which is a copy."""

    def __init__(self, args: Sequence[str], execmodel: Any) -> None:
        pipe = subprocess.PIPE
        self.popen = Copy(["worker", args[-1]], stdin=pipe, stdout=pipe)
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)


def main(argv: Sequence[str]) -> int:
    """In a copy: as `python launch.py ARGUMENT...`, as `python -c PROGRAM` for a worker, or a call."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, *rest = argv
    if kind == "launch":
        import launch

        sys.argv[1:] = rest
        return launch.main(program=True)
    if kind == "worker":
        SERVERS[os.getpid(), looked_at(os.environ)] = Server(None)
        sys.argv, sys.path[:0] = ["-c"], [""]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(rest[0], vars(sys.modules["__main__"]))
        return 0
    with open(rest[0], "rb") as file:
        sys.path[:] = pickle.load(file)
        target, args = pickle.load(file)
    os.unlink(rest[0])
    target(*args)
    return 0


def use_large_pages() -> None:
    """Have the kernel put this process's memory into pages of 2 MiB, if it can (Linux 6.1). A fork and the end of the
    copy go through all pages, and then take a third of the time."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, file, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
        if access == "rw-p" and file == "0" and start < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


if __name__ == "__main__":
    gc.disable()  # as the server of a run does while it imports
    for name in MODULES:
        import_module(name)
    use_large_pages()
    serve(socket.socket(fileno=int(sys.argv[1])), MODULES)
