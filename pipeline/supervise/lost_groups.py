"""Groups that nobody has any more: a hub process died together with the only sender that kept a part of them.

A stage releases what it took only after what became of it is in the next hub's custody, so all members of a group that
was handed to the first hub are in some hub until it ends, but for what a hub that has just come back has yet to get,
and what consumers have from before, which they claim. Some time after such a return, when consumers claim no longer
what they have finished, the hubs are asked several times; a group of which a member was in none of them each time is
settled as failed.

Invariant: a group is failed only after all hubs were complete in every round. Should its members come after all, they
are dropped, as those of a group with a dead letter are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from pipeline.hosts.stream_hub import StreamHub, stream_key
from stages.messages import group_of
from stages.ports import Outlet
from transport import DeadLetter, TopicServer

ROUNDS: Final = 4
SETTLED_S: Final = 45.0  # a lease, for which consumers claim what they have finished, and beats
PAUSE_S: Final = 2.0  # a message that changes hubs is between them for milliseconds
REASON: Final = "a hub process died together with the only sender that kept a part of this group"


class Sent:
    """The outlet of the prompt stage, with the ids of the groups that its hub has accepted. A resumed run has open
    groups that were not sent yet, and others that only the trainer has."""

    def __init__(self, outlet: Outlet[Any]) -> None:
        self._outlet = outlet
        self.groups: set[int] = set()

    async def send(self, message: Any, key: str) -> None:
        await self._outlet.send(message, key)
        _, group = group_of(key)
        if group is not None:
            self.groups.add(group)


class LostGroups:
    """`open_groups`: ids of those in the ledger that were sent; `dead_letter`: settles a group as failed."""

    def __init__(
        self,
        hubs: Mapping[str, StreamHub],
        topic: TopicServer,
        members: int,
        open_groups: Callable[[], Collection[int]],
        dead_letter: Callable[[DeadLetter], None],
        pause_s: float = PAUSE_S,
        settled_s: float = SETTLED_S,
    ) -> None:
        self._hubs, self._topic, self._members = hubs, topic, members
        self._open_groups, self._dead_letter, self._pause_s = open_groups, dead_letter, pause_s
        self._settled_s = settled_s

    async def run(self) -> None:
        """Waits for hub processes that come up, and looks when none has for a while; runs until cancelled."""
        revision = 0
        while True:
            revision = await self._topic.wait(revision, stream_key(""))
            with contextlib.suppress(TimeoutError):  # no other came up
                while True:
                    async with asyncio.timeout(self._settled_s):
                        revision = await self._topic.wait(revision, stream_key(""))
            for group in await self.look():
                self._dead_letter(DeadLetter("hubs", str(group), b"", b"", REASON))

    async def look(self) -> set[int]:
        """Groups of which a part was nowhere in each round."""
        lost = set(self._open_groups())
        for number in range(ROUNDS):
            if number:
                await asyncio.sleep(self._pause_s)
            still_open = set(self._open_groups())
            held = [held.key for hub in self._hubs.values() for held in await hub.account()]
            lost &= still_open & incomplete(still_open, held, self._members)
            if not lost:
                break
        return lost & set(self._open_groups())


def incomplete(groups: Iterable[int], keys: Iterable[str], members: int) -> set[int]:
    """Groups of which no key names one of the members. A key without members (a prompt, a whole group, a report of its
    end) stands for all of them."""
    found: dict[int, set[str]] = {}
    for key in keys:
        _, group = group_of(key)
        if group is not None:
            named = key.split("/")[1:2]
            indices = {name.partition(".")[0] for name in named[0].split(",")} if named else everybody(members)
            found.setdefault(group, set()).update(indices)
    return {group for group in groups if len(found.get(group, ())) < members}


def everybody(members: int) -> set[str]:
    return {str(index) for index in range(members)}
