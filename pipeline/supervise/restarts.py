"""Restarts: their budget, and one server process that is kept alive.

Invariants:
- every unexpected end is reported before the replacement starts, so that the work of the lost process moves on;
- restarts are counted, wait longer each time, and end the run when the budget of their time window is spent;
- a server is announced only once it serves, with an incarnation that rises; a process that hangs is ended with its
  whole group before its loss is reported, so that no request is answered twice;
- a server that never came up is tried twice, then its error ends the run: another try would give the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from msgspec import Struct

from configs.schema import Config
from configs.schema.rollout import HealthConfig
from models.engines.access_token import Token
from models.engines.client import EngineClient
from models.errors import EngineError
from pipeline.errors import EXIT_USER_ERROR, ReplicaFailed, TrainerDied, UsageError
from pipeline.facts.run_directory import Kind
from pipeline.graph import Placement
from pipeline.hosts.launcher import Handle, Launcher, ProcessSpec, describe_exit, run_until
from pipeline.hosts.rendezvous import Entry
from pipeline.supervise.auto_resume import WINDOW_S, RestartBudget, backoff_s
from pipeline.supervise.health_probe import HealthProbe, HealthTracker, HttpProbe, until
from pipeline.supervise.lifecycle import Lifecycle
from transport import TopicServer, awake_clock

log = logging.getLogger("sluice.controller")

HANG_S: Final = 60.0  # longer than a process takes to start on a machine that is busy


@dataclass(frozen=True)
class Supervision:
    """What all supervisors of a run work with."""

    placement: Placement
    topic: TopicServer
    launcher: Launcher
    restarts: Restarts
    entry: Entry

    @property
    def config(self) -> Config:
        return self.placement.config

    @property
    def lifecycle(self) -> Lifecycle:
        return self.restarts.lifecycle


async def end_if_silent(topic: TopicServer, key: str, name: str, process: Handle, limit_s: float | None = None) -> None:
    """End a process that hangs. Waits while news of a key of the topic come at least each `limit_s` (`HANG_S`); then
    kills the process and waits for its end."""
    revision, limit_s = topic.revision, HANG_S if limit_s is None else limit_s
    clock, silent = awake_clock(), False
    while not silent:
        asleep_s = clock.slept()
        try:
            async with asyncio.timeout(limit_s):
                revision = await topic.wait(revision, key)
        except TimeoutError:
            silent = clock.slept() == asleep_s  # else this process was stopped, and the news wait to be read
    log.warning("%s has published nothing for %g s, it is ended", name, limit_s)
    await process.kill()


class Restarts:
    """The budgets of all processes. `limit`: restarts of one of them within `WINDOW_S`."""

    def __init__(self, lifecycle: Lifecycle, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.lifecycle, self.limit = lifecycle, limit
        self._clock = clock
        self._budgets: dict[str, RestartBudget] = {}

    async def again(self, stage: str, name: str, why: str, words: str, log: Path) -> None:
        """Report a loss and wait out the backoff. Raises ReplicaFailed when there have been too many."""
        self.lifecycle.lost(stage, name, why)
        lost = self._budgets.setdefault(name, RestartBudget(self.limit, self._clock)).lost()
        if lost > self.limit:
            raise (TrainerDied if stage == "train" else ReplicaFailed)(
                f"{name} ended {lost} times within {WINDOW_S / 60:g} minutes, last with {why}: {words}; see "
                f"{log}, or raise --max-restarts"
            )
        await asyncio.sleep(backoff_s(lost))


POLL_S: Final = 0.05
SLOW_POLL_S: Final = 0.3  # each look leaves a line in the log of a server that loads
POLL_TIMEOUT_S: Final = 5.0
FIRST_NOTICE_S: Final = 10.0  # first notice that it still loads; the next after twice as long, and so on
END_NOTICE_S: Final = 2.0  # on a busy machine the end of a process is noticed after the looks that it failed
STARTS_WITHOUT_SERVING: Final = 2


class StartCommand(Struct, frozen=True):
    """How to start a server. It serves when `/health` at `url` is 200."""

    process: ProcessSpec
    url: str
    token: Token | None = None  # what requests to it must bring
    taken_over: bool = False  # it serves already


class SupervisedServer(ABC):
    """A server that is supervised."""

    name: str
    kind: Kind
    slow_start: ClassVar[bool] = False  # whether its coming up is worth a line for the user in any case

    @abstractmethod
    def start_command(self, incarnation: int, launcher: Launcher) -> AbstractContextManager[StartCommand]:
        """How to start it. What the start needs, such as a port, is held for the time of the `with` block."""

    async def take_over(self, launcher: Launcher) -> tuple[StartCommand, Handle] | None:
        """The process that an earlier start of the run has left, if it can be used; else it is ended."""
        return None

    def look(self, first: HttpProbe, process: Handle) -> HealthProbe:
        """How its health is seen; `first`: the look at its `/health`."""
        return first

    @abstractmethod
    async def up(self, client: EngineClient, incarnation: int) -> None:
        """Announce it. Raises UsageError if it is not the requested one."""


class ServerSupervisor:
    """One server. `run` until cancelled; the owner of the launcher stops it then."""

    def __init__(self, server: SupervisedServer, launcher: Launcher, restarts: Restarts, health: HealthConfig) -> None:
        self.server, self.launcher, self.restarts, self.health = server, launcher, restarts, health
        self.lifecycle = restarts.lifecycle
        self._served = False
        self._failed_starts = 0
        self._retired = asyncio.Event()

    def retire(self) -> None:
        """End the server for good; `run` returns then."""
        self._retired.set()

    async def run(self) -> None:
        """Waits for the server's end; starts it again with a new incarnation. Raises ReplicaFailed or UsageError."""
        for incarnation in itertools.count():
            await run_until(self.launcher.place(self.server.name), self._retired.wait())
            if self._retired.is_set():
                return
            why, process = await self._one_incarnation(incarnation)
            if self._retired.is_set():
                return
            words, log, failed = process.last_error(), process.log, self._failed_starts
            if not self._served and failed >= STARTS_WITHOUT_SERVING:
                raise ReplicaFailed(
                    f"{self.server.name} ended with {why} before it served, {failed} times: {words}; see {log}"
                )
            await self.restarts.again(self.server.kind, self.server.name, why, words, log)

    async def _one_incarnation(self, incarnation: int) -> tuple[str, Handle]:
        """Waits for the process's end, its loss by its health, or its retirement; returns why it ended."""
        async with self._begun(incarnation) as (start, process), asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(process.wait())
            serving = tasks.create_task(self._serve(start, process, incarnation))
            retired = tasks.create_task(self._retired.wait())
            await asyncio.wait((ended, serving, retired), return_when=asyncio.FIRST_COMPLETED)
            if not retired.done():
                await asyncio.wait((ended,), timeout=END_NOTICE_S)  # looks may fail before the end is noticed
            verdict = serving.result() if serving.done() and not ended.done() else None
            serving.cancel()
            retired.cancel()
            code = await process.kill()
        if verdict is None and code == EXIT_USER_ERROR and not self._retired.is_set():
            raise UsageError(f"{self.server.name}: {process.last_error()}")
        self._failed_starts += verdict is not None or code > 0  # a kill from outside says nothing about the next start
        return verdict or describe_exit(code), process

    @contextlib.asynccontextmanager
    async def _begun(self, incarnation: int) -> AsyncIterator[tuple[StartCommand, Handle]]:
        """Its process: one that is taken over, or a new one."""
        if incarnation == 0 and (found := await self.server.take_over(self.launcher)) is not None:
            self._served = True
            yield found
            return
        with self.server.start_command(incarnation, self.launcher) as start:
            yield start, await self.launcher.spawn(start.process)

    async def _serve(self, start: StartCommand, process: Handle, incarnation: int) -> str:
        """Wait until it serves, announce it, then watch it. Returns why it is lost."""
        if not start.taken_over:
            await self._arrival(start, process, incarnation)
        health = self.health
        async with EngineClient(
            start.url,
            control_timeout_s=POLL_TIMEOUT_S,
            connect_timeout_s=health.rollout_health_check_timeout,
            token=start.token,
        ) as client:
            try:
                await self.server.up(client, incarnation)
            except EngineError as error:
                return f"no answer to its first question ({error})"
            self._served = True
            process.remember_shared()
            account = HealthTracker(health.rollout_health_check_failures)
            look = self.server.look(HttpProbe(client, health.rollout_health_check_timeout), process)
            complaint = partial(self.lifecycle.complaint, self.server.name, incarnation)
            return await until("lost", account, look, health.rollout_health_check_interval, complaint)

    async def _arrival(self, start: StartCommand, process: Handle, incarnation: int) -> None:
        """Waits until it serves, at most `rollout_health_check_first_wait` seconds."""
        limit_s = self.health.rollout_health_check_first_wait
        waiting = Waiting(self.server.name, self.lifecycle.say)
        try:
            async with asyncio.timeout(limit_s):
                async with EngineClient(start.url, connect_timeout_s=POLL_TIMEOUT_S, token=start.token) as client:
                    look = HttpProbe(client, POLL_TIMEOUT_S)
                    while await look() is not None:
                        waiting.tick()
                        if not start.process.ours:
                            process.remember_shared()
                        await asyncio.sleep(POLL_S if start.process.ours else SLOW_POLL_S)
        except TimeoutError:
            raise ReplicaFailed(
                f"{self.server.name} did not serve within --rollout-health-check-first-wait {limit_s:g} s: "
                f"{process.last_error()}; see {process.log}, or raise it"
            ) from None
        waiting.over(start.url, always=self.server.slow_start or incarnation > 0)


class Waiting:
    """Reports, at growing intervals, how long something has been loading."""

    def __init__(self, name: str, say: Callable[[str], None], doing: str = "loading") -> None:
        self.name, self.say, self.doing = name, say, doing
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()
        self._next_s = FIRST_NOTICE_S
        self._noticed = False

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def tick(self) -> None:
        """Once in a while, while it lasts."""
        if self.seconds >= self._next_s:
            self.say(f"{self.name}: {self.doing} {self.seconds:.0f} s")
            self._next_s, self._noticed = self._next_s * 2, True

    def over(self, url: str, *, always: bool) -> None:
        """Report the end of a wait, if a notice came before, or `always`."""
        if self._noticed or always:
            self.say(f"{self.name}: up after {self.seconds:.0f} s at {url}")
