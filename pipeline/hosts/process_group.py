"""The processes of one group, as /proc shows them: who is stopped, what they use, what they leave in shared memory.

Invariant: nothing is removed but files that a process of the group had mapped, of the kinds that SGLang and Python's
multiprocessing make for themselves; they are not removed by those when they are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

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
