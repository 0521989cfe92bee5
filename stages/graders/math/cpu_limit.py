"""A limit of processor time for a piece of Python, by a timer of this process: a busy machine takes nothing from it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 0.05  # libraries catch what they should not: the exception is raised again until it gets through


class CpuLimitError(BaseException):
    """The time is over. No Exception, so that a library's `except Exception` lets it pass."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitError in the body after so many seconds of processor time of this process.

    Does nothing outside of the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(_number: int, _frame: FrameType | None) -> None:
        raise CpuLimitError(f"{seconds:g} s of processor time are over")

    before = signal.signal(signal.SIGVTALRM, over)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
