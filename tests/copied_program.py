"""The program `launch.py` as a copy of a process that has imported everything.

A test starts it within milliseconds. Its processes are copied from it as those of any run.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any, Final

import msgspec

from pipeline.hosts.fork_server import ENGINES, STAGES, TRAINERS, Reply, Request, adopt, serve

ROOT: Final = Path(__file__).resolve().parents[1]
MODULES: Final = (*STAGES, *ENGINES, *TRAINERS, "launch", "pipeline.run", "matplotlib.pyplot", "tests.copied_program")
LOOKED_AT: Final = ("PYTHON", "OMP_", "MKL_", "LD_", "CUDA", "HF_", "TRANSFORMERS_", "TORCH", "NCCL", "GLOO", "SLUICE_")


def main(argv: Sequence[str]) -> int:
    """As `python launch.py ARGUMENT...`."""
    import launch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = argv
    return launch.main(program=True)


def looked_at(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that are read when something is imported."""
    return {key: value for key, value in env.items() if key.startswith(LOOKED_AT)}


class _Server:
    """One for each process of the tests, and each set of variables."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
            env={**env, "PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._numbers = itertools.count()

    def start(self, argv: Sequence[str], env: Mapping[str, str], directory: str, files: Sequence[int]) -> int:
        limits, words = getrlimit(RLIMIT_NOFILE), ["tests.copied_program", *argv]
        request = Request(next(self._numbers), "launch", words, {**env}, directory, limits, os.getpid())
        adopt(True)
        try:
            socket.send_fds(self._socket, [msgspec.json.encode(request)], [*files])
            reply = msgspec.json.decode(self._socket.recv(1 << 16), type=Reply)
        finally:
            adopt(False)
        assert reply.pid, reply.error
        return reply.pid


@functools.cache
def _server(env: tuple[tuple[str, str], ...], owner: int) -> _Server:
    return _Server({**os.environ, **dict(env)})


class CopiedProgram(subprocess.Popen[str]):
    """`subprocess.Popen` of `launch.py` with these arguments."""

    def __init__(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        super().__init__([*argv], cwd=cwd, env={**env}, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        """As that of the class, whose arguments these are."""
        cwd, env, pipes = str(given[4]), given[5], given[9:15]
        server = _server(tuple(sorted(looked_at(env).items())), os.getpid())
        self.pid = server.start(args, env, cwd, [pipes[0], pipes[3], pipes[5]])
        self._child_created = True
        self._close_pipe_fds(*pipes)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), MODULES)
