"""Outages of environments, as the agents stage tells them on the topic: said on the terminal, summed up at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from stages.agents.hosting import OutageNotice
from stages.ports import Readable

PREFIX = "environment/"


class OutageSummary(Struct, frozen=True):
    """Of one environment in all replicas. Part of `summary.json`."""

    outages: int
    seconds: float  # of the replica that had to wait longest
    reason: str  # of the newest


class OutageWatch:
    """Fed with looks at the topic."""

    def __init__(self) -> None:
        self._newest: dict[str, OutageNotice] = {}  # by replica and environment
        self._since: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def look(self, topic: Readable) -> Iterator[str]:
        """What the user is to be told now."""
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
                yield f"environment {name} works again, after {notice.lasted_s:.0f} s; {replica} goes on"

    def summary(self) -> dict[str, OutageSummary]:
        """By environment, what there was until now."""
        now, found = time.monotonic(), dict[str, OutageSummary]()
        for key, notice in self._newest.items():
            seconds = self._seconds.get(key, 0.0) + (now - self._since[key] if key in self._since else 0.0)
            before = found.get(notice.environment, OutageSummary(0, 0.0, ""))
            count = before.outages + notice.count
            found[notice.environment] = OutageSummary(count, round(max(before.seconds, seconds), 1), notice.reason)
        return found
