"""Lines for the user about a run that stands still, and about environments that are down. No I/O, no clock.

A run stands still while no group ends and no batch is trained. That may be right (a batch takes long on slow hardware),
so it is reported each minute and kept for the summary. `limit_s` is another clock: it runs while no message moves
between the stages either, and ends the run.

Outages of environments come from the agents stage over the topic; they are reported, and summed up at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final

import msgspec
from msgspec import Struct

from stages.agents.hosting import OutageNotice
from stages.ports import Readable

MOST_KEPT: Final = 100  # stalls in the summary; the longest


class Stall(Struct, frozen=True):
    """A time in which nothing was trained. Part of `summary.json`."""

    began_s: float  # after the start of the reinforcement learning
    seconds: float
    waits: str  # what waited for what, by the newest report


class StallWatch:
    """Fed with looks at the run, a few per second.

    Args:
        notice_s: after how long a stall is reported, and the interval of further reports.
        limit_s: after how long without any message between stages `over` is set.
        started_s: when the run began, by the clock of the looks.
    """

    def __init__(self, notice_s: float, limit_s: float, started_s: float) -> None:
        self.notice_s, self.limit_s = notice_s, limit_s
        self.over: str | None = None  # why the run is to be ended
        self._started_s = self._since_s = self._moved_s = started_s
        self._done: Hashable = None
        self._moved: Hashable = None
        self._reports = 0  # of this stall
        self._waits = ""
        self._past: list[Stall] = []

    def look(self, now_s: float, done: Hashable, moved: Hashable, waits: Callable[[float], str]) -> str | None:
        """The line for the user now, if any.

        `done`: changes with each end of a group and each batch. `moved`: with each message between stages. `waits`:
        makes the sentence from the seconds since the last progress.
        """
        if done != self._done:
            line = f"there is progress again, after {now_s - self._since_s:.0f} s" if self._reports else None
            self._close(now_s)
            self._done, self._moved = done, moved
            self._since_s = self._moved_s = now_s
            return line
        if moved != self._moved:
            self._moved, self._moved_s = moved, now_s
        quiet_s = now_s - self._since_s
        if self.over is None and now_s - self._moved_s > self.limit_s:
            self.over = f"nothing has moved for --stall-limit-s {self.limit_s:g}: {waits(quiet_s)}"
        if quiet_s < (self._reports + 1) * self.notice_s:
            return None
        self._reports = int(quiet_s // self.notice_s)
        self._waits = waits(quiet_s)
        return f"nothing was trained for {quiet_s:.0f} s: {self._waits}"

    @property
    def waits(self) -> str:
        """The newest report, if nothing was trained since."""
        return self._waits if self._reports else ""

    def stalls(self, now_s: float) -> tuple[Stall, ...]:
        """All reported stalls in their order, the present stall included."""
        self._close(now_s)
        return tuple(self._past)

    def _close(self, now_s: float) -> None:
        if not self._reports:
            return
        seconds = round(now_s - self._since_s, 1)
        self._past.append(Stall(round(self._since_s - self._started_s, 1), seconds, self._waits))
        self._reports = 0
        if len(self._past) > MOST_KEPT:
            self._past.remove(min(self._past, key=lambda stall: stall.seconds))


PREFIX = "environment/"


class OutageSummary(Struct, frozen=True):
    """Of one environment in all replicas. Part of `summary.json`."""

    outages: int
    seconds: float  # of the replica that waited longest
    reason: str  # of the newest


class OutageWatch:
    """Fed with looks at the topic."""

    def __init__(self) -> None:
        self._newest: dict[str, OutageNotice] = {}  # by replica and environment
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def look(self, topic: Readable) -> Iterator[str]:
        """The lines for the user now."""
        for key, value in topic.items(PREFIX).items():
            notice = msgspec.msgpack.decode(value, type=OutageNotice)
            if notice == self._newest.get(key):
                continue
            self._newest[key] = notice
            name, replica = notice.environment, key.rpartition("/")[2]
            if notice.out:
                self._since[key] = time.monotonic()
                yield (
                    f"environment {name} is out of order ({notice.reason}): {replica} pauses its episodes, and tries "
                    "again after growing waits"
                )
            else:
                self._since.pop(key, None)
                self._seconds[key] = self._seconds.get(key, 0.0) + notice.lasted_s
                yield f"environment {name} works again, after {notice.lasted_s:.0f} s; {replica} continues"

    def summary(self) -> dict[str, OutageSummary]:
        """The outages until now, by environment."""
        now, summaries = time.monotonic(), dict[str, OutageSummary]()
        for key, notice in self._newest.items():
            seconds = self._seconds.get(key, 0.0) + (now - self._since[key] if key in self._since else 0.0)
            before = summaries.get(notice.environment, OutageSummary(0, 0.0, ""))
            count = before.outages + notice.count
            summaries[notice.environment] = OutageSummary(count, round(max(before.seconds, seconds), 1), notice.reason)
        return summaries
