"""The hubs that are in processes of their own, as the controller sees them, and the keeper of what their senders leave.

Invariants: what is asked of a hub is asked of each incarnation of its process until the run ends; the figures of a
stream go on where those of an earlier incarnation ended; a message that a hub hands over is acknowledged when its dead
letter is settled, or the hub has it from the keeper.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from pipeline.hosts.stream_hub import (
    KEEPER,
    LOSSES_TOLD,
    UP,
    Handed,
    HubCommands,
    HubFacts,
    Loss,
    ProcessFacts,
    StreamHub,
    command_key,
    facts_key,
)
from pipeline.hosts.stream_ports import StreamPorts
from stages.ports import read_value
from transport import DeadLetter, Held, HubStats, Inlet, Node, Outlet, StreamSpec, TopicServer
from transport.ports.shards import stream_of

NOTHING: Final = HubStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
COUNTERS: Final = ("accepted", "delivered", "redelivered", "duplicates", "dead_letters", "settled", "malformed")
MESSAGES: Final = ("queued", "leased", "bytes_queued")
PEERS: Final = ("producers", "consumers")
WINDOW: Final = 64  # messages that are handed over at a time


class Commands:
    """What the controller asks of the hubs of one process."""

    def __init__(self, process: str, topic: TopicServer) -> None:
        self.process, self.topic = process, topic
        self._finishing: list[str] = []
        self._losses: deque[Loss] = deque(maxlen=LOSSES_TOLD)
        self._number = self.asked = 0

    def finish(self, stream: str) -> None:
        if stream not in self._finishing:
            self._finishing.append(stream)
            self._publish()

    def lost(self, stream: str, replica: str, blame: bool) -> None:
        self._number += 1
        self._losses.append(Loss(self._number, stream, replica, blame))
        self._publish()

    def ask(self) -> int:
        self.asked += 1
        self._publish()
        return self.asked

    def _publish(self) -> None:
        commands = HubCommands(tuple(self._finishing), tuple(self._losses), self.asked)
        self.topic.publish(command_key(self.process), msgspec.msgpack.encode(commands))


class RemoteHub:
    """Implements `StreamHub`, for a stream or one shard of it."""

    def __init__(self, stream: str, commands: Commands) -> None:
        self.stream, self._commands, self._topic = stream, commands, commands.topic
        self._facts: HubFacts | None = None
        self._before = NOTHING  # counters of earlier incarnations

    def stats(self) -> HubStats:
        facts = self._look()[0]
        if facts is None:
            return self._before
        return _sum(facts.stats, self._before)

    def held(self) -> list[Held]:
        facts = self._look()[0]
        return [] if facts is None else list(facts.held)

    async def account(self) -> list[Held]:
        """Waits for facts that are newer than the question; also until a process that died is back."""
        number, revision = self._commands.ask(), 0
        while True:
            facts, asked = self._look()
            if facts is not None and asked >= number and facts.complete:
                return list(facts.held)
            revision = await self._topic.wait(revision, facts_key(self._commands.process))

    def finish(self) -> None:
        self._commands.finish(self.stream)

    def peer_lost(self, replica: str, *, blame: bool = True) -> None:
        self._commands.lost(self.stream, replica, blame)

    async def wait_empty(self) -> None:
        """Waits for facts that say so."""
        revision = 0
        while (facts := self._look()[0]) is None or not facts.ended:
            revision = await self._topic.wait(revision, facts_key(self._commands.process))

    def _look(self) -> tuple[HubFacts | None, int]:
        """The newest facts, and the question that they answer."""
        told = read_value(self._topic, facts_key(self._commands.process), ProcessFacts)
        facts = next((hub for hub in told.hubs if hub.stream == self.stream), None) if told is not None else None
        if facts is not None:
            if self._facts is not None and self._facts.epoch != facts.epoch:
                self._before = replace(_sum(self._facts.stats, self._before), **_NOW)
            self._facts = facts
        return self._facts, told.asked if told is not None else 0


class ShardedHub:
    """Implements `StreamHub` over those of a stream's shards."""

    def __init__(self, shards: Sequence[StreamHub]) -> None:
        self._shards = tuple(shards)

    def stats(self) -> HubStats:
        """Of all together; who sends and takes is connected to each."""
        found = [shard.stats() for shard in self._shards]
        sums = {name: sum(getattr(stats, name) for stats in found) for name in (*COUNTERS, *MESSAGES)}
        most = {name: max(getattr(stats, name) for stats in found) for name in PEERS}
        return HubStats(**sums, **most)

    def held(self) -> list[Held]:
        return [held for shard in self._shards for held in shard.held()]

    async def account(self) -> list[Held]:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_account(shard)) for shard in self._shards]
        return [held for task in asked for held in task.result()]

    def finish(self) -> None:
        for shard in self._shards:
            shard.finish()

    def peer_lost(self, replica: str, *, blame: bool = True) -> None:
        for shard in self._shards:
            shard.peer_lost(replica, blame=blame)

    async def wait_empty(self) -> None:
        for shard in self._shards:
            await shard.wait_empty()


async def _account(hub: StreamHub) -> list[Held]:
    return await hub.account()


_NOW: Final[Mapping[str, int]] = dict.fromkeys((*MESSAGES, *PEERS), 0)


def _sum(stats: HubStats, before: HubStats) -> HubStats:
    return replace(stats, **{name: getattr(stats, name) + getattr(before, name) for name in COUNTERS})


class Keeper:
    """Takes what hubs hand over. `dead_letter`: settles a group; `schemas`: of the streams."""

    def __init__(
        self, node: Node, topic: TopicServer, schemas: Mapping[str, Any], dead_letter: Callable[[DeadLetter], None]
    ) -> None:
        self._node, self._schemas, self._dead_letter = node, schemas, dead_letter
        self._outlets: dict[str, Outlet[Any]] = {}  # by shard
        self._ports = StreamPorts(node, topic, f"{KEEPER}-0")
        self._opening = asyncio.Lock()
        self.address = ""

    async def open(self, address: str, streams: Sequence[StreamSpec]) -> None:
        most = max(spec.max_message_bytes for spec in streams) + (1 << 20)
        spec = StreamSpec(
            UP, address, max_message_bytes=most, dedup_keys=False, producers=frozenset({"hub"}),
            consumers=frozenset({KEEPER}), lease_s=3600.0,
        )  # fmt: skip
        hub = await self._node.hub(spec, self._dead_letter)
        self.address = hub.address

    async def run(self) -> None:
        """Waits for what hubs hand over; runs until cancelled."""
        inlet: Inlet[Handed] = await self._node.inlet(
            self.address, UP, Handed, window_items=WINDOW, window_bytes=1 << 60, replica=f"{KEEPER}-0"
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ports.follow())
            while (lease := await inlet.receive()) is not None:
                tasks.create_task(self._take(lease.message, lease.done))

    async def _take(self, handed: Handed, done: Callable[[], None]) -> None:
        if handed.kind == "dead":
            body = b"".join(handed.frames)
            stream = stream_of(handed.stream)
            self._dead_letter(DeadLetter(stream, handed.key, handed.header, body, handed.reason))
        else:
            outlet = await self._outlet(handed.stream)
            await outlet.forward(handed.frames, handed.key)
        done()

    async def _outlet(self, shard: str) -> Outlet[Any]:
        async with self._opening:
            if shard not in self._outlets:
                self._outlets[shard] = await self._ports.shard_outlet(shard, self._schemas[stream_of(shard)])
            return self._outlets[shard]
