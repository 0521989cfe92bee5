"""What a process gives up before it runs a program that nobody has read: rights, resource limits, Landlock, seccomp.

None of it needs privileges, a namespace or a container, and nothing of it can be undone by the process.

Invariants:
- without seccomp nothing is run at all (`IsolationError`): a program could signal every process of the user;
- the system calls that are left are a list (`syscalls`), the same on every kernel: no sockets, no new processes or
  programs (threads are allowed), no signals, no tracing, no other process's limits, no memory outside of the limits;
- Landlock leaves the file system readable below `read` only, and writable below `write` only; where the kernel has no
  Landlock (before 5.13), files stay readable as they are for the user, and nothing can be written or removed;
- no capability is left, and nobody is root who can be somebody else (`privileges`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable

from stages.graders.jail.errors import IsolationError
from stages.graders.jail.landlock import landlock_version, restrict_files
from stages.graders.jail.syscalls import ARCHITECTURES, filter_program
from stages.process_guard import libc

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_SECCOMP_MODE_FILTER = 2


def hide() -> None:
    """Close this process's memory and descriptors to others of the same user (/proc/PID/mem, /proc/PID/fd)."""
    libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Hard limits; `file_bytes` is of any single file, those in memory included."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        bound(kind, value)
    bound(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU first, which says what it was


def bound(kind: int, value: int, hard: int | None = None) -> None:
    """A hard limit of this process, or the lower one that it was started with."""
    most = resource.getrlimit(kind)[1]
    wanted = value if hard is None else hard
    ceiling = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(kind, (min(value, ceiling), ceiling))


def lock_down(read: Iterable[str], write: Iterable[str]) -> tuple[str, ...]:
    """Landlock and seccomp for this process. Returns what holds now; raises IsolationError."""
    library = libc()
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise IsolationError("the kernel refuses no_new_privs")
    version = landlock_version(library)
    if version:
        restrict_files(library, version, read, write)
    _seccomp(library, without_landlock=version == 0)
    return (f"landlock {version}", "seccomp") if version else ("seccomp",)


def _seccomp(library: ctypes.CDLL, *, without_landlock: bool) -> None:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise IsolationError(f"there is no filter for the processor {machine!r}, only for {', '.join(ARCHITECTURES)}")
    program = filter_program(machine, without_landlock=without_landlock)
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    if library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise IsolationError(f"seccomp filters cannot be set ({os.strerror(ctypes.get_errno())})")
