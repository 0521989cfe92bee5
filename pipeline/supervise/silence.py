"""Ends a process that hangs: one of ours that tells its figures again and again, and has told none for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from pipeline.hosts.launcher import Handle
from transport import TopicServer

log = logging.getLogger("sluice.controller")

HANG_S: Final = 60.0  # longer than it takes to start on a machine that is busy


async def end_if_silent(topic: TopicServer, key: str, name: str, handle: Handle) -> None:
    """Waits for news of a key of the topic, as long as they come at least each `HANG_S`; then for the end of the
    process, which it kills."""
    revision = topic.revision
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(HANG_S):
                revision = await topic.wait(revision, key)
    log.warning("%s has told nothing for %g s, it is ended", name, HANG_S)
    await handle.kill()
