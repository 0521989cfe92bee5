"""Processes, processors and ports of this machine (Linux).

- Processes of a group, as /proc shows them: which are stopped, what they use, what they leave in shared memory. Only
  files that a process of the group had mapped are removed, of the kinds that SGLang and multiprocessing make.
- CPU time of a process and its descendants, and how many cores are idle.
- The controller's own process: interruption, and the limit of open files.
- Ports for servers that cannot choose their own. A port that is only looked up may be taken meanwhile, so it is
  bound here, without listening, until the server listens: the kernel gives a bound port to no process that asks for any
  free port, but a server that asks for its number, with SO_REUSEADDR, gets it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pipeline.errors import UsageError, file_limit
from pipeline.hosts.launcher import ProcessState

SHARED: Final = Path("/dev/shm")
LEFT_BEHIND: Final = ("sglang_", "sem.mp-")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def group_state(group: int) -> ProcessState | None:
    """None where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    stopped: list[str] = []
    ticks = 0
    for process, name, fields in _members(group):
        ticks += int(fields[11]) + int(fields[12])
        if fields[0] in "Tt":
            stopped.append(f"process {process} ({name})")
    return ProcessState(tuple(stopped), ticks / _TICKS_PER_S)


def _members(group: int) -> Iterator[tuple[str, str, list[str]]]:
    """Number, name and the fields of proc(5) from the state on: state, ppid, pgrp, ...; utime is [11], stime [12]."""
    if not Path("/proc/self/stat").exists():
        return
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text()
        except OSError:
            continue  # it ended in between
        fields = text[text.rindex(")") + 2 :].split()
        if int(fields[2]) == group:
            yield entry.name, text[text.index("(") + 1 : text.rindex(")")], fields


def shared_files(group: int) -> frozenset[Path]:
    """Files in shared memory that would stay behind if the group were killed now."""
    found: set[Path] = set()
    for process, _, _ in _members(group):
        with contextlib.suppress(OSError):  # it ended in between
            for line in Path("/proc", process, "maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SHARED and path.name.startswith(LEFT_BEHIND):
                    found.add(path)
    return frozenset(found)


def remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def living(group: int) -> bool:
    """Whether a process of the group still runs; those that only wait to be counted do not."""
    return any(fields[0] not in "ZX" for _, _, fields in _members(group))


def kill_group(group: int) -> None:
    """SIGKILL to all processes of the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says EPERM of zombies
        os.killpg(group, signal.SIGKILL)


TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of its descendants that live, and of those whose end was waited for."""
    place = Path("/proc", str(pid))
    try:
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        children = (place / "task" / str(pid) / "children").read_text().split()
    except OSError:  # it has just ended
        return 0.0
    return sum(int(field) for field in fields[11:15]) / TICKS + sum(cpu_seconds(int(child)) for child in children)


class IdleCores:
    """Seconds that the cores of this process were idle since its construction, all cores together."""

    def __init__(self) -> None:
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self.seconds, self._last = 0.0, self._idle()

    def look(self) -> float:
        """The sum up to now."""
        now = self._idle()
        self.seconds, self._last = self.seconds + max(0.0, now - self._last), now
        return self.seconds

    def _idle(self) -> float:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        return sum((int(line[4]) + int(line[5])) / TICKS for line in lines if line and line[0] in self._cores)


ENOUGH_FILES: Final = 1 << 16
# What the controller itself was seen to open, and what each process that it starts adds, with some room.
_OWN_FILES, _FILES_EACH = 72, 4


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal are as Ctrl-C, before the controller has its own way too: what is held is given
    back. Whoever ignores them, such as nohup, goes on to do so."""
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def raise_file_limit(processes: int) -> None:
    """As many open files as this user may have: each replica takes a few sockets, and shells often begin with 1024.

    The processes that it starts inherit the limit. Raises UsageError if it is too low for so many of them: libzmq ends
    a process that can open no more, without a word of the reason.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    needed = _OWN_FILES + _FILES_EACH * processes
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(file_limit(needed))


HOST = "127.0.0.1"


class PortInUse(OSError):
    """A port that was asked for by number is taken."""


@contextlib.contextmanager
def held_port(port: int = 0, host: str = HOST) -> Iterator[int]:
    """A port kept from others for the time of the block: `port`, or any free one if that is 0. Raises PortInUse."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise PortInUse(error.errno, f"port {port} of {host} cannot be used: {error.strerror}") from error
        yield int(held.getsockname()[1])
