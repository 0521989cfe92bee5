"""The in-process runner: every stage replica is a task, every engine of ours a server thread. For tests and debugging.

Invariants: the same stages, streams and protocol as on several processes; tasks are not restarted: an error ends the
run. Servers that are not ours (SGLang, a router) and the ranks of a trainer group are processes here too, and kept as
by the local runner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from configs.schema import Config
from models.engines.client import EngineClient
from models.engines.serve import EngineServer
from models.train.trainer_group.rank_spec import needs_trainer_group, processes_of
from pipeline.errors import ReplicaFailed
from pipeline.hosts.processes import Processes, child_environment
from pipeline.hosts.replica import ReplicaSpec, run_replica
from pipeline.record.run_directory import RunDir
from pipeline.supervise.restarts import EngineSpec, Lifecycle, Restarts
from pipeline.supervise.servers import Servers, starts_router
from pipeline.supervise.trainer_group import TrainerGroup
from transport import Node


HEED_S = 0.5


class InProcessRunner:
    """Tasks of this process, on the controller's own node."""

    def __init__(
        self,
        node: Node,
        config: Config,
        rundir: RunDir,
        specs: Sequence[ReplicaSpec],
        engines: Sequence[EngineSpec],
        lifecycle: Lifecycle,
    ) -> None:
        self.node, self.config, self.specs, self.lifecycle = node, config, specs, lifecycle
        self.engines = [spec for spec in engines if spec.in_thread]
        foreign = [spec for spec in engines if not spec.in_thread]
        self._restarts = Restarts(lifecycle, config.run.max_restarts)
        self._processes = Processes(rundir)
        ranks = processes_of(config.parallel) if needs_trainer_group(config) else 1
        environment = child_environment(len(engines) + ranks)
        self._trainer_group: TrainerGroup | None = None
        if needs_trainer_group(config):
            self._trainer_group = TrainerGroup(config, rundir, self._processes, self._restarts, environment)
        self.servers = Servers(
            config, foreign, self._processes, self._restarts, environment, router=starts_router(config)
        )
        self._running: set[str] = set()

    @property
    def restarts(self) -> dict[str, int]:
        """By the name of the server."""
        return self._restarts.counts

    def end(self) -> None:
        """Nothing to do: the tasks end with their inlets."""

    def alive(self) -> list[str]:
        """Replicas whose task has not ended."""
        return sorted(self._running)

    async def _replica(self, spec: ReplicaSpec) -> None:
        self._running.add(spec.replica)
        await run_replica(spec, self.node, self.config)
        self._running.discard(spec.replica)

    async def run(self) -> None:
        """Start everything; wait until all replicas have ended. An error of any of them propagates."""
        try:
            async with AsyncExitStack() as stack:
                for spec in self.engines:
                    await self._serve(stack, spec)
                async with asyncio.TaskGroup() as everything:
                    beside = [everything.create_task(self.servers.run()), everything.create_task(self._heed())]
                    if self._trainer_group is not None:
                        beside.append(everything.create_task(self._trainer_group.run()))
                    async with asyncio.TaskGroup() as tasks:
                        for replica in self.specs:
                            tasks.create_task(self._replica(replica))
                    for task in beside:
                        task.cancel()
        finally:
            await self._processes.stop_all()

    async def _heed(self) -> None:
        """Looks for complaints about servers in this process, which cannot be started anew. Raises ReplicaFailed."""
        while True:
            await asyncio.sleep(HEED_S)
            for spec in self.engines:
                if (why := self.lifecycle.complaint(spec.name, 0)) is not None:
                    raise ReplicaFailed(f"{spec.name} takes no weights: {why}; see --update-weight-max-failures")

    async def _serve(self, stack: AsyncExitStack, spec: EngineSpec) -> None:
        server = EngineServer(
            spec.config, spec.model_path, max_context_len=spec.max_context, seed=spec.seed, port=spec.port
        )
        await stack.enter_async_context(server)
        async with EngineClient(server.url) as client:
            info = await client.server_info()
        self.lifecycle.engine_up(spec, server.url, 0, info.version)
