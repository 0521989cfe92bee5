"""Processes that end with their parent, together with everything they started.

A parent-death signal reaches one process only, and a signal to a process group misses a daemon that left the group. A
guard stands between parent and worker: orphans below the guard become its children, so the guard knows all of them.
Linux only, standard library only: the sandbox of programs imports this.

Every user of a machine can read command lines, and options and programs' environments hold keys. So a child process
gets its arguments as JSON on its standard input.

    python -m stages.workers.guard PARENT     run any program under a guard; arguments: the program's, environment
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS: Final = {signal.SIGCHLD, signal.SIGTERM}
_AGAIN_S = 0.05
_HIGHEST_FD = 4096
_END_S: Final = 20.0  # for a guard to kill all processes below it


def written_arguments(arguments: Sequence[object]) -> int:
    """A descriptor to give a child process as its standard input; close it once the child is started."""
    descriptor = os.memfd_create("arguments")
    os.write(descriptor, json.dumps(arguments).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_arguments() -> list[Any]:
    """The arguments that the parent wrote to the standard input, which is empty afterwards."""
    with open(0, "rb", closefd=False) as file:
        arguments: list[Any] = json.load(file)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return arguments


def libc() -> ctypes.CDLL:
    """The C library, for calls that Python does not have."""
    return ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Receive this signal at the parent's death. Ends now if the parent is dead already."""
    libc().prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def bound(kind: int, value: int, hard: int | None = None) -> None:
    """Set a hard resource limit of this process, or keep the lower limit that the process was started with."""
    most = resource.getrlimit(kind)[1]
    wanted = value if hard is None else hard
    ceiling = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(kind, (min(value, ceiling), ceiling))


def start_guarded(
    module: str, arguments: Sequence[object], descriptor: int, *, python: str | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m module DESCRIPTOR PARENT_PID`, which calls `become_guarded`.

    The arguments are on its standard input, its error output is a pipe.

    The process gets this process's environment and import path, so modules of the user are found as they are here.
    Another interpreter (`python`) has its own packages: it gets this project, the user's PYTHONPATH and the directory
    where the run was started.
    """
    paths = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    if python is not None:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), os.getcwd()]
    given = written_arguments([str(argument) for argument in arguments])
    try:
        return subprocess.Popen(
            [python or sys.executable, "-P", "-m", module, str(descriptor), str(os.getpid())],
            pass_fds=(descriptor,),
            stdin=given,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for this process to handle
            env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
        )
    finally:
        os.close(given)


def end_guarded(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything below it. Waits for the end, 20 seconds at most."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:  # the guard itself hangs: kill its process group
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def become_guarded(parent: int) -> None:
    """Fork. The child returns from here; the caller stays behind as the child's guard, and never returns.

    The guard ends when the guarded process has ended, at SIGTERM, and at the death of `parent`. Before it ends, the
    guard kills everything below it. The guard ends as the guarded process did, with its exit code or by its signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with(parent, signal.SIGTERM)
    guard = os.getpid()
    guarded = os.fork()
    if guarded:
        os.closerange(3, _HIGHEST_FD)  # a reader of the guarded process's output sees its end
        _keep(guarded)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with(guard)


def _keep(guarded: int) -> NoReturn:
    """Waits for the end of the guarded process; unblocked by the end, and by SIGTERM."""
    code = -signal.SIGKILL
    while signal.sigwaitinfo(_SIGNALS).si_signo != signal.SIGTERM:
        ended = dict(_reaped())
        if guarded in ended:
            code = ended[guarded]
            break
    while _has_children():
        for pid in _children():
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or belongs to another user by now
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, _AGAIN_S)  # the children of a killed process become the guard's
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file, if any, is the guarded process's
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(1)


def _reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended, and their exit codes."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _has_children() -> bool:
    """Whether any child is left once all ended children are reaped."""
    for _ in _reaped():
        pass
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> Iterator[int]:
    me = str(os.getpid()).encode()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            if stat.read().rpartition(b")")[2].split()[1] == me:
                yield int(name)


def main(parent: str) -> None:
    """Become a program, below a guard. Does not return."""
    become_guarded(int(parent))
    argv, environment = read_arguments()
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}; is it installed, and on the PATH?", file=sys.stderr)  # noqa: T201
        os._exit(127)


if __name__ == "__main__":
    main(*sys.argv[1:])
