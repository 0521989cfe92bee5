"""What becomes of a group when one of its messages is a dead letter: a message that nobody could process.

The ledger settles the group as failed, with the reason, and the topic says so under `dead`: the stage that holds the
other members drops them, for the group will never be whole.

Invariant: a group is settled before its members are dropped, so it is never lost silently.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pipeline.facts.text import visible
from pipeline.record.recorder import Recorder
from stages.messages import Settled, group_of
from transport import DeadLetter, TopicServer

log = logging.getLogger("sluice.controller")
REMEMBERED: Final = 1000  # on the topic, for a group stage that is started again: its members come a second time
DETAIL_LIMIT: Final = 300


class DeadLetters:
    """What hubs call with their dead letters. `close_groups` settles groups in the ledger."""

    def __init__(
        self, topic: TopicServer, recorder: Recorder, close_groups: Callable[[Sequence[Settled]], None]
    ) -> None:
        self._topic, self._recorder, self._close_groups = topic, recorder, close_groups
        self._groups: deque[str] = deque(maxlen=REMEMBERED)

    def __call__(self, letter: DeadLetter) -> None:
        log.error("dead letter in stream %s, key %s: %s", letter.stream, visible(letter.key), visible(letter.reason))
        self._recorder.dead_letter(letter.stream, letter.key, letter.reason)
        group, counted = group_of(letter.key)
        if counted is not None:
            detail = f"{letter.stream}: {letter.reason}"[:DETAIL_LIMIT]
            self._close_groups([Settled(counted, "failed", detail)])
        if group:
            self._groups.append(group)
            self._topic.publish("dead", msgspec.msgpack.encode(tuple(self._groups)))
