"""Does an engine carry what it was given? Asked after every update, before it goes on.

Invariants: an engine is admitted at a version only if it names that version itself and, where checksums are compared,
if its tensors have the checksum that other engines reported for the same version.
"""

from __future__ import annotations

import asyncio

from models.engines.client import EngineClient
from models.errors import NotVerified
from stages.engine_entries import carrying
from stages.messages import WeightsAnnouncement
from stages.ports import Topic

LABEL_TRIES = 10
LABEL_WAIT_S = 0.1


class ChecksumDiffers(NotVerified):
    """Two engines at one version hold different tensors."""


async def check_label(engine: str, client: EngineClient, label: str) -> None:
    """Raise NotVerified unless the engine names these weights. Asks again a few times: the answer comes from another
    process of the server than the one that loaded them."""
    named: str | None = None
    for attempt in range(LABEL_TRIES):
        if attempt:
            await asyncio.sleep(LABEL_WAIT_S)
        named = (await client.model_info()).weight_version
        if named == label:
            return
    raise NotVerified(
        f"{engine} reports weights {named!r} after an update to {label!r}; it stays paused until it names them: was it "
        "updated by someone else?"
    )


def check_equal(topic: Topic, engine: str, announcement: WeightsAnnouncement, checksum: str) -> None:
    """Raise ChecksumDiffers if another engine reported another checksum for the same version."""
    for other in carrying(topic).values():
        same = (other.run_generation, other.version) == (announcement.run_generation, announcement.version)
        if same and other.engine != engine and other.checksum and other.checksum != checksum:
            raise ChecksumDiffers(
                f"{engine} has checksum {checksum} at version {announcement.version}, {other.engine} reported "
                f"{other.checksum}; it gets no requests until they agree, and is now loaded in full. Engines that "
                "differ by design (other tensor-parallel size, other precision) need --no-check-weight-update-equal"
            )
