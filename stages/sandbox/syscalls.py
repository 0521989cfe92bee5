"""The system calls that a jailed program may make, and the seccomp filter that refuses all others.

Invariants:
- a call that is not in the list fails with EPERM; a call newer than the list fails with ENOSYS, as on an older kernel,
  so calls that later kernels bring are refused too;
- no call in the list reaches another process: none sends a signal or makes one be sent (kill and its like; fcntl
  F_SETOWN, F_SETSIG and O_ASYNC; ioctl FIOASYNC), none names a process to change, none connects or passes descriptors;
- no call in the list makes memory that neither the address space nor a descriptor's file size limits (memfd_create,
  shmget, mq_open; descriptors in flight over a socket; a separate descriptor table for a thread).
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NR, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in the kernel's seccomp_data, little-endian
_NEWEST = 462  # number of the newest call that was reviewed (mseal, Linux 6.10); the same on all architectures
_X32 = 0x3FFFFFFF  # numbers above are of x86-64's second numbering, which would get around the list

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit number, column below

# Numbers on x86-64 and on arm64 (-1: not there).
ALLOWED = {
    # files and descriptors; which files is Landlock's business
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "lseek": (8, 62), "close": (3, 57),
    "stat": (4, -1), "fstat": (5, 80), "lstat": (6, -1), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, -1), "readlinkat": (267, 78), "getdents": (78, -1), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166), "ftruncate": (77, 46),
    "fallocate": (285, 47), "fadvise64": (221, 223), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1),
    "pipe2": (293, 59),
    # waiting for descriptors; sockets only as a connected pair, which asyncio needs
    "select": (23, -1), "pselect6": (270, 72), "poll": (7, -1), "ppoll": (271, 73), "epoll_create": (213, -1),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    # memory and threads
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "brk": (12, 214),
    "madvise": (28, 233), "membarrier": (324, 283), "futex": (202, 98), "set_robust_list": (273, 99),
    "rseq": (334, 293), "restart_syscall": (219, 128), "sched_yield": (24, 124),
    # its own signals and clocks
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, -1),
    "alarm": (37, -1), "getitimer": (36, 102), "setitimer": (38, 103), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, -1), "times": (100, 153),
    # identity and resource use
    "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "getpid": (39, 172), "getppid": (110, 173),
    "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getpgrp": (111, -1),
    "getpgid": (121, 155), "getsid": (124, 156), "getpriority": (140, 141), "capget": (125, 90),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "wait4": (61, 260),
    "waitid": (247, 95), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip

# Allowed only with Landlock, which limits them to some files; without it, files are opened for reading only.
WITH_LANDLOCK = {
    "creat": (85, -1), "mkdir": (83, -1), "mkdirat": (258, 34),
    "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38),
    "renameat2": (316, 276),
}  # fmt: skip

# Done by saying so: a program that waits for a disk cannot be ended while it does, nor graded before its deadline.
IGNORED = {"fsync": (74, 82), "fdatasync": (75, 83)}

CLONE3 = (435, 435)  # hides its flags from filters: the C library uses clone where it is not there
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLOEXEC, _NONBLOCK = 0o2000000, 0o4000
# Of open: waiting for the disk, as above. Of F_SETFL: signals, and the disk again.
_DISK_FLAGS = os.O_SYNC | os.O_DSYNC | os.O_DIRECT
_STATUS_FLAGS = 0o20000 | os.O_DIRECT

# Calls of which only some arguments are allowed: the argument's position and the values of its low half.
OF_VALUES = {
    # exactly the flags of a thread in glibc and in musl: a thread with a separate descriptor table could have more
    "clone": ((56, 220), 0, (0x3D0F00, 0x7D0F00)),
    "close_range": ((436, 436), 2, (0, 4)),  # likewise: not CLOSE_RANGE_UNSHARE
    "prlimit64": ((302, 261), 0, (0,)),  # of this process
    "prctl": ((157, 167), 0, (3, 15, 16)),  # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME
    "ioctl": ((16, 29), 1, (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)),  # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_SETLK, F_SETLKW, F_DUPFD_CLOEXEC; F_SETFL is below
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 5, 6, 7, 1030)),
    # a stream: a datagram socket of a pair could send to any other socket that has a name
    "socketpair": ((53, 199), 1, tuple(1 | flags for flags in (0, _CLOEXEC, _NONBLOCK, _CLOEXEC | _NONBLOCK))),
}

# Calls with flags that must not have some bits: position of the flags.
OPEN = {"open": ((2, -1), 1), "openat": ((257, 56), 2)}
_F_SETFL = 4


def filter_program(machine: str, *, without_landlock: bool = False) -> list[bytes]:
    """Instructions (8 bytes each) of the filter for a machine as `platform.machine()` calls it. Raises KeyError."""
    audit, column = ARCHITECTURES[machine]
    deny, allow = _instruction(_RETURN, _ERRNO | errno.EPERM), _instruction(_RETURN, _ALLOW)
    missing = _instruction(_RETURN, _ERRNO | errno.ENOSYS)
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_EQUAL, audit, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NR),
    ]
    for numbers in (ALLOWED if without_landlock else {**ALLOWED, **WITH_LANDLOCK}).values():
        program += _when(numbers[column], [allow])
    for name, (numbers, position, values) in OF_VALUES.items():
        body = [_load(position)]
        if name == "fcntl":
            body += _when(_F_SETFL, [_load(2), _instruction(_ANY_BIT, _STATUS_FLAGS, 0, 1), deny, allow])
        for value in values:
            body += _when(value, [allow])
        program += _when(numbers[column], [*body, deny])
    bits = _DISK_FLAGS | (_WRITE_FLAGS if without_landlock else 0)
    for numbers, position in OPEN.values():
        program += _when(numbers[column], [_load(position), _instruction(_ANY_BIT, bits, 0, 1), deny, allow])
    for numbers in IGNORED.values():
        program += _when(numbers[column], [_instruction(_RETURN, _ERRNO | 0)])
    program += _when(CLONE3[column], [missing])
    program += [_instruction(_ABOVE, _X32, 0, 1), deny, _instruction(_ABOVE, _NEWEST, 0, 1), missing]
    return [*program, deny]


def _when(number: int, body: Sequence[bytes]) -> list[bytes]:
    """Instructions for one value of the accumulator; every path of `body` returns."""
    return [] if number < 0 else [_instruction(_EQUAL, number, 0, len(body)), *body]


def _load(argument: int) -> bytes:
    """Load the low half of an argument: the kernel ignores the high half of the arguments tested here."""
    return _instruction(_LOAD, _ARGUMENTS + 8 * argument)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
