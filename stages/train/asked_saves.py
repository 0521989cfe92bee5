"""Checkpoints that the user asks for while the run goes on: the topic `save` holds the number of the newest request."""

from __future__ import annotations

from typing import Final

from stages.ports import Readable

SAVE: Final = "save"


class AskedSaves:
    """Tells, after a step, whether a checkpoint was asked for since the last one."""

    def __init__(self) -> None:
        self._seen: bytes | None = None

    def due(self, topic: Readable) -> bool:
        """Whether one is due now; each request counts once."""
        newest = topic.get(SAVE)
        due, self._seen = newest != self._seen, newest
        return due
