"""A fork of the jail becomes a place for a program: descriptors, rights, limits; and what is looked at while it runs.

Invariants: a fork that is not locked down runs nothing, and says why on a descriptor that is closed before the program
begins, so that no end of a program can look like a machine that cannot isolate it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TextIO, cast

from stages.graders.jail.lockdown import hide, limit, lock_down
from stages.graders.jail.privileges import drop_privileges
from stages.process_guard import die_with, libc

READY: Final = b"ready"
REASON_BYTES: Final = 500
# Of one program: what resource limits do not hold. Looked at while it runs, so it may get beyond by what it does in
# LOOK_S; a file in memory or on the disk is limited at once.
FILE_BYTES: Final = 4 << 20
DIRECTORY_BYTES, DIRECTORY_ENTRIES = 16 << 20, 200
THREADS: Final = 256
LOOK_S: Final = 0.025
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom")
_ABOVE, _HIGHEST_FD = 100, 1024  # this process opens a handful


def confine(
    parent: int,
    directory: str,
    files: Sequence[int],
    ready: int,
    *,
    cpu_s: int,
    memory_bytes: int,
    read: Sequence[str] = (),
) -> None:
    """In a fork: give everything up. `files` become descriptors 0, 1, 2...; `read` can be read besides the libraries.

    Returns locked down, having written READY to `ready` and closed it. Else writes why not and ends the process.
    """
    try:
        drop_privileges(libc(), directory)
        die_with(parent)  # behind what makes the kernel forget it
        hide()
        os.chdir(directory)
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in (*files, ready)]
        for number, descriptor in enumerate(moved):
            os.dup2(descriptor, number)
        ready = len(files)
        os.closerange(ready + 1, _HIGHEST_FD)
        limit(cpu_s, memory_bytes, FILE_BYTES)
        lock_down([os.path.dirname(os.__file__), *_LIBRARIES, *read], [directory, os.devnull])
    except BaseException as error:  # whatever it is, it goes no further than this process
        with suppress(OSError):
            os.write(ready, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(ready, READY)
    os.close(ready)


def preparation(said: int) -> str:
    """Waits for a fork to close its end of the pipe: nothing that it does before that is the program's.

    Why it could not be locked down, "" if it is. Closes `said`.
    """
    with open(said, "rb") as stream:
        prepared = stream.read(REASON_BYTES)
    return "" if prepared == READY else prepared.decode(errors="replace") or "it ended unprepared"


def exceeds(child: int, directory: str) -> bool:
    """Whether a program has more threads or files than it may."""
    return _has_too_many_threads(child) or is_full(directory)


def is_full(directory: str) -> bool:
    """Whether there is more in the directory of a program than may be."""
    entries = used = 0
    for path, names, files in os.walk(directory):
        for name in (*names, *files):
            entries += 1
            with suppress(OSError):
                used += 512 * os.lstat(os.path.join(path, name)).st_blocks
            if entries > DIRECTORY_ENTRIES or used > DIRECTORY_BYTES:
                return True
    return False


def text_stream(descriptor: int, mode: str) -> TextIO:
    """A descriptor as text, for good: it is not closed with the stream."""
    stream = open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    return cast(TextIO, stream)


def _has_too_many_threads(child: int) -> bool:
    with suppress(OSError), open(f"/proc/{child}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[17]) > THREADS
    return False
