"""What the controller asks of the hub of a stream, wherever that is: in its own process, or in a hub process.

What goes between the controller and its hub processes is on the topic, as newest values: where a stream is
(`stream/<shard>`), what the hubs of a process are asked for (`hub/<process>`) and what they tell of themselves
(`hub_facts/<process>`, which the controller alone reads). All of it says how things are and not what to do next, so a
value that is read twice, or by the process that takes the place of another, is right as well. Messages, of which none
may be lost, come over a stream whose hub is in the controller (`UP`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal, Protocol

from msgspec import Struct

from transport import Held, HubStats, StreamSpec

UP: Final = "hubs"
HUB: Final = "hub"  # hub-0, hub-1 ...
KEEPER: Final = "keeper"  # name of the producer that keeps what no other producer keeps
FACTS_PREFIX: Final = "hub_facts/"
LOSSES_TOLD: Final = 256
QUIET_POLL_S: Final = 0.02


class StreamHub(Protocol):
    """Of a whole stream, also where that has several shards (`transport.ports.shards`)."""

    def stats(self) -> HubStats: ...

    def held(self) -> list[Held]:
        """Messages in custody, the oldest of each shard first. Of a hub elsewhere: some of the oldest, as they were a
        moment ago."""

    async def account(self) -> list[Held]:
        """All messages in custody, now."""

    def finish(self) -> None:
        """Nothing more will be sent: consumers get END as soon as everything is settled."""

    def peer_lost(self, replica: str, *, blame: bool = True) -> None:
        """The replica's process is known to be dead."""

    async def wait_empty(self) -> None:
        """Of a hub that was told to finish: wait until nothing is in custody, or may come back into it."""


async def wait_quiet(hubs: Sequence[StreamHub]) -> None:
    """Wait for a moment at which all streams of a loop are empty, so that none of them gets a message any more.

    A message is in the next stream before it leaves the one before, so looks one after the other may miss one that goes
    round. If in two rounds of looks each stream was empty, and accepted nothing between its two, all were empty between
    the rounds.
    """
    before: list[int] = []
    while True:
        empty = [not await hub.account() for hub in hubs]
        accepted = [hub.stats().accepted for hub in hubs]
        if all(empty) and accepted == before:
            return
        before = accepted if all(empty) else []
        await asyncio.sleep(QUIET_POLL_S)


class HubProcessSpec(Struct, frozen=True):
    """What one hub process is. `streams`: the shards that it has. `up`: address of the stream to the controller.
    `incarnation`: of the process; a later one takes the place of hubs whose senders keep what those had."""

    streams: tuple[StreamSpec, ...]
    up: str
    incarnation: int = 0


class Handed(Struct, frozen=True, array_like=True):
    """From a hub to the controller: a dead letter, or a message that no sender keeps any more."""

    kind: Literal["dead", "unkept"]
    stream: str
    key: str
    frames: tuple[bytes, ...]
    header: bytes = b""
    reason: str = ""


class Loss(Struct, frozen=True, array_like=True):
    number: int  # counts all of a run
    stream: str
    replica: str
    blame: bool


class HubCommands(Struct, frozen=True):
    """`asked`: how often the controller has asked for an account of everything."""

    finishing: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()
    asked: int = 0


class HubFacts(Struct, frozen=True):
    """Of one stream, or one shard. `complete`: whether `held` is all that it holds, and all that senders have for it is
    there."""

    stream: str
    epoch: int
    stats: HubStats
    held: tuple[Held, ...] = ()
    complete: bool = False
    ended: bool = False


class ProcessFacts(Struct, frozen=True):
    """Of all hubs of a process. `asked`: the newest command that these facts answer."""

    hubs: tuple[HubFacts, ...]
    asked: int = 0


def stream_key(stream: str) -> str:
    return f"stream/{stream}"


def command_key(process: str) -> str:
    return f"{HUB}/{process}"


def facts_key(process: str) -> str:
    return FACTS_PREFIX + process
