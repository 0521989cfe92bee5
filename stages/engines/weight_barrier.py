"""Waiting for weights to land: the trainer before it overwrites a slot, an engine before it stands still."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from stages.engine_entries import KEYS, POLICY, carrying, entries
from stages.messages import EngineEntry, WeightsAnnouncement
from stages.ports import Topic

log = logging.getLogger("sluice.train")

LANDING_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 10.0  # how long an engine waits for the ones before it that have not begun
TURN_LIMIT_S = 600.0  # and for ones that are at it


async def await_landing(
    topic: Topic, *, version: int, pinned: int, given_up: Callable[[], bool], newest: int | None = None
) -> None:
    """Waits until no engine reads the slot that `version` takes, and `pinned` has landed everywhere.

    `newest` is the version in the other slot, which may still be read (default: the one before `version`).
    Unblocked by the engines' entries in the directory, by the death of an engine (its entry counts no more), by
    `given_up` within a second, or by a time limit: then the digest of the slot is what protects a reader.
    """
    deadline = time.monotonic() + LANDING_TIMEOUT_S
    revision = 0
    kept = version - 1 if newest is None else newest
    while time.monotonic() < deadline and not given_up():
        # An engine that loads its first weights reads a slot like any other, but no evaluation waits for it.
        read = all(entry.fetching < 0 or entry.fetching >= kept for entry in entries(topic, POLICY).values())
        if read and all(entry.version >= pinned for entry in carrying(topic).values()):
            return
        with contextlib.suppress(TimeoutError):  # the loop looks again
            async with asyncio.timeout(1.0):
                revision = await topic.wait(revision, *KEYS)
    if not given_up():
        log.warning(
            "the slot before version %d is overwritten although an engine has not applied version %d", kept, pinned
        )


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
    return (entry.epoch, entry.version) < (announcement.epoch, announcement.version)
