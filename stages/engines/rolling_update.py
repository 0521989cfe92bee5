"""The order in which engines take new weights: by name, `--update-weight-rolling` at a time; the others serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from stages.engine_entries import KEYS, carrying
from stages.messages import EngineEntry, WeightsAnnouncement
from stages.ports import Topic

log = logging.getLogger("sluice.engines")

TURN_TIMEOUT_S = 10.0  # how long an engine waits for the ones before it that have not begun
TURN_LIMIT_S = 600.0  # and for ones that are at it


async def await_turn(topic: Topic, engine: str, announcement: WeightsAnnouncement, rolling: int) -> None:
    """Waits until fewer than `rolling` of the engines before this one, by name, still lack the version.

    So at most `rolling` engines stand still at once: of those at it, the last by name has all others before it.
    Unblocked by their entries, by their death (an entry then counts no more), or by a time limit, so that an engine
    that cannot be updated does not hold up the rest; the limit is short while none of them is at it.
    """
    started, revision = time.monotonic(), 0
    idle_since = started
    while True:
        now = time.monotonic()
        lacking = [e for name, e in carrying(topic).items() if name < engine and _older(e, announcement)]
        if len(lacking) < rolling:
            return
        if any(entry.fetching >= 0 for entry in lacking):
            idle_since = now
        if now - idle_since > TURN_TIMEOUT_S or now - started > TURN_LIMIT_S:
            names = ", ".join(entry.engine for entry in lacking)
            log.warning("%s takes version %d before its turn: %s lack it", engine, announcement.version, names)
            return
        with contextlib.suppress(TimeoutError):  # the loop looks again
            async with asyncio.timeout(1.0):
                revision = await topic.wait(revision, *KEYS)


def _older(entry: EngineEntry, announcement: WeightsAnnouncement) -> bool:
    return (entry.run_generation, entry.version) < (announcement.run_generation, announcement.version)
