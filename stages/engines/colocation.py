"""Trainer and engines that share their devices in turns; the topic names the current owner.

A synchronous run generates a batch, trains it, publishes, generates again; the two never compute at the same time. With
`--colocate` they do not hold memory at the same time either:

1. The batch is complete. The trainer publishes `device` = (train, turn) and waits.
2. The engines stage waits for an evaluation that holds an engine's version, pauses the engine (requests in flight
   return what they have), waits until nothing runs, releases cache and weights, and reports `device/<engine>`.
3. All engines on the topic have reported: the trainer moves its own state back to the device and trains.
4. New weights lie in a slot and are announced: the trainer moves its state to the host, and publishes `device` =
   (engine, turn).
5. The engines stage restores the memory of the weights, updates, restores the cache, and resumes the engine.

At a drain engines release their memory for good, so that the trainer can save.

Invariants:
- the trainer computes only while every engine with an address has released its memory in this same turn: memory that
  was released in an earlier turn may be in use again;
- an engine that released its memory generates nothing before it has new weights;
- an engine that starts in the trainer's turn releases its memory before it gets weights;
- memory that was released in a drain is not taken again, so that its report counts in every later turn;
- released memory is reported with the engine's incarnation, so that a restarted engines stage knows it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from configs.schema import Config, generates
from models.engines.client import EngineClient
from models.engines.core import MemoryTag
from models.errors import EngineUnreachable
from stages.ports import Topic, read_value, wait_at_most, wait_until
from stages.topic_values import ADDRESS, POLICY, addresses

log = logging.getLogger("sluice.colocation")

KEY: Final = "device"
GIVEN_BACK: Final[tuple[MemoryTag, ...]] = ("kv_cache", "weights")
IDLE_LIMIT_S = 30.0  # for a paused engine to finish its running requests
IDLE_POLL_S = 0.05
PATIENCE_S = 30.0  # between two log lines of the trainer about engines that it waits for


class Device(Struct, frozen=True):
    """Topic value `device`: whose turn it is; `turn` rises with each change."""

    owner: Literal["train", "engine"]
    turn: int


class EngineMemory(Struct, frozen=True):
    """Topic value `device/<engine>`: the memory that one incarnation of an engine has released."""

    engine: str
    incarnation: int
    turn: int  # of this report
    away: tuple[MemoryTag, ...]

    def empty(self, incarnation: int, turn: int) -> bool:
        """True if this incarnation of the engine holds nothing in this turn."""
        return (self.incarnation, self.turn) == (incarnation, turn) and set(self.away) == set(GIVEN_BACK)


def colocated(config: Config) -> bool:
    """Whether trainer and engines of this run take turns."""
    return config.asynchrony.colocate and generates(config) and not config.sglang.rollout_external_engine_addrs


def holder(topic: Topic) -> Device:
    """Whose turn it is; without a value on the topic, the engines'."""
    return read_value(topic, KEY, Device) or Device("engine", 0)


def trainers_turn(topic: Topic) -> bool:
    """True while the devices are the trainer's."""
    return holder(topic).owner == "train"


class MemoryKeeper:
    """Tracks the memory that one engine has released."""

    def __init__(self, engine: str, *, shared: bool) -> None:
        """`shared`: whether its device is also the trainer's."""
        self.engine, self.shared = engine, shared
        self.away: tuple[MemoryTag, ...] = ()
        self._incarnation = -1
        self._turn = -1  # of the last report

    def attach(self, topic: Topic, incarnation: int) -> None:
        """Attach to an engine; memory released under an earlier process of the engines stage stays known."""
        self._incarnation = incarnation
        report = read_value(topic, f"{KEY}/{self.engine}", EngineMemory)
        mine = report is not None and report.incarnation == incarnation
        self.away, self._turn = (report.away, report.turn) if report is not None and mine else ((), -1)

    def due(self, topic: Topic) -> bool:
        """Whether memory must be released now, or reported as released in this turn."""
        device, there = holder(topic), set(self.away) != set(GIVEN_BACK)
        if self.shared and topic.get("drain") is not None:  # no weights come any more
            return there
        return device.owner == "train" and (device.turn != self._turn or there)

    async def give_back(self, topic: Topic, client: EngineClient) -> None:
        """Pause the engine, wait until it is idle, release, report. Raises EngineError; may be called again."""
        turn, there = holder(topic).turn, [tag for tag in GIVEN_BACK if tag not in self.away]
        if there:
            await client.pause("abort")
            # SGLang's scheduler exits if it must release memory in use. Requests in its queue do not count: they came
            # after the pause, and stay.
            deadline = time.monotonic() + IDLE_LIMIT_S
            while running := sum(load.num_running_reqs for load in await client.loads()):
                if time.monotonic() > deadline:
                    raise EngineUnreachable(client.base_url, f"{running} requests run {IDLE_LIMIT_S:g} s after a pause")
                await asyncio.sleep(IDLE_POLL_S)
            await client.release_memory(there)
        await self._report(topic, turn, GIVEN_BACK)

    async def take(self, topic: Topic, client: EngineClient, tag: MemoryTag) -> None:
        """Restore one kind of memory, if it is released. Raises EngineError."""
        if tag in self.away:
            await client.resume_memory((tag,))
            await self._report(topic, self._turn, tuple(kind for kind in self.away if kind != tag))

    async def _report(self, topic: Topic, turn: int, away: tuple[MemoryTag, ...]) -> None:
        self.away, self._turn = away, turn
        report = EngineMemory(self.engine, self._incarnation, turn, away)
        await topic.publish(f"{KEY}/{self.engine}", msgspec.msgpack.encode(report))


async def all_given_back(topic: Topic, limit_s: float) -> None:
    """At a drain: wait until every engine has released its memory, or is lost; at most `limit_s`."""
    await wait_until(topic, lambda: not _holding(topic, None), ADDRESS, f"{KEY}/", limit_s=limit_s)


def _holding(topic: Topic, turn: int | None) -> list[str]:
    """Engines that hold memory in this turn. None: in the drain, when any turn's report counts."""
    found = []
    # By address, not by entry: one that has just come up holds memory before anything else is known of it.
    for address in addresses(topic, POLICY).values():
        report = read_value(topic, f"{KEY}/{address.engine}", EngineMemory)
        if report is None or not report.empty(address.incarnation, report.turn if turn is None else turn):
            found.append(address.engine)
    return found


InTorch = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a blocking function in the thread of torch


class TrainerTurn:
    """The trainer's side. Without `--colocate` both calls do nothing.

    If the backend has methods `onload()` and `offload()`, they are called in the thread of torch: after the trainer's
    turn begins, and before it ends. While it is offloaded the backend cannot save its state.
    """

    def __init__(self, config: Config, topic: Topic, in_torch: InTorch, backend: object) -> None:
        self.on = colocated(config)
        self.topic, self.backend = topic, backend
        self._in_torch = in_torch
        self._loaded = True
        self._turn = 0

    async def acquire(self) -> None:
        """Take the devices: call it when the batch is complete, before anything is computed.

        Waits until every engine with an address has released its memory; unblocked by the reports, or by the loss
        of an engine. There is no time limit: without the memory the step would fail.
        """
        if not self.on:
            return
        await self._publish("train")
        started = logged = time.monotonic()
        revision = 0
        while missing := _holding(self.topic, None if self.topic.get("drain") is not None else self._turn):
            now = time.monotonic()
            if now - logged > PATIENCE_S:
                logged = now
                log.warning("waiting since %.0f s for the memory of %s", now - started, ", ".join(missing))
            revision = await wait_at_most(1.0, self.topic.wait(revision, ADDRESS, f"{KEY}/")) or revision
        if not self._loaded:
            await self._hook("onload")
            self._loaded = True

    async def release(self) -> None:
        """Give the devices to the engines: call it when new weights lie in their slot and are announced, so that no
        engine takes older ones first."""
        if not self.on:
            return
        if self._loaded:
            await self._hook("offload")
            self._loaded = False
        await self._publish("engine")

    async def _publish(self, owner: Literal["train", "engine"]) -> None:
        """Also over what a trainer that was lost in its turn had left there."""
        self._turn = max(self._turn, holder(self.topic).turn) + 1  # what is here may be older than what was sent
        await self.topic.publish(KEY, msgspec.msgpack.encode(Device(owner, self._turn)))

    async def _hook(self, name: str) -> None:
        method = getattr(self.backend, name, None)
        if method is not None:
            await self._in_torch(method)
