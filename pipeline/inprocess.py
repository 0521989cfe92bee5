"""The in-process runner: every stage replica is a task, every engine a server thread. For tests and debugging.

Invariant: the same stages, streams and protocol as on several processes; only nothing is restarted: an error ends the
run.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from configs.schema import Config
from models.engines.serve import EngineServer
from pipeline.local import EngineSpec, Lifecycle
from pipeline.replica import ReplicaSpec, run_replica
from transport import Node


class InProcessRunner:
    """Tasks of this process, on the controller's own node."""

    def __init__(
        self, node: Node, config: Config, specs: list[ReplicaSpec], engines: list[EngineSpec], lifecycle: Lifecycle
    ) -> None:
        self.node, self.config, self.specs, self.engines, self.lifecycle = node, config, specs, engines, lifecycle
        self.restarts: dict[str, int] = {}
        self._running: set[str] = set()

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
        async with AsyncExitStack() as stack:
            for spec in self.engines:
                server = EngineServer(
                    spec.config, spec.model_path, max_context_len=spec.max_context, seed=spec.seed, port=spec.port
                )
                await stack.enter_async_context(server)
                self.lifecycle.engine_up(spec, server.url, 0)
            async with asyncio.TaskGroup() as tasks:
                for replica in self.specs:
                    tasks.create_task(self._replica(replica))
