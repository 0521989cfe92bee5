"""When a run stands still, and what it waits for then: told on the terminal each minute, kept for the summary, ended by
a bound. Pure: times come with the calls.

A run stands still while no group reaches its end and no batch is trained. That may be right (a batch takes long on the
hardware that there is), so it is told and nothing else. `limit_s` is another clock: it runs while nothing moves between
the stages either, and its end is the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from msgspec import Struct

MOST_KEPT: Final = 100  # stalls in the summary; the longest


class Stall(Struct, frozen=True):
    """A time in which nothing was trained. Part of `summary.json`."""

    began_s: float  # after the start of the reinforcement learning
    seconds: float
    waits: str  # what waited for what, when it was told last


class StallWatch:
    """Fed with looks at the run, a few per second.

    Args:
        notice_s: after how long a stall is told, and how long until it is told again.
        limit_s: after how long without any movement `over` is set.
        started_s: when the run began, by the clock of the looks.
    """

    def __init__(self, notice_s: float, limit_s: float, started_s: float) -> None:
        self.notice_s, self.limit_s = notice_s, limit_s
        self.over: str | None = None  # why the run is to be ended
        self._started_s = self._since_s = self._moved_s = started_s
        self._done: Hashable = None
        self._moved: Hashable = None
        self._told = 0  # how often, of this stall
        self._waits = ""
        self._past: list[Stall] = []

    def look(self, now_s: float, done: Hashable, moved: Hashable, waits: Callable[[float], str]) -> str | None:
        """What the user is to be told now, if anything.

        `done`: changes with each end of a group and each batch. `moved`: with each message between stages. `waits`: is
        asked for the sentence, given the seconds since the last progress.
        """
        if done != self._done:
            said = f"it goes on, after {now_s - self._since_s:.0f} s" if self._told else None
            self._close(now_s)
            self._done, self._moved = done, moved
            self._since_s = self._moved_s = now_s
            return said
        if moved != self._moved:
            self._moved, self._moved_s = moved, now_s
        quiet_s = now_s - self._since_s
        if self.over is None and now_s - self._moved_s > self.limit_s:
            self.over = f"nothing has moved for --stall-limit-s {self.limit_s:g}: {waits(quiet_s)}"
        if quiet_s < (self._told + 1) * self.notice_s:
            return None
        self._told = int(quiet_s // self.notice_s)
        self._waits = waits(quiet_s)
        return f"nothing was trained for {quiet_s:.0f} s: {self._waits}"

    def stalls(self, now_s: float) -> tuple[Stall, ...]:
        """All that were told, in their order; one that lasts until now is among them."""
        self._close(now_s)
        return tuple(self._past)

    def _close(self, now_s: float) -> None:
        if not self._told:
            return
        seconds = round(now_s - self._since_s, 1)
        self._past.append(Stall(round(self._since_s - self._started_s, 1), seconds, self._waits))
        self._told = 0
        if len(self._past) > MOST_KEPT:
            self._past.remove(min(self._past, key=lambda stall: stall.seconds))
