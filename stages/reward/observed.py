"""Latencies and failures of the newest grades, and a cache of grades."""

from __future__ import annotations

import time
from collections import OrderedDict, deque

import numpy as np

from stages.graders.grade import Grade

WINDOW = 2048  # newest grades
_EVERY_S = 0.5

CacheKey = tuple[str, int, int, int, str, bytes]


class Observed:
    """Counts since the start, and latencies of the newest grades: the whole wait of a sample for its grade."""

    def __init__(self) -> None:
        self.graded = self.timeouts = self.errors = self.cached = 0
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        self._reported = 0.0

    def add(self, grade: Grade, seconds: float) -> None:
        self.graded += 1
        self.timeouts += grade.status == "timeout"
        self.errors += grade.error is not None
        self._latencies.append(1000.0 * seconds)

    def due(self) -> bool:
        """Whether the last figures are old enough: sorting at each slice would cost more than grading."""
        return time.monotonic() - self._reported >= _EVERY_S

    def figures(self) -> dict[str, float]:
        """By name, for `Activity.extra`. Counts add up over replicas; shares and latencies are this replica's."""
        self._reported = time.monotonic()
        figures = {
            "graded": float(self.graded),
            "grade_timeouts": float(self.timeouts),
            "grade_errors": float(self.errors),
            "grades_from_cache": float(self.cached),
            "timeout_frac": self.timeouts / self.graded if self.graded else 0.0,
            "error_frac": self.errors / self.graded if self.graded else 0.0,
        }
        if self._latencies:
            p50, p99 = np.quantile(self._latencies, (0.50, 0.99), method="inverted_cdf").tolist()
            figures |= {"latency_ms/p50": p50, "latency_ms/p99": p99}
        return figures


class GradeCache:
    """The newest grades by sample and content: a redelivered sample is not graded twice. Failures are not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._grades: OrderedDict[CacheKey, Grade] = OrderedDict()

    def get(self, key: CacheKey | None) -> Grade | None:
        if key is None or key not in self._grades:
            return None
        self._grades.move_to_end(key)
        return self._grades[key]

    def put(self, key: CacheKey | None, grade: Grade) -> None:
        if key is None or grade.error is not None:
            return
        self._grades[key] = grade
        self._grades.move_to_end(key)
        while len(self._grades) > self._size:
            self._grades.popitem(last=False)
