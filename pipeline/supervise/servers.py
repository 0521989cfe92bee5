"""All servers of a run: its engines, those of frozen models, the router; one supervisor each, or a watcher for one that
runs already.

Invariants: they start side by side and are waited for in parallel; the environment of SGLang is asked what it holds
only if one of them is part of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from configs.schema import Config
from configs.schema.router import router_kind
from pipeline.hosts.launcher import Launcher
from pipeline.preflight.sglang import prepare_sglang
from pipeline.supervise.engine_servers import EmbeddedOrSimulatedServer, InProcessEngine, SglangServer
from pipeline.supervise.external_servers import ExternalEngine, ExternalRouter
from pipeline.supervise.restart_server import ServerSupervisor, SupervisedServer
from pipeline.supervise.restarts import EngineSpec, Restarts
from pipeline.supervise.router_server import RouterServer


class Supervised(Protocol):
    """What is run until cancelled."""

    async def run(self) -> None: ...


async def run_servers(
    config: Config, specs: Sequence[EngineSpec], launcher: Launcher, restarts: Restarts, *, in_process: bool
) -> None:
    """Waits for all servers of a run; unblocked by cancellation, or by the first that cannot be started again.

    The processes are stopped by whoever has the launcher.
    `in_process`: whether our own engines run as threads of this process.
    """
    found = await supervisors(config, specs, launcher, restarts, in_process=in_process)
    async with asyncio.TaskGroup() as tasks:
        for one in found:
            tasks.create_task(one.run())


async def supervisors(
    config: Config, specs: Sequence[EngineSpec], launcher: Launcher, restarts: Restarts, *, in_process: bool
) -> list[Supervised]:
    """What supervises or watches each of the servers."""
    lifecycle, health = restarts.lifecycle, config.health
    found: list[Supervised] = [ExternalEngine(spec, lifecycle, health) for spec in specs if spec.external]
    router, address = router_kind(config), config.router.router_address
    if router != "none" and address is not None:
        found.append(ExternalRouter(router, address, lifecycle, health))
    own = [spec for spec in specs if spec.ours]
    servers: list[SupervisedServer] = []
    if in_process:
        found += [InProcessEngine(spec, lifecycle) for spec in own]
    else:
        servers += [EmbeddedOrSimulatedServer(spec, lifecycle) for spec in own]
    foreign = [spec for spec in specs if not spec.ours and not spec.external]
    if foreign or (router != "none" and address is None):
        # In a thread: it may have to run SGLang's imports, which take seconds.
        installed = await asyncio.to_thread(prepare_sglang, config, warn=False)
        servers += [SglangServer(spec, config, installed, lifecycle) for spec in foreign]
        if router != "none" and address is None:
            servers.append(RouterServer(router, config, installed, lifecycle))
    return found + [ServerSupervisor(server, launcher, restarts, health) for server in servers]
