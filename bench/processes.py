"""CPU seconds and wake-ups of a process with everything that it started, read from `/proc`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import msgspec

PROC: Final = Path("/proc")
TICKS: Final = os.sysconf("SC_CLK_TCK")


class Usage(msgspec.Struct, frozen=True):
    """Of a tree of processes at one moment, since each of them began; what has ended is not in it."""

    at_s: float
    cpu_s: float
    wakeups: int  # voluntary context switches of all threads: each ended a wait
    by_process: dict[int, tuple[str, float]]  # process -> its name and CPU seconds


def usage(root: int) -> Usage:
    """Of `root` and all its descendants, as they are now."""
    children: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for place in PROC.iterdir():
        if not place.name.isdigit():
            continue
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(place.name)
        children.setdefault(int(fields[1]), []).append(pid)
        spent[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    tree, todo = [], [root]
    while todo:
        pid = todo.pop()
        tree.append(pid)
        todo += children.get(pid, [])
    by_process = {pid: (_name(pid), spent.get(pid, 0.0)) for pid in tree}
    cpu_s = sum(seconds for _, seconds in by_process.values())
    return Usage(time.monotonic(), cpu_s, sum(_wakeups(pid) for pid in tree), by_process)


def _wakeups(pid: int) -> int:
    count = 0
    try:
        for thread in (PROC / str(pid) / "task").iterdir():
            for line in (thread / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    count += int(line.rpartition(":")[2])
    except OSError:  # it has just ended
        return count
    return count


def _name(pid: int) -> str:
    """A stage's name, `engine`, or `controller`."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    for word in reversed(words):
        stage, dash, number = word.rpartition("-")
        if dash and number.isdigit() and stage.isalpha():
            return stage
    if any("models.engines.serve" in word for word in words):
        return "engine"
    return "controller" if "launch.py" in words else "other"
