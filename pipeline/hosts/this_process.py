"""What the controller sets for its own process before it starts others: interruption, and the limit of open files."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from typing import Final

from pipeline.errors import UsageError, file_limit

ENOUGH_FILES: Final = 1 << 16
# What the controller itself was seen to open, and what each process that it starts adds, with some room.
_OWN_FILES, _FILES_EACH = 72, 4


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal are as Ctrl-C, before the controller has its own way too: what is held is given
    back. Whoever ignores them, such as nohup, goes on to do so."""
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def raise_file_limit(processes: int) -> None:
    """As many open files as this user may have: each replica takes a few sockets, and shells often begin with 1024.

    The processes that it starts inherit the limit. Raises UsageError if it is too low for so many of them: libzmq ends
    a process that can open no more, without a word of the reason.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    needed = _OWN_FILES + _FILES_EACH * processes
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(file_limit(needed))
