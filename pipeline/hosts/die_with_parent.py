"""Runs a program that dies with the process that started it: `python die_with_parent.py PARENT_PID PROGRAM
ARGUMENT...`.

The kernel's order is given in the new process before the program replaces this one, for it outlives that; nothing of
the project is imported, so that the program's environment may be any.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From now on the kernel ends this process with its parent, which has this number."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the order was given
        raise SystemExit("the parent process has ended; the program is not started")


def prefix() -> list[str]:
    """The words before those of a program that dies with this process."""
    return [sys.executable, "-IS", __file__, str(os.getpid())]


def kill_group(group: int) -> None:
    """SIGKILL to all processes of the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left
        os.killpg(group, signal.SIGKILL)


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
