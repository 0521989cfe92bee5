"""How much of its time an engine does nothing. Pure: times come with the calls.

Our engines account for the seconds that they compute. SGLang does not: there each look counts for the time since the
look before, as busy if anything ran at it.
"""

from __future__ import annotations

from collections import deque

WINDOW_LOOKS = 8


class IdleMeter:
    """Idle share of one engine over its last looks."""

    def __init__(self, looks: int = WINDOW_LOOKS) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=looks)  # (time, busy seconds by then)
        self._accounts = False  # it tells its busy seconds
        self._sampled_s = 0.0

    def saw(self, now_s: float, busy_s: float, running: int) -> float | None:
        """Take a look: busy seconds since the engine's start (0 where it does not count them), requests that run.

        The share in [0, 1] since the oldest look kept; None at the first.
        """
        if busy_s > 0.0 and not self._accounts:
            self._accounts = True
            self._seen.clear()
        if self._seen and running:
            self._sampled_s += now_s - self._seen[-1][0]
        busy = busy_s if self._accounts else self._sampled_s
        if self._seen and busy < self._seen[-1][1]:
            self._seen.clear()  # it was started anew
        self._seen.append((now_s, busy))
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return min(1.0, max(0.0, 1.0 - (last - first) / (end - start))) if end > start else None

    def forget(self) -> None:
        """It is not looked at any more: the next look is a first one."""
        self._seen.clear()
