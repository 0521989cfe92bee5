"""Landlock (Linux 5.13): which files this process may touch, by rules that need no privileges and cannot be undone."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from stages.graders.jail.errors import IsolationError

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # on every architecture
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}  # rights of the file system by version; 16 from version 5 on
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FILE_RIGHTS = _WRITE_FILE | _READ_FILE | _TRUNCATE
_DIRECTORY_RIGHTS = _FILE_RIGHTS | _READ_DIR | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8  # make and remove files, directories


def landlock_version(libc: ctypes.CDLL) -> int:
    """Of this kernel; 0 if it has no Landlock, or has it switched off."""
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def restrict_files(libc: ctypes.CDLL, version: int, read: Iterable[str], write: Iterable[str]) -> None:
    """Nothing but reading below `read`, and reading, writing, making and removing below `write`."""
    handled = (1 << _ACCESS_BITS.get(version, 16)) - 1
    fields = [handled, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]  # no TCP; no signals outwards
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
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
        failed = libc.syscall(_ADD, ruleset, 1, rule, 0)
        os.close(descriptor)
        if failed:
            raise IsolationError(f"Landlock refuses the rule for {path} ({os.strerror(ctypes.get_errno())})")
    if libc.syscall(_RESTRICT, ruleset, 0) != 0:
        raise IsolationError(f"Landlock cannot be applied ({os.strerror(ctypes.get_errno())})")
    os.close(ruleset)
