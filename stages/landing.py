"""Before weights are overwritten or replaced: waiting until the engines are done with what is there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from stages.messages import Applied
from stages.ports import Topic

log = logging.getLogger("sluice.train")

LANDING_TIMEOUT_S = 60.0


async def await_landing(topic: Topic, *, version: int, pinned: int, given_up: Callable[[], bool]) -> None:
    """Waits until no engine reads the slot that `version` takes, and `pinned` has landed everywhere.

    Unblocked by the engines' `applied/` reports, by the death of an engine (its key is dropped), by `given_up` within a
    second, or by a time limit: then the digest of the slot is what protects a reader.
    """
    deadline = time.monotonic() + LANDING_TIMEOUT_S
    revision = 0
    while time.monotonic() < deadline and not given_up():
        applied = [msgspec.msgpack.decode(v, type=Applied) for v in topic.items("applied/").values()]
        read = all(a.fetching < 0 or a.fetching >= version - 1 for a in applied)
        if read and all(a.version >= pinned for a in applied):
            return
        with contextlib.suppress(TimeoutError):  # the loop looks again
            async with asyncio.timeout(1.0):
                revision = await topic.wait(revision)
    if not given_up():
        log.warning("version %d is overwritten although an engine has not applied version %d", version - 2, pinned)
