"""How often a process may be restarted, and the pause before each restart.

A separate file, because the parent of `--auto-resume` uses it too and imports nothing beyond the standard library.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

# The window that the limit refers to. A process that is lost now and then within weeks is always restarted; one that
# dies as soon as it has loaded (minutes, for a large model) ends the run.
WINDOW_S: Final = 3600.0


def backoff_s(restarts: int) -> float:
    """0.2, 0.4, 0.8 ... at most 10 seconds."""
    return float(min(0.2 * 2 ** max(restarts - 1, 0), 10.0))


class RestartBudget:
    """The losses of one process. `limit`: restarts within `WINDOW_S`."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._recent: deque[float] = deque()

    def lost(self) -> int:
        """Count a loss; returns the losses within the window. More than `limit` are too many."""
        now = self._clock()
        self._recent.append(now)
        while self._recent[0] <= now - WINDOW_S:
            self._recent.popleft()
        return len(self._recent)
