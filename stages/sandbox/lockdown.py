"""What a process gives up before it runs an untrusted program: rights, resource limits, Landlock, seccomp.

None of it needs privileges, a namespace or a container, and the process cannot undo any of it. `start_confined` does
all of it in a fork.

Root becomes `nobody`. If `nobody` cannot read Python's own files (an installation below /root), root's identity is kept
for opening files only: Landlock alone then limits access to files. Root without the right to change users (a
container with its capabilities dropped) stays root by number, without any capability.

Invariants:
- without seccomp nothing is run at all (`IsolationError`): a program could signal every process of the user;
- the allowed system calls are a list (`syscalls`), the same on every kernel: no sockets, no new processes or programs
  (threads are allowed), no signals, no tracing, no limits of another process, no memory outside of the limits;
- Landlock (Linux 5.13) leaves the file system readable below `read` only, and writable below `write` only; a kernel
  without Landlock leaves files readable as they are for the user, and nothing can be written or removed;
- no capability is left, and a process that can leave root does;
- a fork that is not locked down runs nothing, and writes the reason to a descriptor that is closed before the program
  begins, so that no end of a program can look like a machine that cannot isolate it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NoReturn, TextIO, cast

from stages.sandbox.syscalls import ARCHITECTURES, filter_program
from stages.workers.guard import bound, die_with, libc

NOBODY = 65534
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL = 8, 47, 4
_CAPABILITY_VERSION = 0x20080522
_CAP_SETUID = 1 << 7
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # on every architecture
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}  # rights of the file system by version; 16 from version 5 on
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FILE_RIGHTS = _WRITE_FILE | _READ_FILE | _TRUNCATE
_DIRECTORY_RIGHTS = _FILE_RIGHTS | _READ_DIR | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8  # make and remove files, directories
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_SECCOMP_MODE_FILTER = 2
READY: Final = b"ready"
REASON_BYTES: Final = 500
# Limits of a program that the kernel does not enforce. They are checked every LOOK_S, so a program may exceed them for
# that long; the size of a file in memory or on disk is limited at once.
FILE_BYTES: Final = 4 << 20  # of any single file, those in memory included
_LIMITS = ((resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0))
DIRECTORY_BYTES, DIRECTORY_ENTRIES = 16 << 20, 200
THREADS: Final = 256
LOOK_S: Final = 0.025
_STOPPED_S: Final = 1.0  # a look that comes so late means that this process was stopped too
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom")
_ABOVE, _HIGHEST_FD = 100, 1024  # this process opens a handful


class IsolationError(Exception):
    """This machine cannot lock a process down."""


def start_confined(
    run: Callable[[], NoReturn],
    directory: str,
    files: Sequence[int],
    cpu_s: int,
    memory_bytes: int,
    read: Sequence[str],
) -> tuple[int, str]:
    """Fork a process that is locked down and then calls `run`. `files` become its descriptors 0, 1, 2...; `read` is
    readable besides the libraries.

    Waits for the lockdown: nothing before it is the program's doing. Returns the number of the process, and why it
    could not be locked down, or "".
    """
    report, ready = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _confine(parent, directory, files, ready, cpu_s, memory_bytes, read)
        run()
    os.close(ready)
    with open(report, "rb") as stream:
        prepared = stream.read(REASON_BYTES)
    return child, "" if prepared == READY else prepared.decode(errors="replace") or "it ended unprepared"


def _confine(
    parent: int, directory: str, files: Sequence[int], ready: int, cpu_s: int, memory_bytes: int, read: Sequence[str]
) -> None:
    """In a fork: give up all rights.

    Returns locked down, after writing READY to `ready` and closing it. Else writes the reason and ends the process.
    """
    try:
        drop_privileges(libc(), directory)
        die_with(parent)  # after dropping privileges, which makes the kernel forget it
        hide()
        os.chdir(directory)
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in (*files, ready)]
        for number, descriptor in enumerate(moved):
            os.dup2(descriptor, number)
        ready = len(files)
        os.closerange(ready + 1, _HIGHEST_FD)
        for kind, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, FILE_BYTES), *_LIMITS):
            bound(kind, value)
        bound(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU first, which names the reason
        lock_down([os.path.dirname(os.__file__), *_LIBRARIES, *read], [directory, os.devnull])
    except BaseException as error:  # no exception may leave this process
        with suppress(OSError):
            os.write(ready, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(ready, READY)
    os.close(ready)


class Deadline:
    """The end of a program's time. Time in which the watching process was stopped, as in a paused container, is added:
    the program did not run either. `left_s` is called every LOOK_S."""

    def __init__(self, seconds: float) -> None:
        self._end, self._looked = time.monotonic() + seconds, time.monotonic()

    def left_s(self) -> float:
        now = time.monotonic()
        late_s, self._looked = now - self._looked - LOOK_S, now
        self._end += late_s if late_s > _STOPPED_S else 0.0
        return self._end - now


def exceeds(child: int, directory: str) -> bool:
    """Whether a program has more threads or files than it may."""
    with suppress(OSError), open(f"/proc/{child}/stat", "rb") as stat:
        if int(stat.read().rpartition(b")")[2].split()[17]) > THREADS:
            return True
    return is_full(directory)


def is_full(directory: str) -> bool:
    """Whether the directory of a program exceeds its limits."""
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
    """A descriptor as text; closing the stream leaves the descriptor open."""
    return cast(TextIO, open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False))


def hide() -> None:
    """Close this process's memory and descriptors to others of the same user (/proc/PID/mem, /proc/PID/fd)."""
    libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def lock_down(read: Iterable[str], write: Iterable[str]) -> None:
    """Landlock and seccomp for this process. Raises IsolationError."""
    library = libc()
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise IsolationError("the kernel refuses no_new_privs")
    version = landlock_version(library)
    if version:
        restrict_files(library, version, read, write)
    _seccomp(library, without_landlock=version == 0)


def _seccomp(library: ctypes.CDLL, *, without_landlock: bool) -> None:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise IsolationError(f"there is no filter for the processor {machine!r}, only for {', '.join(ARCHITECTURES)}")
    program = filter_program(machine, without_landlock=without_landlock)
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    if library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise IsolationError(f"seccomp filters cannot be set ({os.strerror(ctypes.get_errno())})")


def drop_privileges(library: ctypes.CDLL, directory: str) -> None:
    """Leave root, give up all capabilities; `directory` stays the process's own. Raises IsolationError.

    The kernel forgets the parent-death signal here: set it afterwards.
    """
    if 0 in os.getresuid():
        _leave_root(library, directory)
    library.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    _keep_capabilities(library, 0)
    if capabilities(library):
        raise IsolationError("the kernel leaves a program its capabilities")


def capabilities(library: ctypes.CDLL) -> int:
    """The capabilities that this process may use, or pass on to a program, as bits."""
    sets = ctypes.create_string_buffer(24)
    if library.capget(struct.pack("=Ii", _CAPABILITY_VERSION, 0), sets) != 0:
        raise IsolationError(f"capabilities cannot be read ({os.strerror(ctypes.get_errno())})")
    return int.from_bytes(sets.raw, "little")


def _leave_root(library: ctypes.CDLL, directory: str) -> None:
    try:
        readable = _read_as_nobody()
        os.setgroups([])
        if readable:
            os.chown(directory, NOBODY, NOBODY)
        else:
            library.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:  # not permitted here, or a user namespace without that number
        return
    if not readable:
        _keep_capabilities(library, _CAP_SETUID)
        library.setfsuid(0)
        if library.setfsuid(-1) != 0:  # it returns the previous value
            raise IsolationError("Python's files can be read by root alone, and the kernel does not let them be opened")


def _read_as_nobody() -> bool:
    """Whether every user can read Python's library. Raises OSError where users cannot be changed."""
    os.seteuid(NOBODY)
    try:
        os.close(os.open(os.__file__, os.O_RDONLY | os.O_CLOEXEC))
        return True
    except OSError:
        return False
    finally:
        os.seteuid(0)


def _keep_capabilities(library: ctypes.CDLL, bits: int) -> None:
    """Permitted and effective are these (below 32), nothing can be inherited."""
    header, sets = struct.pack("=Ii", _CAPABILITY_VERSION, 0), struct.pack("=6I", bits, bits, 0, 0, 0, 0)
    if library.capset(header, sets) != 0:
        raise IsolationError(f"capabilities cannot be given up ({os.strerror(ctypes.get_errno())})")


def landlock_version(library: ctypes.CDLL) -> int:
    """The Landlock version of this kernel; 0 if Landlock is missing or switched off."""
    return max(0, int(library.syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def restrict_files(library: ctypes.CDLL, version: int, read: Iterable[str], write: Iterable[str]) -> None:
    """Allow only reading below `read`, and reading, writing, making and removing below `write`."""
    handled = (1 << _ACCESS_BITS.get(version, 16)) - 1
    fields = [handled, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]  # no TCP; no signals outwards
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = library.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise IsolationError(f"Landlock {version} refuses a rule set ({os.strerror(ctypes.get_errno())})")
    rules = [(path, _READ_FILE | _READ_DIR) for path in read] + [(path, _DIRECTORY_RIGHTS) for path in write]
    for path, rights in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not there, so nothing to allow
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights & handled, descriptor)
        failed = library.syscall(_ADD, ruleset, 1, rule, 0)
        os.close(descriptor)
        if failed:
            raise IsolationError(f"Landlock refuses the rule for {path} ({os.strerror(ctypes.get_errno())})")
    if library.syscall(_RESTRICT, ruleset, 0) != 0:
        raise IsolationError(f"Landlock cannot be applied ({os.strerror(ctypes.get_errno())})")
    os.close(ruleset)
