"""Windows over counters that only grow. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class Ring:
    """Marks of growing counters, oldest first. The change over a window is the newest mark less the oldest.

    A mark goes once the next one covers the window as well, so that the ring spans a little more than the window.

    Args:
        window_s: seconds that a window has at least.
        least: counter -> how much it grows at least within a window.
    """

    def __init__(self, window_s: float, **least: float) -> None:
        self._window_s, self._least = window_s, least
        self._marks: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, at_s: float, counters: Mapping[str, float]) -> None:
        """Keep the counters as they are at `at_s`; times do not fall."""
        self._marks.append((at_s, counters))
        while len(self._marks) > 2 and self._covers(1):
            self._marks.popleft()

    def clear(self) -> None:
        self._marks.clear()

    @property
    def newest(self) -> tuple[float, Mapping[str, float]] | None:
        return self._marks[-1] if self._marks else None

    @property
    def full(self) -> bool:
        """Whether the marks cover a whole window."""
        return len(self._marks) > 1 and self._covers(0)

    def change(self) -> tuple[float, dict[str, float]]:
        """(seconds, growth of each counter) from the oldest mark to the newest; seconds are 0 with less than two."""
        if len(self._marks) < 2:
            return 0.0, {}
        (start_s, first), (end_s, last) = self._marks[0], self._marks[-1]
        return end_s - start_s, {name: last[name] - first[name] for name in last}

    def _covers(self, oldest: int) -> bool:
        (start_s, first), (end_s, last) = self._marks[oldest], self._marks[-1]
        grown = all(last[name] - first[name] >= least for name, least in self._least.items())
        return end_s - start_s >= self._window_s and grown
