"""Worker processes that host the episodes of one environment, and where each episode is just now.

An episode that is not where it was (its process ended, another replica had its last turn) is made anew from what
travels in its message: the snapshot, or else the record of its turns, which it takes again.

Invariants: an episode is in one process at a time; what is here is a cache: any of it may be lost or dropped at any
moment; infrastructure that fails is retried with a bound on other processes, and never becomes a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec
import xxhash

from configs.schema import EnvironmentConfig
from stages.agents.calls import INFRASTRUCTURE, Begin, Begun, Call, End, Hosted, Restore, Run, Take, Taken
from stages.agents.environment import Endpoint, InfrastructureError, Outcome, Start, Step, Task, Turn
from stages.agents.errors import EnvironmentFailed
from stages.agents.outage import Outage, OutageNotice
from stages.worker_process import CallFailed, WorkerLost, WorkerProcess

log = logging.getLogger("sluice.agents")

IDLE_S: Final = 900.0  # after which an episode that nobody has gone on with is dropped
_END_S: Final = 10.0  # to close an environment
T = TypeVar("T")
Ask = Callable[[Endpoint], Coroutine[Any, Any, Outcome]]


class _Infrastructure(Exception):
    """An attempt failed for a reason that says nothing about what the model did."""


@dataclass
class Record:
    """What an episode has behind it, as its message tells it."""

    task: Task
    taken: int = 0  # turns
    answers: tuple[str, ...] = ()  # digests of the start and of the answer to each turn
    snapshot: bytes = b""
    turns: Callable[[], list[Turn]] = list  # those that were taken, in case they must be taken again
    spent_s: float = 0.0  # in its environment, what came to nothing included; raised by each call


@dataclass
class _Live:
    """An episode in a process."""

    worker: WorkerProcess
    name: str  # there; another one each time that the episode is made anew
    incarnation: int = -1  # of the worker
    taken: int = 0
    used: float = field(default_factory=time.monotonic)
    busy: bool = True

    @property
    def there(self) -> bool:
        return self.worker.open and self.worker.incarnation == self.incarnation


async def _ready(worker: WorkerProcess) -> None:
    """Raises WorkerLost for a process that does not start twice: once, it may have been killed."""
    try:
        await worker.ready()
    except WorkerLost:
        await worker.ready()


def digest(answer: Start | Step) -> str:
    """Of what the model is shown and what it earns; metrics may be of the clock."""
    shown = (answer.messages, answer.tools) if isinstance(answer, Start) else (
        answer.messages, answer.reward, answer.done
    )  # fmt: skip
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(shown, order="sorted"))


class Hosting:
    """The workers of one environment in one replica."""

    def __init__(
        self,
        table: EnvironmentConfig,
        background: Callable[[Coroutine[Any, Any, None]], None],
        tell: Callable[[OutageNotice], None],
        once: Path,
    ) -> None:
        """`background` runs what nobody waits for; `once`: where calls that change the world are written down."""
        self.table, self.outage = table, Outage(table.name, tell)
        self._background, self._once = background, once.absolute()
        self._workers = [self._worker() for _ in range(table.workers)]
        self._retired: list[WorkerProcess] = []
        self._live: OrderedDict[str, _Live] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of episodes
        self._names = itertools.count()
        self._places: contextlib.AbstractAsyncContextManager[Any] = (
            asyncio.Semaphore(table.concurrency) if table.concurrency else contextlib.nullcontext()
        )
        self._of_tool = {name: asyncio.Semaphore(most) for name, most in table.tool_concurrency.items()}
        self.replayed = self.retried = 0

    async def open(self) -> Hosted:
        """Start the workers; what the first one says of its class. Raises EnvironmentFailed."""
        try:
            async with asyncio.TaskGroup() as starts:
                for worker in self._workers:
                    starts.create_task(_ready(worker))
        except* WorkerLost as group:
            raise EnvironmentFailed(f"environment {self.table.name}: {group.exceptions[0]}") from None
        return msgspec.msgpack.decode(self._workers[0].said, type=Hosted)

    async def close(self) -> None:
        """End all processes and what the episodes started."""
        self._live.clear()
        async with asyncio.TaskGroup() as ends:
            for worker in (*self._workers, *self._retired):
                ends.create_task(worker.close())

    async def reset(self, record: Record) -> Begun:
        """Begin an episode. Raises EnvironmentFailed."""
        task = record.task

        async def once() -> Begun:
            live = await self._place(task.episode)
            return msgspec.msgpack.decode(await self._call(live, Begin(live.name, task)), type=Begun)

        async with self._alone(task.episode):
            return await self._insist(lambda: self._timed(once, record), task.episode)

    async def step(self, record: Record, turn: Turn) -> Taken:
        """One turn of an episode, wherever it was. Raises EnvironmentFailed."""
        episode = record.task.episode

        async def once() -> Taken:
            live = await self._again(record)
            taken = msgspec.msgpack.decode(await self._call(live, Take(live.name, turn)), type=Taken)
            live.taken, live.used, live.busy = record.taken + 1, time.monotonic(), False
            return taken

        called = {call.name for call in turn.message.tool_calls}
        async with self._alone(episode):
            return await self._insist(lambda: self._timed(once, record), episode, called)

    def _alone(self, episode: str) -> asyncio.Lock:
        """Turns of an episode are taken one after the other: what a killed replica had answered comes again, and may
        meet the message that followed it. Each would end the world that the other has just made anew."""
        return self._turns.setdefault(episode, asyncio.Lock())

    async def run(self, task: Task, attempt: Callable[[Ask], Coroutine[Any, Any, T]]) -> T:
        """The whole episode of an agent, begun anew where infrastructure fails. Raises EnvironmentFailed.

        `attempt` is given what starts the agent, which raises TimeoutError at the episode's deadline.
        """

        async def once() -> T:
            live = await self._place(task.episode)

            async def ask(endpoint: Endpoint) -> Outcome:
                async with asyncio.timeout(self.table.episode_deadline_s):
                    value = await self._call(live, Run(task, endpoint), None)
                return msgspec.msgpack.decode(value, type=Outcome)

            try:
                return await attempt(ask)
            except InfrastructureError as error:
                raise _Infrastructure(str(error)) from None

        found = await self._insist(once, task.episode)
        self.end(task.episode)
        return found

    def end(self, episode: str) -> None:
        """The episode is over. Nobody waits for its environment to be closed."""
        live = self._live.pop(episode, None)
        if live is not None and live.there:
            self._background(self._end(live))

    async def _end(self, live: _Live) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await live.worker.call(End(live.name))
        except (TimeoutError, WorkerLost, CallFailed) as error:
            log.warning("environment %s: %s did not close well: %s", self.table.name, live.name, error or "no answer")
        await self._close_retired()

    async def _insist(
        self, once: Callable[[], Coroutine[Any, Any, T]], episode: str, called: Collection[str] = ()
    ) -> T:
        """Try until it works; attempts during an outage do not count. Raises EnvironmentFailed.

        `called`: tools, each of which has so many places. Who waits for one of them holds no place of the environment.
        """
        places = [place for name, place in self._of_tool.items() if name in called]  # in one order: no circle
        failures = 0
        while True:
            trying = await self.outage.wait()
            try:
                async with contextlib.AsyncExitStack() as held:
                    for place in (*places, self._places):
                        await held.enter_async_context(place)
                    found = await once()
            except _Infrastructure as error:
                before = self.outage.lasted_s
                self.outage.failed(str(error), trying)
                failures += before == 0.0
                self.retried += 1
                self.end(episode)
                log.warning("environment %s, episode %s: %s", self.table.name, episode, error)
                if failures > self.table.retries or before > self.table.outage_s:
                    raise EnvironmentFailed(
                        f"environment {self.table.name}: infrastructure failed {failures} times, the last time: {error}"
                    ) from None
            except BaseException:
                self.end(episode)
                raise
            else:
                self.outage.succeeded()
                return found
            finally:
                self.outage.ended(trying)

    async def _timed(self, once: Callable[[], Coroutine[Any, Any, T]], record: Record) -> T:
        """An attempt within what the episode has left: the start of its world and attempts that failed count, waiting
        for an outage, a place or an engine does not. Raises EnvironmentFailed."""
        limit_s, began = self.table.episode_deadline_s, time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, limit_s - record.spent_s)) as running:
                return await once()
        except TimeoutError:
            if not running.expired():
                raise
            raise EnvironmentFailed(
                f"environment {self.table.name}: the episode was in its environment for longer than "
                f"episode_deadline_s {limit_s:g} s, starts and retries included"
            ) from None
        finally:
            record.spent_s += time.monotonic() - began

    async def _again(self, record: Record) -> _Live:
        """The episode where it is, or made anew."""
        episode = record.task.episode
        live = self._live.get(episode)
        if live is not None and live.there and live.taken == record.taken:
            live.busy = True
            return live
        self.replayed += 1
        live = await self._place(episode)
        if record.snapshot:
            await self._call(live, Restore(live.name, record.task, record.snapshot))
            return live
        begun = msgspec.msgpack.decode(await self._call(live, Begin(live.name, record.task)), type=Begun)
        self._compare(digest(begun.start), record, 0)
        for number, turn in enumerate(record.turns(), 1):
            taken = msgspec.msgpack.decode(await self._call(live, Take(live.name, turn)), type=Taken)
            self._compare(digest(taken.step), record, number)
        return live

    def _compare(self, found: str, record: Record, number: int) -> None:
        if found != record.answers[number]:
            what = f"its answer to turn {number - 1}" if number else "its start"
            raise EnvironmentFailed(
                f"environment {self.table.name} is not deterministic: when a lost episode took its turns again, {what} "
                "was another one; draw from task.seed only, or offer snapshot() and restore()"
            )

    async def _place(self, episode: str) -> _Live:
        """A process for an episode: the one with the fewest."""
        self.end(episode)
        self._drop_idle()
        counts = {id(worker): 0 for worker in self._workers}
        for live in self._live.values():
            if id(live.worker) in counts:
                counts[id(live.worker)] += 1
        worker = min(self._workers, key=lambda worker: counts[id(worker)])
        live = self._live[episode] = _Live(worker, f"{episode}#{next(self._names)}")
        try:
            await worker.ready()
        except WorkerLost as error:
            raise _Infrastructure(str(error)) from None
        live.incarnation = worker.incarnation
        return live

    async def _call(self, live: _Live, call: Call, limit_s: float | None = 0.0) -> msgspec.Raw:
        """`limit_s`: 0 is the limit of a step, None is none. Raises _Infrastructure, EnvironmentFailed."""
        limit_s = self.table.step_deadline_s if limit_s == 0.0 else limit_s
        if not live.there:  # another episode has had its process started anew
            raise _Infrastructure("its worker process ended")
        try:
            async with asyncio.timeout(limit_s):
                value = await live.worker.call(call)
        except WorkerLost as error:
            raise _Infrastructure(str(error)) from None
        except TimeoutError:
            self._retire(live.worker)
            assert limit_s is not None
            raise _Infrastructure(f"no answer within step_deadline_s {limit_s:g} s") from None
        except CallFailed as error:
            if error.kind == INFRASTRUCTURE:
                self._retire(live.worker)
                raise _Infrastructure(str(error)) from None
            raise EnvironmentFailed(f"environment {self.table.name}: {error}") from None
        live.used, live.busy = time.monotonic(), False
        return value

    def _drop_idle(self) -> None:
        """Episodes that have not come back: their rollout failed or was dropped elsewhere."""
        limit = time.monotonic() - IDLE_S
        for episode in [name for name, live in self._live.items() if not live.busy and live.used < limit]:
            self.end(episode)

    def _retire(self, worker: WorkerProcess) -> None:
        """Put a fresh process in the place of one whose world may be out of order; its episodes go on to their end."""
        if worker in self._workers and len(self._retired) < self.table.workers:
            self._workers[self._workers.index(worker)] = self._worker()
            self._retired.append(worker)
            self._background(self._close_retired())

    async def _close_retired(self) -> None:
        used = {id(live.worker) for live in self._live.values()}
        for worker in [worker for worker in self._retired if id(worker) not in used]:
            self._retired.remove(worker)
            await worker.close()

    def _worker(self) -> WorkerProcess:
        table = self.table
        arguments = (int(table.memory_gb * (1 << 30)), table.class_path, json.dumps(table.options), self._once)
        return WorkerProcess("stages.agents.worker", arguments, python=table.python)
