"""What of a run is still there: processes by the mark in their environment, files in shared memory by who mapped them.

Knows nothing of the run but that its processes inherit an environment, and that names in `/dev/shm` and in the
directory of its sockets are its own while it holds them. Other runs on the machine are never looked at.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "SLUICE_CHAOS_MARK"
SHARED = Path("/dev/shm")
GRACE_S = 20.0


def marked(mark: str) -> Iterator[int]:
    """Living processes whose environment at their start held the mark; those that only wait to be counted are none."""
    wanted = f"{MARK}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended in between
            environment = Path(entry.path, "environ").read_bytes().split(b"\0")
            if wanted in environment and Path(entry.path, "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                yield int(entry.name)


class Watch:
    """Remembers what a run had in shared memory, to look for it when the run is over."""

    def __init__(self, mark: str, runtime: Path) -> None:
        """`runtime`: a directory of the run's own in which it puts its sockets (XDG_RUNTIME_DIR)."""
        self.mark, self.runtime = mark, runtime
        self._names: set[str] = set()

    def look(self) -> None:
        """Take note of what is there now."""
        self._names |= {path.name for path in self.runtime.iterdir()}
        for pid in marked(self.mark):
            with contextlib.suppress(OSError):  # it ended in between
                for line in Path("/proc", str(pid), "maps").read_text().splitlines():
                    path = Path(line.split(maxsplit=5)[-1].removesuffix(" (deleted)"))
                    if path.is_relative_to(SHARED) and path != SHARED:
                        self._names.add(path.relative_to(SHARED).parts[0])

    def left(self, grace_s: float = GRACE_S) -> list[str]:
        """What is still there of it; processes get a time of grace."""
        deadline = time.monotonic() + grace_s
        while (alive := list(marked(self.mark))) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [f"process {pid}: {command(pid)}" for pid in alive]
        found += [f"{path} in shared memory" for name in sorted(self._names) if (path := SHARED / name).exists()]
        return found + [f"{path} of its sockets" for path in sorted(self.runtime.iterdir())]


def command(pid: int) -> str:
    """The command line of a process."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "ended just now"
