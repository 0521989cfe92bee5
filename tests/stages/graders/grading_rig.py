"""One response graded, and a pool that counts what became of its processes."""

from __future__ import annotations

from typing import Any

import msgspec

from stages.graders.grade import Grade, GradeRequest
from stages.graders.pool import Fault, GraderPool
from stages.graders.registry import grade_request


def grade(name: str, response: str, label: Any, metadata: Any = None, *, n_tokens: int = 0, seed: int = 0) -> Grade:
    row = msgspec.json.encode(metadata or {}).decode()
    return grade_request(GradeRequest(name, response, label, row, n_tokens, seed))


class CountingPool(GraderPool):
    """`started`: processes; `timeouts` and `crashes`: at each attempt; `retries`: items that were tried again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeouts = self.crashes = self.retries = 0

    @property
    def started(self) -> int:
        return sum(seat.worker.incarnation for seat in self._seats)

    def _blame(self, fault: Fault, attempts: int, item: GradeRequest) -> Grade | None:
        self.timeouts += fault.kind == "timeout"
        self.crashes += fault.kind == "crash"
        verdict = super()._blame(fault, attempts, item)
        self.retries += verdict is None
        return verdict
