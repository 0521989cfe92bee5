"""What a call has lost so far, and whether it goes on: a bounded number of times, or until its deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from models.engines.errors import (
    EngineAborted,
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
)

TRANSIENT_STATUS: Final = (408, 425, 429)  # refusals that are no fault of the request
LOSSES: Final = (EngineUnreachable, EngineTimeout, EngineAborted, EngineProtocolError)
FIRST_PAUSE_S: Final = 0.2  # before a lost request is sent again, doubled at each loss
LONGEST_PAUSE_S: Final = 5.0


class UnknownPolicy(EngineError):
    """A name that none of the models asked here has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, tuple(known))
        self.name, self.known = name, tuple(known)

    def __str__(self) -> str:
        return f"no engine is called {self.name!r} here; the known names are {', '.join(self.known) or 'none'}"


@dataclass
class Losses:
    """Of one member in one call, and until when the call may go on."""

    deadline: float | None  # by the monotonic clock
    count: int = 0
    engine: str = ""  # that was lost last

    @classmethod
    def until(cls, deadline_s: float | None) -> Losses:
        return cls(None if deadline_s is None else time.monotonic() + deadline_s)

    @property
    def left_s(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def pause_s(self) -> float:
        """How long to wait before the next try."""
        return min(FIRST_PAUSE_S * 2.0 ** min(max(self.count - 1, 0), 10), LONGEST_PAUSE_S)

    def count_in(self, error: Exception, *, progress: bool) -> bool:
        """Take note of a failed request. False if sending it again cannot help.

        A request that took too long but brought tokens has lost nothing: the next one begins after them.
        """
        transient = isinstance(error, EngineRefused) and error.status in TRANSIENT_STATUS
        if not transient and not isinstance(error, LOSSES):
            return False
        if not (isinstance(error, EngineTimeout) and progress):
            self.count += 1
        return True

    def may_go_on(self, max_retries: int) -> bool:
        """Who has a deadline tries until then: a killed engine costs time, not answers. Others count."""
        left_s = self.left_s
        return self.count <= max_retries if left_s is None else self.pause_s < left_s
