"""What runner and controller agree on: how an engine is described, what is told of processes, how often they start.

Invariants: every unexpected end is told before the replacement starts, so that the work of the lost process moves on;
restarts are counted, wait longer each time, and end the run when their budget of a time is spent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from configs.schema import EngineConfig
from models.engines.token import TokenFile
from models.fault_injection import FaultPlan
from pipeline.errors import ReplicaFailed
from pipeline.supervise.restart_budget import WINDOW_S, RestartBudget, backoff_s
from stages.base import TrainOptions
from stages.messages import RouterAddress

Kind = Literal["engine", "frozen", "router"]


class EngineSpec(Struct, frozen=True):
    """One engine. `frozen`: the name of its policy, for an engine that gets no new weights.

    `external`: the address of one that runs already, which is watched and never started or ended. `gpus`: those that
    it may see, as CUDA_VISIBLE_DEVICES names them; empty = as the environment says. `faults`: of `--fault-inject`.
    `token`: what requests to it must bring. `fetcher`: what brings weights to the node that it was placed on.
    `taken_over`: an earlier start of the run left it, with weights of its own.
    """

    name: str
    config: EngineConfig
    model_path: str
    max_context: int | None
    port: int
    seed: int
    frozen: str = ""
    external: str = ""
    gpus: tuple[str, ...] = ()
    faults: FaultPlan | None = None
    token: TokenFile | None = None
    fetcher: str = ""
    taken_over: bool = False

    @property
    def kind(self) -> Kind:
        return "frozen" if self.frozen else "engine"

    @property
    def ours(self) -> bool:
        """Whether a server of ours serves it."""
        return not self.external and self.config.engine != "sglang"


class Lifecycle(Protocol):
    """What the runner tells its controller."""

    def lost(self, stage: str, name: str, why: str) -> None:
        """A process ended, or was ended since it hung, and is started again: release its leases, count the restart."""

    async def trainer_goes_on(self, lost: TrainOptions, stream: str) -> TrainOptions | None:
        """What takes the place of a train stage that was told of as lost begins with; None if only a resume can go on.
        `stream`: its groups. Waits until all that the lost one reported has been dealt with."""

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
