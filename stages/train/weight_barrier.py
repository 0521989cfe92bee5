"""The trainer's wait before it overwrites a slot: until no engine reads it, and what is pinned has landed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from stages.ports import Topic
from stages.topic_values import KEYS, POLICY, carrying, entries

log = logging.getLogger("sluice.train")

LANDING_TIMEOUT_S = 60.0


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
