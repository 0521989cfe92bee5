"""Root and capabilities, and how a process gives them up for good.

Root becomes `nobody`. Where `nobody` cannot read Python's own files (an installation below /root), root's identity is
kept for opening files, and for nothing else: files are then Landlock's business alone. Root without the right to change
users (a container with its capabilities dropped) stays root by number, without any capability.
"""

from __future__ import annotations

import ctypes
import os
import struct

from stages.graders.jail.errors import IsolationError

NOBODY = 65534
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL = 8, 47, 4
_CAPABILITY_VERSION = 0x20080522
_CAP_SETUID = 1 << 7


def drop_privileges(libc: ctypes.CDLL, directory: str) -> None:
    """Leave root, give up all capabilities; `directory` stays the process's own. Raises IsolationError.

    The kernel forgets the parent-death signal at this: ask for it afterwards.
    """
    if 0 in os.getresuid():
        _leave_root(libc, directory)
    libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    _keep_capabilities(libc, 0)
    if capabilities(libc):
        raise IsolationError("the kernel leaves a program its capabilities")


def capabilities(libc: ctypes.CDLL) -> int:
    """What this process may use, or keep for a program that it starts, as bits."""
    sets = ctypes.create_string_buffer(24)
    if libc.capget(struct.pack("=Ii", _CAPABILITY_VERSION, 0), sets) != 0:
        raise IsolationError(f"capabilities cannot be asked for ({os.strerror(ctypes.get_errno())})")
    return int.from_bytes(sets.raw, "little")


def _leave_root(libc: ctypes.CDLL, directory: str) -> None:
    try:
        readable = _read_as_nobody()
        os.setgroups([])
        if readable:
            os.chown(directory, NOBODY, NOBODY)
        else:
            libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:  # not permitted here, or a user namespace without that number
        return
    if not readable:
        _keep_capabilities(libc, _CAP_SETUID)
        libc.setfsuid(0)
        if libc.setfsuid(-1) != 0:  # it answers with what was set before
            raise IsolationError("Python's files can be read by root alone, and the kernel does not let them be opened")


def _read_as_nobody() -> bool:
    """Whether Python's library is for everybody to read. Raises OSError where users cannot be changed."""
    os.seteuid(NOBODY)
    try:
        os.close(os.open(os.__file__, os.O_RDONLY | os.O_CLOEXEC))
        return True
    except OSError:
        return False
    finally:
        os.seteuid(0)


def _keep_capabilities(libc: ctypes.CDLL, bits: int) -> None:
    """Permitted and effective are these (below 32), nothing can be inherited."""
    header, sets = struct.pack("=Ii", _CAPABILITY_VERSION, 0), struct.pack("=6I", bits, bits, 0, 0, 0, 0)
    if libc.capset(header, sets) != 0:
        raise IsolationError(f"capabilities cannot be given up ({os.strerror(ctypes.get_errno())})")
