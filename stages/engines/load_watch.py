"""Looks at the engines' loads: how long they have computed, and how many samples may be in flight at each.

The limit is one number for all clients together and travels in the engine's directory entry; clients divide it.

Invariant: an engine that is being updated is not judged; its queue grows because it stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

from configs.schema import Config
from models.engines.errors import EngineError
from models.engines.protocol import Load
from stages.base import Activity
from stages.engine_entries import IDLE, POLICY, RETRACTED, RUNNING, WAITING
from stages.engines.concurrency_limit import CALM_USAGE, Limit, Reading
from stages.engines.engine_control import EngineControl
from stages.engines.idle_time import IdleMeter
from stages.ports import Topic

LOADS_INTERVAL_S = 2.0


class LoadWatch:
    """The loads of `engines`, which is looked at afresh each time."""

    def __init__(self, config: Config, engines: Mapping[str, EngineControl], activity: Activity) -> None:
        self.engines, self.activity = engines, activity
        self.adaptive = config.rollout.adaptive_concurrency
        # Pausing retracts in this mode: a retraction then says nothing about room.
        self.heeds_retractions = config.engine.pause_generation_mode != "retract"
        self.most = config.rollout.server_concurrency
        self.limits: dict[str, Limit] = {}
        self._retracted = 0
        self._busy_s: dict[str, float] = {}
        self._idle: dict[str, IdleMeter] = {}

    async def run(self, topic: Topic) -> None:
        """Waits for the clock; runs until cancelled."""
        while True:
            await asyncio.sleep(LOADS_INTERVAL_S)
            await self.look(topic)

    async def look(self, topic: Topic) -> None:
        """Ask every engine once, and publish the limits that changed."""
        retractions = self._retractions(topic)
        async with asyncio.TaskGroup() as tasks:
            for control in self.engines.values():
                if control.entry.policy == POLICY:
                    tasks.create_task(self._ask(topic, control, retractions if self.heeds_retractions else 0))
        extra = self.activity.extra
        extra["engine_busy_s"] = max(sum(self._busy_s.values()), extra.get("engine_busy_s", 0.0))
        extra["in_flight_limit"] = float(sum(limit.value for limit in self.limits.values()))
        extra["limit_cuts"] = float(sum(limit.cuts for limit in self.limits.values()))

    def _retractions(self, topic: Topic) -> int:
        """Since the look before. Only the answers tell of them, so the clients count."""
        before, self._retracted = self._retracted, sum(int(value) for value in topic.items(RETRACTED).values())
        return max(0, self._retracted - before)  # a client that was started anew counts from nothing

    async def _ask(self, topic: Topic, control: EngineControl, retractions: int) -> None:
        limit = self.limits.setdefault(control.name, Limit(self.most))
        idle = self._idle.setdefault(control.name, IdleMeter())
        client = control.client
        if client is None or not control.serving:
            limit.restart()
            idle.forget()
            for figure in (IDLE, RUNNING, WAITING):
                self.activity.extra.pop(f"{control.name}{figure}", None)
            return
        loads: list[Load] = []
        with contextlib.suppress(EngineError):  # an engine that is down says nothing
            loads = await client.loads()
        if not loads or control.client is not client:
            return
        busy_s = self._busy_s[control.name] = sum(load.busy_s for load in loads)
        share = idle.saw(time.monotonic(), busy_s, sum(load.num_running_reqs for load in loads))
        if share is not None:
            self.activity.extra[f"{control.name}{IDLE}"] = share
        self.activity.extra[f"{control.name}{RUNNING}"] = float(sum(load.num_running_reqs for load in loads))
        self.activity.extra[f"{control.name}{WAITING}"] = float(sum(load.num_waiting_reqs for load in loads))
        if self.adaptive and control.entry.state == "serving":
            reading = Reading.of(loads)
            if reading.usage >= CALM_USAGE:  # elsewhere there was room
                reading = Reading.of(loads, retractions)
            limit.observe(reading, sum(load.num_running_reqs + load.num_waiting_reqs for load in loads))
        if limit.value != control.entry.limit:
            await control.publish(topic, limit=limit.value)
