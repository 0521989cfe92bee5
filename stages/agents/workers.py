"""The worker processes of one environment in one replica, and the process of each episode.

Invariants: an episode lives in one process at a time; this table is a cache, so any entry may be lost or dropped at any
moment; a process whose environment may be broken gets no new episode, and ends after its last episode.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from configs.schema import EnvironmentConfig
from stages.agents.environment import InfrastructureError
from stages.agents.worker import INFRASTRUCTURE, Call, End, EnvironmentFailed, Hosted, Run
from stages.workers.process import CallFailed, WorkerLost, WorkerProcess

log = logging.getLogger("sluice.agents")
T = TypeVar("T")
Background = Callable[[Coroutine[Any, Any, None]], None]  # starts work

IDLE_S: Final = 900.0  # an episode without a turn for so long is dropped
_END_S: Final = 10.0  # to close an environment


@dataclass
class Live:
    """A live episode in a process."""

    worker: WorkerProcess
    name: str  # id in the worker; new each time the episode is rebuilt
    incarnation: int = -1  # incarnation of the worker
    taken: int = 0  # turns
    used: float = math.inf  # when its last call ended; infinite while one runs

    @property
    def alive(self) -> bool:
        return self.worker.open and self.worker.incarnation == self.incarnation


async def _ready(worker: WorkerProcess) -> None:
    """Start a worker. Tries twice, since the first process may have been killed. Raises WorkerLost."""
    try:
        await worker.ready()
    except WorkerLost:
        await worker.ready()


class Workers:
    """The workers of one environment, and their episodes."""

    def __init__(self, table: EnvironmentConfig, background: Background, once: Path) -> None:
        self.table, self._background, self._once = table, background, once.absolute()
        self.live: OrderedDict[str, Live] = OrderedDict()  # by episode
        self._names = itertools.count()
        self.processes = [self._worker() for _ in range(table.workers)]
        self._retired: list[WorkerProcess] = []

    async def open(self) -> Hosted:
        """Start the workers. Returns the first worker's description of its class. Raises EnvironmentFailed."""
        try:
            async with asyncio.TaskGroup() as starts:
                for worker in self.processes:
                    starts.create_task(_ready(worker))
        except* WorkerLost as group:
            raise EnvironmentFailed(f"environment {self.table.name}: {group.exceptions[0]}") from None
        return msgspec.msgpack.decode(self.processes[0].greeting, type=Hosted)

    async def close(self) -> None:
        """End all processes and their descendants."""
        self.live.clear()
        async with asyncio.TaskGroup() as ends:
            for worker in (*self.processes, *self._retired):
                ends.create_task(worker.close())

    async def place(self, episode: str) -> Live:
        """Assign an episode to the process with the fewest episodes."""
        self.end(episode)
        self._drop_idle()
        counts = Counter(live.worker for live in self.live.values())
        worker = min(self.processes, key=lambda worker: counts[worker])
        live = self.live[episode] = Live(worker, f"{episode}#{next(self._names)}")
        try:
            await worker.ready()
        except WorkerLost as error:
            raise InfrastructureError(str(error)) from None
        live.incarnation = worker.incarnation
        return live

    async def call(self, live: Live, call: Call, answer: type[T]) -> T:
        """The answer. Only the run of an agent has no limit here. Raises InfrastructureError, EnvironmentFailed."""
        limit_s = self.table.step_deadline_s
        if not live.alive:  # another episode caused a restart of the process
            raise InfrastructureError("its worker process ended")
        live.used = math.inf
        try:
            async with asyncio.timeout(None if isinstance(call, Run) else limit_s):
                value = await live.worker.call(call)
        except WorkerLost as error:
            raise InfrastructureError(str(error)) from None
        except TimeoutError:
            self._retire(live.worker)
            raise InfrastructureError(f"no answer within step_deadline_s {limit_s:g} s") from None
        except CallFailed as error:
            if error.kind == INFRASTRUCTURE:
                self._retire(live.worker)
                raise InfrastructureError(str(error)) from None
            raise EnvironmentFailed(f"environment {self.table.name}: {error}") from None
        live.used = time.monotonic()
        return msgspec.msgpack.decode(value, type=answer)

    def end(self, episode: str) -> None:
        """The episode is over. Its environment is closed in the background."""
        live = self.live.pop(episode, None)
        if live is not None and live.alive:
            self._background(self._end(live))

    async def _end(self, live: Live) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await live.worker.call(End(live.name))
        except (TimeoutError, WorkerLost, CallFailed) as error:
            log.warning("environment %s: %s did not close well: %s", self.table.name, live.name, error or "no answer")
        await self._close_retired()

    def _drop_idle(self) -> None:
        """Drop idle episodes: their rollout failed or was dropped elsewhere."""
        limit = time.monotonic() - IDLE_S
        for episode in [name for name, live in self.live.items() if live.used < limit]:
            self.end(episode)

    def _retire(self, worker: WorkerProcess) -> None:
        """Replace a process whose environment may be broken; its episodes continue there until they end."""
        if worker in self.processes and len(self._retired) < self.table.workers:
            self.processes[self.processes.index(worker)] = self._worker()
            self._retired.append(worker)
            self._background(self._close_retired())

    async def _close_retired(self) -> None:
        used = {live.worker for live in self.live.values()}
        for worker in [worker for worker in self._retired if worker not in used]:
            self._retired.remove(worker)
            await worker.close()

    def _worker(self) -> WorkerProcess:
        table = self.table
        arguments = (int(table.memory_gb * (1 << 30)), table.class_path, json.dumps(table.options), self._once)
        return WorkerProcess("stages.agents.worker", arguments, python=table.python)
