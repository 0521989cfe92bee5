"""Processes that end with the one that started them, and take along all that they started themselves.

A parent-death signal reaches one process only, and a signal to a group not those who left it (a daemon). A guard is a
process between the two: orphans below it become its children, so that it knows all of them, whatever they did.
Linux only, and nothing but the standard library: the jail of programs imports this.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS: Final = {signal.SIGCHLD, signal.SIGTERM}
_AGAIN_S = 0.05
_HIGHEST_FD = 4096
_END_S: Final = 20.0  # for a guard to kill what is below it


def libc() -> ctypes.CDLL:
    """The C library, for calls that Python has not."""
    return ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """This signal at the parent's death; if it died before, the end now."""
    libc().prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start_guarded(
    module: str,
    arguments: Sequence[object],
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    *,
    python: str | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m module ARGUMENTS...`, which calls `become_guarded`, with these descriptors.

    It gets this process's environment and import path, so that modules of the user are found as they are here. Another
    interpreter (`python`) has packages of its own: it gets this project, the user's PYTHONPATH and the directory where
    the run was started.
    """
    paths = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    if python is not None:
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), os.getcwd()]
    return subprocess.Popen(
        [python or sys.executable, "-P", "-m", module, *map(str, arguments)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,  # a Ctrl-C is for this process to handle
        env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **environment},
    )


def end_guarded(process: subprocess.Popen[bytes]) -> None:
    """End it and everything below it. Waits for that, some 20 seconds at the most."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:  # a guard that cannot do its work goes with its group
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def become_guarded(parent: int) -> None:
    """Fork. The new process returns from here; this one stays behind as its guard, and never returns.

    The guard ends when what it guards has ended, at SIGTERM, and at the death of `parent`. Before, it kills everything
    below it. It ends as the guarded process did, with its exit code or by its signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with(parent, signal.SIGTERM)
    guard = os.getpid()
    guarded = os.fork()
    if guarded:
        os.closerange(3, _HIGHEST_FD)  # who reads from the guarded process sees its end
        _keep(guarded)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with(guard)


def _keep(guarded: int) -> NoReturn:
    """Waits for the end of the guarded process; unblocked by it, and by SIGTERM."""
    code = -signal.SIGKILL
    while signal.sigwaitinfo(_SIGNALS).si_signo != signal.SIGTERM:
        ended = dict(_reaped())
        if guarded in ended:
            code = ended[guarded]
            break
    while _has_children():
        for pid in _children():
            with suppress(ProcessLookupError, PermissionError):  # over, or another user's by now
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, _AGAIN_S)  # the children of what was killed are the guard's next
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # if there is to be a core, it is the other one's
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(1)


def _reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended, and their exit codes."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def _has_children() -> bool:
    """After those that have ended are reaped."""
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
