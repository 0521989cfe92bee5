"""What runner and controller agree on: what is told of processes, and how often they start.

Invariants: every unexpected end is told before the replacement starts, so that the work of the lost process moves on;
restarts are counted, wait longer each time, and end the run when their budget of a time is spent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from pipeline.errors import ReplicaFailed
from pipeline.facts.run_directory import EngineSpec
from pipeline.hosts.launcher import Handle
from pipeline.supervise.restart_budget import WINDOW_S, RestartBudget, backoff_s
from stages.base import TrainOptions
from stages.topic_values import RouterAddress
from transport import TopicServer

log = logging.getLogger("sluice.controller")

HANG_S: Final = 60.0  # longer than a process takes to start on a machine that is busy


class Lifecycle(Protocol):
    """What the runner tells its controller."""

    def lost(self, stage: str, name: str, why: str) -> None:
        """A process ended, or was ended since it hung, and is started again: release its leases, count the restart."""

    async def trainer_state(self, lost: TrainOptions) -> TrainOptions | None:
        """Where the next incarnation of a trainer begins that was reported as lost; None if only a resume can go on.
        Waits until all that the lost trainer had reported is in the ledger."""

    def retired(self, stage: str, name: str) -> None:
        """A replica that was scaled away has ended, well or not: what it still held goes to others."""

    def engine_up(self, spec: EngineSpec, url: str, incarnation: int, version: str) -> None:
        """It serves. `version`: as the server itself names it."""

    def engine_left(self, spec: EngineSpec) -> None:
        """An engine that was scaled away has ended: nobody is to expect it any more."""

    def engine_away(self, spec: EngineSpec, why: str) -> None:
        """An engine that is not ours to restart does not answer: nothing is asked of it until it is up again."""

    def router_up(self, address: RouterAddress, version: str, metrics: str) -> None:
        """It takes requests; its engines have to be named to it anew. `metrics`: where it answers /metrics."""

    def router_away(self, url: str, why: str) -> None:
        """A router that is not ours to restart does not answer: nothing is sent through it until it is up again."""

    def loading(self, name: str) -> bool:
        """Whether an engine has no published weights yet or loads some now, so that it may be slow to answer."""

    def complaint(self, name: str, incarnation: int) -> str | None:
        """Why the engines stage wants this incarnation of an engine replaced, None if it does not."""

    def say(self, line: str) -> None:
        """A line for the user."""


async def end_if_silent(topic: TopicServer, key: str, name: str, process: Handle, limit_s: float | None = None) -> None:
    """End a process that hangs. Waits while news of a key of the topic come at least each `limit_s` (`HANG_S`); then
    kills the process and waits for its end."""
    revision, limit_s = topic.revision, HANG_S if limit_s is None else limit_s
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(limit_s):
                revision = await topic.wait(revision, key)
    log.warning("%s has published nothing for %g s, it is ended", name, limit_s)
    await process.kill()


class Restarts:
    """How often each process was started again. `limit`: within `WINDOW_S`; `counts`: in the whole run."""

    def __init__(self, lifecycle: Lifecycle, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.lifecycle, self.limit = lifecycle, limit
        self.counts: dict[str, int] = {}
        self._clock = clock
        self._budgets: dict[str, RestartBudget] = {}

    async def again(self, stage: str, name: str, why: str, words: str, log: Path) -> None:
        """Report a loss and wait out the backoff. Raises ReplicaFailed when there have been too many."""
        self.lifecycle.lost(stage, name, why)
        self.counts[name] = self.counts.get(name, 0) + 1
        lost = self._budgets.setdefault(name, RestartBudget(self.limit, self._clock)).lost()
        if lost > self.limit:
            raise ReplicaFailed(
                f"{name} ended {lost} times within {WINDOW_S / 60:g} minutes, last with {why}: {words}; see "
                f"{log}, or raise --max-restarts"
            )
        await asyncio.sleep(backoff_s(lost))
