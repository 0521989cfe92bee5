"""Whether the infrastructure of an environment works: judged by its newest attempts, tried out after growing waits.

Invariants: while it is out, attempts wait, but for one at a time after each wait; an attempt that works ends the
outage; what the model did is no part of this.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import Struct

_NEWEST: Final = 16  # attempts that are judged
_LEAST: Final = 6  # failures among them, and more than half
FIRST_S, _MOST_S = 1.0, 60.0  # waits


class OutageNotice(Struct, frozen=True):
    """Topic value `environment/<environment>/<replica>`: what the user is told of an outage."""

    environment: str
    out: bool
    reason: str
    lasted_s: float = 0.0  # of the one that is over
    count: int = 1  # outages so far, here


class Outage:
    """Of one environment in one replica."""

    def __init__(self, environment: str, tell: Callable[[OutageNotice], None]) -> None:
        self._environment, self._tell = environment, tell
        self._newest: deque[bool] = deque(maxlen=_NEWEST)
        self._since: float | None = None
        self._count = 0
        self._wait_s = FIRST_S
        self._reason = ""
        self._works = asyncio.Event()
        self._works.set()
        self._trying = asyncio.Lock()

    @property
    def lasted_s(self) -> float:
        """Seconds of the outage; 0 while there is none."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    async def wait(self) -> bool:
        """Waits for the end of an outage, or for its turn to try; true for the one that tries. Call `ended` after."""
        while not self._works.is_set():
            await self._trying.acquire()
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._works.wait()
            except TimeoutError:
                return True
            except BaseException:
                self._trying.release()
                raise
            self._trying.release()
        return False

    def ended(self, trying: bool) -> None:
        """An attempt is over; `trying` is what `wait` said of it."""
        if trying:
            self._trying.release()

    def succeeded(self) -> None:
        self._newest.append(True)
        if self._since is None:
            return
        notice = OutageNotice(self._environment, False, self._reason, self.lasted_s, self._count)
        self._since, self._wait_s = None, FIRST_S
        self._newest.clear()
        self._works.set()
        self._tell(notice)

    def failed(self, reason: str, trying: bool) -> None:
        """An attempt met infrastructure that failed."""
        self._newest.append(False)
        if self._since is not None:
            self._wait_s = min(2 * self._wait_s, _MOST_S) if trying else self._wait_s
        elif (failures := self._newest.count(False)) >= _LEAST and 2 * failures > len(self._newest):
            self._since, self._reason = time.monotonic(), reason
            self._count += 1
            self._works.clear()
            self._tell(OutageNotice(self._environment, True, reason, count=self._count))
