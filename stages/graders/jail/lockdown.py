"""What a process gives up before it runs a program that nobody has read: resource limits, Landlock, seccomp.

None of the three needs privileges, a namespace or a container, and none can be undone by the process.

Invariants:
- without seccomp nothing is run at all (`IsolationError`): a program could signal every process of the user;
- Landlock leaves the file system readable below `read` only, and writable below `write` only; where the kernel has no
  Landlock (before 5.13), files stay readable as they are for the user, and nothing can be written or removed;
- no sockets, no new processes (threads are allowed), no signals, no tracing, no other process's limits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Sequence

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in the kernel's seccomp_data, little-endian
_CLONE_THREAD = 0x10000
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column below

# Calls that fail with EPERM, with their numbers on x86-64 and on arm64 (-1: not there).
_DENIED = {
    # network; io_uring could open sockets without being asked here
    "socket": (41, 198), "io_uring_setup": (425, 425),
    # processes and signals; clone is denied below unless it makes a thread
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    # memory and queues that would outlive the process
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # changes to files that Landlock does not cover
    "truncate": (76, 45), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "mknod": (133, -1), "mknodat": (259, 33), "open_by_handle_at": (304, 265),
    # the machine
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105),
    "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142), "swapon": (167, 224),
    "personality": (135, 92),
}  # fmt: skip

# Denied as well where Landlock is missing: nothing is created, renamed or removed.
_DENIED_WITHOUT_LANDLOCK = {
    "creat": (85, -1), "openat2": (437, 437), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "link": (86, -1), "linkat": (265, 37),
    "unlink": (87, -1), "unlinkat": (263, 35), "symlink": (88, -1), "symlinkat": (266, 36),
}  # fmt: skip

_CLONE, _CLONE3, _PRLIMIT, _PRCTL = (56, 220), (435, 435), (302, 261), (157, 167)
_OPEN, _OPENAT = (2, -1), (257, 56)

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on every architecture
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}  # rights of the file system by version; 16 from version 5 on
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FILE_RIGHTS = _WRITE_FILE | _READ_FILE | _TRUNCATE
_DIRECTORY_RIGHTS = _FILE_RIGHTS | _READ_DIR | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8  # make and remove files, directories


class IsolationError(Exception):
    """This machine cannot lock a process down."""


def die_with(parent: int) -> None:
    """SIGKILL at the parent's death; if it died before, now."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def hide() -> None:
    """Close this process's memory and descriptors to others of the same user (/proc/PID/mem, /proc/PID/fd)."""
    _libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Hard limits; `file_bytes` is of any single file, those in memory included."""
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        bound(kind, value)


def bound(kind: int, value: int) -> None:
    """A hard limit of this process, or the lower one that it was started with."""
    hard = resource.getrlimit(kind)[1]
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (most, most))


def lock_down(read: Iterable[str], write: Iterable[str]) -> tuple[str, ...]:
    """Landlock and seccomp for this process. Returns what holds now; raises IsolationError."""
    libc = _libc()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise IsolationError("the kernel refuses no_new_privs")
    version = _landlock(libc, read, write)
    _seccomp(libc, without_landlock=version == 0)
    return (f"landlock {version}", "seccomp") if version else ("seccomp",)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _landlock(libc: ctypes.CDLL, read: Iterable[str], write: Iterable[str]) -> int:
    """Restrict the file system. Returns the version of Landlock, 0 if the kernel has none."""
    version: int = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return 0
    handled = (1 << _ACCESS_BITS.get(version, 16)) - 1
    fields = [handled, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]  # no TCP; no signals outwards
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
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
        failed = libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(descriptor)
        if failed:
            raise IsolationError(f"Landlock refuses the rule for {path} ({os.strerror(ctypes.get_errno())})")
    if libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) != 0:
        raise IsolationError(f"Landlock cannot be applied ({os.strerror(ctypes.get_errno())})")
    os.close(ruleset)
    return version


def _seccomp(libc: ctypes.CDLL, *, without_landlock: bool) -> None:
    program = filter_program(platform.machine(), without_landlock=without_landlock)
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise IsolationError(f"seccomp filters cannot be set ({os.strerror(ctypes.get_errno())})")


def filter_program(machine: str, *, without_landlock: bool = False) -> list[bytes]:
    """Instructions (8 bytes each) of the filter for a machine as `platform.machine()` calls it."""
    if machine not in _ARCHITECTURES:
        raise IsolationError(f"there is no filter for the processor {machine!r}, only for {', '.join(_ARCHITECTURES)}")
    audit, column = _ARCHITECTURES[machine]
    deny = _instruction(_RETURN, _ERRNO | errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, audit, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NR),
        _instruction(_AT_LEAST, 0x40000000, 0, 1),  # the x32 numbering, which would get around all of this
        deny,
    ]
    denied = {**_DENIED, **(_DENIED_WITHOUT_LANDLOCK if without_landlock else {})}
    for numbers in denied.values():
        program += _when(numbers[column], [deny])
    program += _when(_CLONE3[column], [_instruction(_RETURN, _ERRNO | errno.ENOSYS)])  # the C library then uses clone
    program += _when(_CLONE[column], _unless(0, _instruction(_ANY_BIT, _CLONE_THREAD, 1, 0), deny))
    program += _when(_PRLIMIT[column], _unless(0, _instruction(_EQUAL, 0, 1, 0), deny))
    program += _when(
        _PRCTL[column],
        [
            _instruction(_LOAD, _ARGUMENTS),
            _instruction(_EQUAL, _PR_SET_PDEATHSIG, 1, 0),
            _instruction(_EQUAL, _PR_SET_DUMPABLE, 0, 1),
            deny,
            _instruction(_RETURN, _ALLOW),
        ],
    )
    if without_landlock:
        for numbers, flags in ((_OPEN, 1), (_OPENAT, 2)):
            program += _when(numbers[column], _unless(flags, _instruction(_ANY_BIT, _WRITE_FLAGS, 0, 1), deny))
    return [*program, _instruction(_RETURN, _ALLOW)]


def _when(number: int, body: Sequence[bytes]) -> list[bytes]:
    """Instructions for one call; every path of `body` returns."""
    return [] if number < 0 else [_instruction(_EQUAL, number, 0, len(body)), *body]


def _unless(argument: int, test: bytes, deny: bytes) -> list[bytes]:
    """Deny after a failed test of the low half of an argument (jump 0 = deny, 1 = go on), else allow."""
    return [_instruction(_LOAD, _ARGUMENTS + 8 * argument), test, deny, _instruction(_RETURN, _ALLOW)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
