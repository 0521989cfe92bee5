"""All servers of a run: its engines, those of frozen models, the router; one keeper or watcher for each.

Invariants: they start side by side and are waited for in parallel; the environment of SGLang is asked what it holds
only if one of them lives in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from configs.graph import frozen_engines, is_address
from configs.schema import Config
from configs.schema.router import router_kind
from pipeline.hosts.launcher import Launcher
from pipeline.preflight.sglang import prepare_sglang
from pipeline.supervise.engine_servers import EmbeddedOrSimulatedServer, InProcessEngine, SglangServer
from pipeline.supervise.external_servers import ExternalEngine, ExternalRouter, frozen_spec
from pipeline.supervise.restart_server import ServerSupervisor, SupervisedServer
from pipeline.supervise.restarts import EngineSpec, Restarts
from pipeline.supervise.router_server import RouterServer


class Supervised(Protocol):
    """What is run until cancelled."""

    async def run(self) -> None: ...


def starts_router(config: Config) -> bool:
    """Whether this run has a router process of its own."""
    return router_kind(config) != "none" and config.router.router_address is None


class Servers:
    """The servers of one run. `run` until cancelled; the processes are stopped by whoever has the launcher.

    `in_process`: whether our own engines run as threads of this process.
    """

    def __init__(
        self,
        config: Config,
        specs: Sequence[EngineSpec],
        launcher: Launcher,
        restarts: Restarts,
        *,
        in_process: bool = False,
    ) -> None:
        self.config, self.specs, self.launcher, self.restarts = config, specs, launcher, restarts
        self.in_process = in_process
        self.lifecycle = restarts.lifecycle

    async def run(self) -> None:
        """Waits for all of them; unblocked by cancellation, or by the first that cannot be kept."""
        kept = await self._kept()
        async with asyncio.TaskGroup() as tasks:
            for one in kept:
                tasks.create_task(one.run())

    async def _kept(self) -> list[Supervised]:
        config, health = self.config, self.config.health
        kept: list[Supervised] = [ExternalEngine(spec, self.lifecycle, health) for spec in self.specs if spec.external]
        kept += self._running_already()
        own = [spec for spec in self.specs if spec.ours]
        charges: list[SupervisedServer] = []
        if self.in_process:
            kept += [InProcessEngine(spec, self.lifecycle) for spec in own]
        else:
            charges += [EmbeddedOrSimulatedServer(spec, config, self.lifecycle) for spec in own]
        foreign = [spec for spec in self.specs if not spec.ours and not spec.external]
        router = starts_router(config)
        if foreign or router:
            # In a thread: it may have to run SGLang's imports, which take seconds.
            installed = (await asyncio.to_thread(prepare_sglang, config, warn=False)).installed
            charges += [SglangServer(spec, config, installed, self.lifecycle) for spec in foreign]
            kind = router_kind(config)
            if router and kind != "none":
                charges.append(RouterServer(kind, config, installed, self.lifecycle))
        kept += [ServerSupervisor(server, self.launcher, self.restarts, health) for server in charges]
        return kept

    def _running_already(self) -> list[Supervised]:
        """Frozen engines and a router that were given by their addresses."""
        config, health = self.config, self.config.health
        kept: list[Supervised] = [
            ExternalEngine(frozen_spec(config, name, place), self.lifecycle, health)
            for name, place in frozen_engines(config).items()
            if is_address(place)
        ]
        kind, address = router_kind(config), config.router.router_address
        if kind != "none" and address is not None:
            kept.append(ExternalRouter(kind, address, self.lifecycle, health))
        return kept
