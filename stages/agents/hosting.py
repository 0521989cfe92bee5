"""The episodes of one environment in one replica; each lives in one of its worker processes (stages/agents/workers.py).

An episode may be missing: its process ended, or another replica took its last turn. It is then rebuilt from its
message, by the snapshot if there is one, else by replaying the recorded turns.

Invariants:
- Failed infrastructure is retried on other processes, up to a limit, and never becomes a reward.
- During an outage attempts wait; after each wait a single attempt probes. A success ends the outage. The newest
  attempts decide what is an outage; failures that the model caused do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec
import xxhash
from msgspec import Struct

from configs.schema import EnvironmentConfig
from stages.agents.environment import Endpoint, InfrastructureError, Outcome, Start, Step, Task, Turn
from stages.agents.worker import Begin, Begun, EnvironmentFailed, Run, Take, Taken
from stages.agents.workers import Background, Live, Workers

_NEWEST: Final = 16  # newest attempts that decide about an outage
_LEAST: Final = 6  # failures among them that make an outage; they must also be more than half
FIRST_S, _MOST_S = 1.0, 60.0  # waits


class OutageNotice(Struct, frozen=True):
    """Topic value `environment/<environment>/<replica>`: the user's notice of an outage."""

    environment: str
    out: bool
    reason: str
    lasted_s: float = 0.0  # duration of the last outage
    count: int = 1  # outages so far in this replica


class Outage:
    """The outages of one environment in one replica."""

    def __init__(self, environment: str, notify: Callable[[OutageNotice], None]) -> None:
        self._environment, self._notify = environment, notify
        self._newest: deque[bool] = deque(maxlen=_NEWEST)
        self._since: float | None = None
        self._count = 0
        self._wait_s = FIRST_S
        self._reason = ""
        self._works = asyncio.Event()
        self._works.set()
        self._trying = asyncio.Lock()

    @property
    def lasted_s(self) -> float:
        """Seconds of the outage; 0 while there is none."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    async def wait(self) -> bool:
        """Waits for the end of an outage or for a turn to probe; True for a probe. Call `ended` afterwards."""
        while not self._works.is_set():
            await self._trying.acquire()
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._works.wait()
            except TimeoutError:
                return True
            except BaseException:
                self._trying.release()
                raise
            self._trying.release()
        return False

    def ended(self, trying: bool) -> None:
        """An attempt is over; `trying` is the result of `wait` for it."""
        if trying:
            self._trying.release()

    def succeeded(self) -> None:
        self._newest.append(True)
        if self._since is None:
            return
        notice = OutageNotice(self._environment, False, self._reason, self.lasted_s, self._count)
        self._since, self._wait_s = None, FIRST_S
        self._newest.clear()
        self._works.set()
        self._notify(notice)

    def failed(self, reason: str, trying: bool) -> None:
        """An attempt failed because of infrastructure."""
        self._newest.append(False)
        if self._since is not None:
            self._wait_s = min(2 * self._wait_s, _MOST_S) if trying else self._wait_s
        elif (failures := self._newest.count(False)) >= _LEAST and 2 * failures > len(self._newest):
            self._since, self._reason = time.monotonic(), reason
            self._count += 1
            self._works.clear()
            self._notify(OutageNotice(self._environment, True, reason, count=self._count))


log = logging.getLogger("sluice.agents")

T = TypeVar("T")
Ask = Callable[[Endpoint], Coroutine[Any, Any, Outcome]]
Attempt = Callable[[], Coroutine[Any, Any, T]]


@dataclass
class Record:
    """The history of an episode, from its message."""

    task: Task
    answers: tuple[str, ...] = ()  # digests of the start and of the answer to each turn
    snapshot: bytes = b""
    turns: Callable[[], list[Turn]] = list  # the answered turns, for a replay
    spent_s: float = 0.0  # seconds in its environment, failed attempts included; each call adds to it


def digest(answer: Start | Step) -> str:
    """Digest of observations and rewards. Metrics are left out: they may depend on the clock."""
    shown = (answer.messages, answer.tools) if isinstance(answer, Start) else (
        answer.messages, answer.reward, answer.done
    )  # fmt: skip
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(shown, order="sorted"))


class Hosting:
    """See the module."""

    def __init__(
        self, table: EnvironmentConfig, background: Background, notify: Callable[[OutageNotice], None], once: Path
    ) -> None:
        """`once`: directory of the records of calls with side effects."""
        self.table, self.outage = table, Outage(table.name, notify)
        self.workers = Workers(table, background, once)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of episodes
        self._places: contextlib.AbstractAsyncContextManager[Any] = (
            asyncio.Semaphore(table.concurrency) if table.concurrency else contextlib.nullcontext()
        )
        self._of_tool = {name: asyncio.Semaphore(most) for name, most in table.tool_concurrency.items()}
        self.replayed = self.retried = 0

    async def reset(self, record: Record) -> Begun:
        """Start an episode. Raises EnvironmentFailed."""

        async def once() -> Begun:
            live = await self.workers.place(record.task.episode)
            return await self.workers.call(live, Begin(live.name, record.task), Begun)

        return await self._alone(record, once)

    async def step(self, record: Record, turn: Turn) -> Taken:
        """One turn of an episode, which is rebuilt here if needed. Raises EnvironmentFailed."""

        async def once() -> Taken:
            live = await self._again(record)
            taken = await self.workers.call(live, Take(live.name, turn), Taken)
            live.taken = len(record.answers)
            return taken

        return await self._alone(record, once, {call.name for call in turn.message.tool_calls})

    async def _alone(self, record: Record, attempt: Attempt[T], called: Collection[str] = ()) -> T:
        """Attempts of an episode, while no other turn of it runs.

        After a replica was killed, a turn may be redelivered while the next one is already here. Without the lock, each
        of the two would end the environment that the other has just rebuilt."""
        async with self._turns.setdefault(record.task.episode, asyncio.Lock()):
            return await self._retry(lambda: self._timed(attempt, record), record.task.episode, called)

    async def run(self, task: Task, attempt: Callable[[Ask], Coroutine[Any, Any, T]]) -> T:
        """The whole episode of an agent, restarted after infrastructure failures. Raises EnvironmentFailed.

        `attempt` gets a function that runs the agent and raises TimeoutError at the episode's deadline.
        """

        async def run_once() -> T:
            live = await self.workers.place(task.episode)

            async def ask(endpoint: Endpoint) -> Outcome:
                async with asyncio.timeout(self.table.episode_deadline_s):
                    return await self.workers.call(live, Run(task, endpoint), Outcome)

            return await attempt(ask)

        outcome = await self._retry(run_once, task.episode)
        self.workers.end(task.episode)
        return outcome

    async def _retry(self, attempt: Attempt[T], episode: str, called: Collection[str] = ()) -> T:
        """Retry until an attempt succeeds; attempts during an outage do not count. Raises EnvironmentFailed.

        `called`: tools with a limit of concurrent calls. An attempt holds no place of the environment while it waits
        for a tool.
        """
        places = [place for name, place in self._of_tool.items() if name in called]  # one order: no deadlock
        failures = 0
        while True:
            trying = await self.outage.wait()
            try:
                async with contextlib.AsyncExitStack() as held:
                    for place in (*places, self._places):
                        await held.enter_async_context(place)
                    result = await attempt()
            except InfrastructureError as error:
                before = self.outage.lasted_s
                self.outage.failed(str(error), trying)
                failures += before == 0.0
                self.retried += 1
                self.workers.end(episode)
                log.warning("environment %s, episode %s: %s", self.table.name, episode, error)
                if failures > self.table.retries or before > self.table.outage_s:
                    raise EnvironmentFailed(
                        f"environment {self.table.name}: infrastructure failed {failures} times, the last time: {error}"
                    ) from None
            except BaseException:
                self.workers.end(episode)
                raise
            else:
                self.outage.succeeded()
                return result
            finally:
                self.outage.ended(trying)

    async def _timed(self, attempt: Attempt[T], record: Record) -> T:
        """An attempt within the remaining time of the episode.

        Starts and failed attempts count; waiting for an outage, a place or an engine does not.

        Raises EnvironmentFailed.
        """
        limit_s, began = self.table.episode_deadline_s, time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, limit_s - record.spent_s)) as running:
                return await attempt()
        except TimeoutError:
            if not running.expired():
                raise
            raise EnvironmentFailed(
                f"environment {self.table.name}: the episode was in its environment for longer than "
                f"episode_deadline_s {limit_s:g} s, starts and retries included"
            ) from None
        finally:
            record.spent_s += time.monotonic() - began

    async def _again(self, record: Record) -> Live:
        """The live episode, rebuilt if it is missing."""
        episode = record.task.episode
        live = self.workers.live.get(episode)
        if live is not None and live.alive and live.taken == len(record.answers) - 1:
            return live
        self.replayed += 1
        live = await self.workers.place(episode)
        begun = await self.workers.call(live, Begin(live.name, record.task, record.snapshot), Begun)
        if record.snapshot:
            return live
        self._compare(digest(begun.start), record, 0)
        for number, turn in enumerate(record.turns(), 1):
            taken = await self.workers.call(live, Take(live.name, turn), Taken)
            self._compare(digest(taken.step), record, number)
        return live

    def _compare(self, found: str, record: Record, number: int) -> None:
        if found != record.answers[number]:
            answer = f"the answer to turn {number - 1}" if number else "the start"
            raise EnvironmentFailed(
                f"environment {self.table.name} is not deterministic: {answer} changed in the "
                "replay of a lost episode; draw from task.seed only, or offer snapshot() and restore()"
            )
