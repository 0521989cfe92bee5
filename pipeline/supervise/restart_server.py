"""Keeps one server process alive: start, wait until it serves, announce, watch its health, start again.

Invariants: it is announced only once it serves, with an incarnation that rises; a process that hangs is ended with its
whole group before its loss is told, so that no request is answered twice; a server that never came up is tried twice,
then its last words end the run, for more tries would say the same.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from configs.schema.health import HealthConfig
from models.engines.client import EngineClient
from models.engines.errors import EngineError
from pipeline.errors import ReplicaFailed, UsageError
from pipeline.hosts.processes import STOP_GRACE_S, Processes, ending, last_error
from pipeline.supervise.health_probe import HealthProbe, HealthTracker, HttpProbe, until
from pipeline.supervise.restarts import Kind, Lifecycle, Restarts

FILE_POLL_S: Final = 0.05
URL_POLL_S: Final = 0.3  # each leaves a line in the log of a server that loads
POLL_TIMEOUT_S: Final = 5.0
FIRST_WORD_S: Final = 10.0  # after which the user is told that it still loads; then after twice as long, and so on
EXIT_USER_ERROR: Final = 2
END_NOTICE_S: Final = 0.2
STARTS_WITHOUT_SERVING: Final = 2


class StartCommand(Struct, frozen=True):
    """How to start a server. It serves when the file `ready` says its address, or when `/health` at `url` says 200."""

    argv: Sequence[str]
    env: Mapping[str, str]
    url: str = ""
    ready: Path | None = None
    grace_s: float = STOP_GRACE_S


class Ready(Struct, frozen=True):
    """What a ready file holds."""

    url: str


class SupervisedServer(Protocol):
    """A server that is kept."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def slow_start(self) -> bool:
        """Whether its coming up is worth a line for the user in any case."""

    def start_command(self, incarnation: int) -> AbstractContextManager[StartCommand]:
        """How to start it. What the start needs, such as a port, is held for the time of the `with` block."""

    def look(self, client: EngineClient, group: int) -> HealthProbe:
        """How its health is seen."""

    async def up(self, client: EngineClient, incarnation: int) -> None:
        """Announce it. Raises UsageError if it is not what was asked for."""


class ServerSupervisor:
    """One server. `run` until cancelled; whoever has the processes stops them then."""

    def __init__(
        self, server: SupervisedServer, processes: Processes, restarts: Restarts, health: HealthConfig
    ) -> None:
        self.server, self.processes, self.restarts, self.health = server, processes, restarts, health
        self.lifecycle: Lifecycle = restarts.lifecycle
        self._served = False

    async def run(self) -> None:
        """Waits for the server's end; starts it again with a new incarnation. Raises ReplicaFailed or UsageError."""
        for incarnation in itertools.count():
            why = await self._live(incarnation)
            words = self._words()
            if not self._served and incarnation + 1 >= STARTS_WITHOUT_SERVING:
                raise ReplicaFailed(
                    f"{self.server.name} ended with {why} before it served, {incarnation + 1} times: {words}; see "
                    f"{self._log}"
                )
            await self.restarts.again(self.server.kind, self.server.name, why, words, self._log)

    async def _live(self, incarnation: int) -> str:
        """One life. Waits for the process's end or for a verdict of its health; returns what it ended with."""
        server = self.server
        with server.start_command(incarnation) as start_command:
            process = await self.processes.spawn(
                server.name, start_command.argv, start_command.env, grace_s=start_command.grace_s, sweep=True
            )
            async with asyncio.TaskGroup() as tasks:
                ended = tasks.create_task(process.wait())
                serving = tasks.create_task(self._serve(start_command, process.pid, incarnation))
                await asyncio.wait((ended, serving), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait((ended,), timeout=END_NOTICE_S)  # looks may fail before the end is noticed
                verdict = None if ended.done() else serving.result()
                serving.cancel()
                code = await self.processes.kill(server.name)
        if verdict is None and code == EXIT_USER_ERROR:
            raise UsageError(f"{server.name}: {self._words()}")
        return verdict or ending(code)

    async def _serve(self, start_command: StartCommand, group: int, incarnation: int) -> str:
        """Wait until it serves, announce it, then watch it. Returns why it is lost."""
        url = await self._arrival(start_command, incarnation)
        health = self.health
        async with EngineClient(
            url, control_timeout_s=POLL_TIMEOUT_S, connect_timeout_s=health.rollout_health_check_timeout
        ) as client:
            try:
                await self.server.up(client, incarnation)
            except EngineError as error:
                return f"no answer to its first question ({error})"
            self._served = True
            self.processes.note_shared(self.server.name)
            account = HealthTracker(health.rollout_health_check_failures)
            look = self.server.look(client, group)
            complaint = partial(self.lifecycle.complaint, self.server.name, incarnation)
            return await until("lost", account, look, health.rollout_health_check_interval, complaint)

    async def _arrival(self, start_command: StartCommand, incarnation: int) -> str:
        """Waits until it serves, at most `rollout_health_check_first_wait` seconds; returns its address."""
        limit_s = self.health.rollout_health_check_first_wait
        waiting = Waiting(self.server.name, self.lifecycle.say)
        try:
            async with asyncio.timeout(limit_s):
                async with EngineClient(start_command.url, connect_timeout_s=POLL_TIMEOUT_S) as client:
                    look = HttpProbe(client, POLL_TIMEOUT_S)
                    while (url := await _address(start_command, look)) is None:
                        waiting.tick()
                        await asyncio.sleep(FILE_POLL_S if start_command.ready is not None else URL_POLL_S)
        except TimeoutError:
            raise ReplicaFailed(
                f"{self.server.name} did not serve within --rollout-health-check-first-wait {limit_s:g} s: "
                f"{self._words()}; see {self._log}, or raise it"
            ) from None
        waiting.over(url, always=self.server.slow_start or incarnation > 0)
        return url

    @property
    def _log(self) -> Path:
        return self.processes.log(self.server.name)

    def _words(self) -> str:
        return last_error(self._log, self.processes.log_start(self.server.name))


async def _address(start_command: StartCommand, look: HealthProbe) -> str | None:
    """Where it serves, None if it does not yet."""
    if start_command.ready is None:
        return start_command.url if await look() is None else None
    return (
        msgspec.json.decode(start_command.ready.read_bytes(), type=Ready).url if start_command.ready.exists() else None
    )


class Waiting:
    """Tells the user, at growing intervals, how long something has been loading."""

    def __init__(self, name: str, say: Callable[[str], None], doing: str = "loading") -> None:
        self.name, self.say, self.doing = name, say, doing
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()
        self._next_s = FIRST_WORD_S
        self._told = False

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def tick(self) -> None:
        """Once in a while, while it lasts."""
        if self.seconds >= self._next_s:
            self.say(f"{self.name}: {self.doing} {self.seconds:.0f} s")
            self._next_s, self._told = self._next_s * 2, True

    def over(self, url: str, *, always: bool) -> None:
        """It came; said if anything was said before, or `always`."""
        if self._told or always:
            self.say(f"{self.name}: up after {self.seconds:.0f} s at {url}")
