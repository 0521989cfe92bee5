"""Watches the loads of the engines: the share of time they are idle, and how many samples may be in flight at each.

Our engines report the seconds that they compute. SGLang does not: there each observation counts for the time since
the previous one, as busy if any request was running.

The limit of samples in flight is additive-increase, multiplicative-decrease. It is cut when the KV cache is nearly
full, when requests were retracted for lack of room, or when the engine's queue keeps growing; otherwise it grows back
to `--server-concurrency`. It is one number for all clients together, travels in the engine's directory entry, and is
divided by the clients.

Invariants:
- 1 <= limit <= most, and one observation changes it by one step only;
- no cut before the previous cut has taken effect: the samples in flight must have come down to the limit;
- an engine that is being updated is not judged; its queue grows because it stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from configs.schema import Config
from models.engines.protocol import Load
from models.errors import EngineError
from stages.base import Activity, side_by_side
from stages.engines.engine_control import EngineControl
from stages.ports import Topic
from stages.topic_values import IDLE, POLICY, RETRACTED, RUNNING, WAITING


class IdleMeter:
    """Idle share of one engine over its last observations."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=8)  # newest observations: (time, busy seconds by then)
        self._accounts = False  # the engine reports its busy seconds
        self._sampled_s = 0.0

    def observe_idle(self, now_s: float, busy_s: float, running: int) -> float | None:
        """Add an observation: busy seconds since the engine's start (0 if it does not count them), running requests.

        Returns the idle share in [0, 1] since the oldest kept observation; None at the first.
        """
        if busy_s > 0.0 and not self._accounts:
            self._accounts = True
            self._seen.clear()
        if self._seen and running:
            self._sampled_s += now_s - self._seen[-1][0]
        busy = busy_s if self._accounts else self._sampled_s
        if self._seen and busy < self._seen[-1][1]:
            self._seen.clear()  # the engine was restarted
        self._seen.append((now_s, busy))
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return min(1.0, max(0.0, 1.0 - (last - first) / (end - start))) if end > start else None

    def forget(self) -> None:
        """Drop all observations: the next observation is a first one."""
        self._seen.clear()


HIGH_USAGE: Final = 0.92  # share of the KV cache in use from which the limit is cut
CALM_USAGE: Final = 0.80  # up to which it grows
CUT: Final = 0.75
STEPS: Final = 32  # observations from 0 to `most`
QUEUE_LOOKS: Final = 2  # observations in a row with a longer queue


class Limit:
    """Controller of one engine's limit, in samples. No I/O, no clock."""

    def __init__(self, most: int) -> None:
        self.most = self.value = most
        self.cuts = 0
        self._waiting = 0
        self._longer = 0

    def observe(self, usage: float, waiting: int, retractions: int, in_flight: int) -> int:
        """The limit after one more observation of an engine, all its data-parallel ranks together.

        Args:
            usage: share of the KV cache in use, of the fullest rank.
            waiting: requests in the engine's queue.
            retractions: since the previous observation, for lack of room.
            in_flight: samples at the engine now.
        """
        self._longer = self._longer + 1 if waiting > self._waiting else 0
        self._waiting = waiting
        if usage >= HIGH_USAGE or retractions > 0 or self._longer >= QUEUE_LOOKS:
            if in_flight <= self.value:
                self.value = max(1, int(CUT * min(self.value, max(in_flight, 1))))
                self.cuts += 1
                self._longer = 0
        elif usage <= CALM_USAGE:
            self.value = min(self.most, self.value + max(1, self.most // STEPS))
        return self.value

    def restart(self) -> None:
        """Reset for a new engine process."""
        self.value, self._waiting, self._longer = self.most, 0, 0


LOADS_INTERVAL_S = 2.0


class LoadWatch:
    """Watches the loads of `engines`, a mapping that is read again each time."""

    def __init__(self, config: Config, engines: Mapping[str, EngineControl], activity: Activity) -> None:
        self.engines, self.activity = engines, activity
        self.adaptive = config.rollout.adaptive_concurrency
        # Pausing retracts in this mode, so a retraction is no sign of a lack of room.
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
        # Retractions since the previous observation. They are known from answers alone, so the clients count them.
        before, self._retracted = self._retracted, sum(int(value) for value in topic.items(RETRACTED).values())
        retractions = max(0, self._retracted - before) if self.heeds_retractions else 0  # a new client counts from zero
        trained = [control for control in self.engines.values() if control.entry.policy == POLICY]
        await side_by_side(self._ask(topic, control, retractions) for control in trained)
        extra = self.activity.extra
        extra["engine_busy_s"] = max(sum(self._busy_s.values()), extra.get("engine_busy_s", 0.0))
        extra["in_flight_limit"] = float(sum(limit.value for limit in self.limits.values()))
        extra["limit_cuts"] = float(sum(limit.cuts for limit in self.limits.values()))

    async def _ask(self, topic: Topic, control: EngineControl, retractions: int) -> None:
        limit = self.limits.setdefault(control.name, Limit(self.most))
        idle = self._idle.setdefault(control.name, IdleMeter())
        client = control.client
        if client is None or control.entry.state not in ("serving", "updating"):
            limit.restart()
            idle.forget()
            for figure in (IDLE, RUNNING, WAITING):
                self.activity.extra.pop(f"{control.name}{figure}", None)
            return
        loads: list[Load] = []
        with contextlib.suppress(EngineError):  # an engine that is down does not answer
            loads = await client.loads()
        if not loads or control.client is not client:
            return
        busy_s = self._busy_s[control.name] = sum(load.busy_s for load in loads)
        running, waiting = (sum(load.num_running_reqs for load in loads), sum(load.num_waiting_reqs for load in loads))
        if (share := idle.observe_idle(time.monotonic(), busy_s, running)) is not None:
            self.activity.extra[f"{control.name}{IDLE}"] = share
        self.activity.extra[f"{control.name}{RUNNING}"] = float(running)
        self.activity.extra[f"{control.name}{WAITING}"] = float(waiting)
        if self.adaptive and control.entry.state == "serving":
            usage = max(load.token_usage for load in loads)
            retractions = retractions if usage >= CALM_USAGE else 0  # below it they had another cause
            limit.observe(usage, waiting, retractions, running + waiting)
        if limit.value != control.entry.limit:
            await control.publish(topic, limit=limit.value)
