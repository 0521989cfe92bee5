"""Looks at the engines' loads: how long they have computed, and how many samples may be in flight at each.

Without a router every engine has slots of its own. Behind one nobody knows who gets a request, so that a replica has
slots for its share of the whole directory: what the engines that it watches can bear on average, times the engines that
serve, over the replicas.

Invariant: an engine that is being updated is not judged; its queue grows because it stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from typing import Final

from configs.schema import Config
from models.engines.errors import EngineError
from models.engines.protocol import Load
from stages.base import Activity
from stages.engines.engine_link import EngineLink
from stages.engines.idle_time import IdleMeter
from stages.sampling.concurrency_limit import CALM_USAGE, Limit, Reading, Slots
from stages.sampling.engine_directory import EngineDirectory

LOADS_INTERVAL_S = 2.0
ROUTER: Final = "router"


class LoadWatch:
    """Slots by engine (or of the router), with limits that follow the loads of `links`."""

    def __init__(
        self,
        config: Config,
        links: Sequence[EngineLink],
        directory: EngineDirectory,
        activity: Activity,
        *,
        routed: bool,
        replicas: int,
        sharers: int,
    ) -> None:
        """`sharers`: replicas that send to the same engine without a router between them."""
        self.links, self.directory, self.activity = links, directory, activity
        self.routed, self.replicas, self.sharers = routed, replicas, 1 if routed else sharers
        self.adaptive = config.rollout.adaptive_concurrency
        # Pausing retracts in this mode: a retraction then says nothing about room.
        self.heeds_retractions = config.engine.pause_generation_mode != "retract"
        most = config.rollout.server_concurrency
        self.limits = {link.name: Limit(math.ceil(most / self.sharers)) for link in links}
        self.slots = {ROUTER: Slots(most)} if routed else {n: Slots(limit.value) for n, limit in self.limits.items()}
        self._retractions = 0
        self._busy_s: dict[str, float] = {}
        self._idle = {link.name: IdleMeter() for link in links}

    def of(self, name: str) -> Slots:
        """The slots that a request to this engine takes."""
        return self.slots[ROUTER if self.routed else name]

    def note_retractions(self, n: int) -> None:
        """An answer told of `n` retractions."""
        self._retractions += n

    async def run(self) -> None:
        """Waits for the clock; runs until cancelled."""
        while True:
            await asyncio.sleep(LOADS_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Ask every engine once, and set the limits."""
        retractions, self._retractions = self._retractions, 0
        async with asyncio.TaskGroup() as tasks:
            for link in self.links:
                tasks.create_task(self._ask(link, retractions if self.heeds_retractions else 0))
        self._share()
        extra = self.activity.extra
        extra["engine_busy_s"] = max(sum(self._busy_s.values()), extra.get("engine_busy_s", 0.0))
        extra["in_flight_limit"] = float(sum(slots.limit for slots in self.slots.values()))
        extra["in_flight_samples"] = float(sum(slots.taken for slots in self.slots.values()))
        extra["limit_cuts"] = float(sum(limit.cuts for limit in self.limits.values()))

    async def _ask(self, link: EngineLink, retractions: int) -> None:
        limit = self.limits[link.name]
        if not link.ready.is_set() or link.client is None:
            limit.restart()
            self._idle[link.name].forget()
            self.activity.extra.pop(f"{link.name}/idle", None)
            if not self.routed:
                self.slots[link.name].wake_all()  # who waits for this engine must choose another
            return
        loads: list[Load] = []
        with contextlib.suppress(EngineError):  # an engine that is down says nothing
            loads = await link.client.loads()
        if not loads:
            return
        if link.owner:
            busy_s = self._busy_s[link.name] = sum(load.busy_s for load in loads)
            idle = self._idle[link.name].saw(time.monotonic(), busy_s, sum(load.num_running_reqs for load in loads))
            if idle is not None:
                self.activity.extra[f"{link.name}/idle"] = idle
        engine = self.directory.engines.get(link.name)
        if not self.adaptive or engine is None or engine.updating:
            return
        reading = Reading.of(loads)
        if reading.usage >= CALM_USAGE:  # elsewhere there was room
            reading = Reading.of(loads, retractions)
        in_flight = sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)
        limit.observe(reading, math.ceil(in_flight / self.sharers))

    def _share(self) -> None:
        if not self.routed:
            for name, limit in self.limits.items():
                self.slots[name].limit = limit.value
            return
        ready = [self.limits[link.name].value for link in self.links if link.ready.is_set()]
        bearable = ready or [limit.value for limit in self.limits.values()]
        directory = max(len(self.directory.serving), 1)
        self.slots[ROUTER].limit = max(1, math.ceil(directory * sum(bearable) / len(bearable) / self.replicas))

    def drain(self) -> None:
        """Let everybody go who waits for a slot: nothing is asked any more."""
        for slots in self.slots.values():
            slots.wake_all()
