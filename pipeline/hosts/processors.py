"""CPU time: of a process with all that it started, and how many cores of this machine nobody uses. Linux."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

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
