"""All servers of a run: its engines, those of frozen models, the router; one keeper or watcher for each.

Invariants: they start side by side and are waited for in parallel; the environment of SGLang is asked what it holds
only if one of them lives in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from configs.graph import frozen_engines, is_address, resolved_router
from configs.schema import Config
from pipeline.hosts.processes import Processes
from pipeline.preflight.sglang import prepare_sglang
from pipeline.supervise.engine_servers import EmbeddedEngineServer, SglangServer
from pipeline.supervise.external_servers import ExternalEngine, ExternalRouter, frozen_spec
from pipeline.supervise.restart_server import ServerSupervisor, SupervisedServer
from pipeline.supervise.restarts import EngineSpec, Restarts
from pipeline.supervise.router_server import RouterServer


class Supervised(Protocol):
    """What is run until cancelled."""

    async def run(self) -> None: ...


def starts_router(config: Config) -> bool:
    """Whether this run has a router process of its own."""
    return resolved_router(config) != "none" and config.router.router_address is None


class Servers:
    """The servers of one run. `run` until cancelled; the processes are stopped by whoever made `processes`."""

    def __init__(
        self,
        config: Config,
        specs: Sequence[EngineSpec],
        processes: Processes,
        restarts: Restarts,
        environment: Mapping[str, str],
        *,
        router: bool,
    ) -> None:
        self.config, self.specs, self.processes, self.restarts = config, specs, processes, restarts
        self.environment, self.router = environment, router
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
        own = [spec for spec in self.specs if spec.in_thread]
        charges: list[SupervisedServer] = [
            EmbeddedEngineServer(spec, self.processes.rundir, self.environment, self.lifecycle, health) for spec in own
        ]
        foreign = [spec for spec in self.specs if not spec.in_thread and not spec.external]
        if foreign or self.router:
            # In a thread: it may have to run SGLang's imports, which take seconds.
            installed = (await asyncio.to_thread(prepare_sglang, config, warn=False)).installed
            charges += [SglangServer(spec, config, installed, self.lifecycle) for spec in foreign]
            kind = resolved_router(config)
            if self.router and kind != "none":
                charges.append(RouterServer(kind, config, installed, self.lifecycle))
        kept += [ServerSupervisor(server, self.processes, self.restarts, health) for server in charges]
        return kept

    def _running_already(self) -> list[Supervised]:
        """Frozen engines and a router that were given by their addresses."""
        config, health = self.config, self.config.health
        kept: list[Supervised] = [
            ExternalEngine(frozen_spec(config, name, place), self.lifecycle, health)
            for name, place in frozen_engines(config).items()
            if is_address(place)
        ]
        kind, address = resolved_router(config), config.router.router_address
        if kind != "none" and address is not None:
            kept.append(ExternalRouter(kind, address, self.lifecycle, health))
        return kept
