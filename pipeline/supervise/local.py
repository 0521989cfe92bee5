"""The local runner: one spawned process per stage replica, and the fleet of servers beside them, supervised.

Invariants: a replica that ends without being asked to is reported as lost at once, so that its leases move on, and is
started again with backoff within a bounded budget; the trainer is not, since its state is in its last checkpoint (the
ranks of its trainer group are: they are no replica); servers and ranks live as long as the replicas; nothing is left
running when `run` returns, however it returns.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec

from configs.schema import Config
from models.train.trainer_group.rank_spec import needs_trainer_group, processes_of
from pipeline.errors import EXIT_DISK_FULL, ReplicaFailed, UsageError
from pipeline.hosts.processes import Processes, child_environment, ending, last_words
from pipeline.hosts.replica import ReplicaSpec
from pipeline.record.run_directory import RunDir
from pipeline.supervise.restarts import EngineSpec, Lifecycle, Restarts
from pipeline.supervise.servers import Servers, starts_router
from pipeline.supervise.trainer_group import TrainerGroup

NOT_RESTARTED = ("train",)


class LocalRunner:
    """Processes on this machine."""

    def __init__(
        self,
        config: Config,
        rundir: RunDir,
        specs: Sequence[ReplicaSpec],
        engines: Sequence[EngineSpec],
        lifecycle: Lifecycle,
    ) -> None:
        self.rundir, self.specs = rundir, specs
        self._restarts = Restarts(lifecycle, config.run.max_restarts)
        self._processes = Processes(rundir)
        ranks = processes_of(config.parallel) if needs_trainer_group(config) else 1
        self._environment = child_environment(len(engines) + ranks)
        self._trainer_group: TrainerGroup | None = None
        if needs_trainer_group(config):
            self._trainer_group = TrainerGroup(config, rundir, self._processes, self._restarts, self._environment)
        self.servers = Servers(
            config, engines, self._processes, self._restarts, self._environment, router=starts_router(config)
        )

    @property
    def restarts(self) -> dict[str, int]:
        """By the name of the replica or server."""
        return self._restarts.counts

    def end(self) -> None:
        """The streams are ending: replicas finish by themselves, servers are stopped when the last one has."""

    def alive(self) -> list[str]:
        """Replicas (not servers) whose process has not ended."""
        return [spec.replica for spec in self.specs if self._processes.alive(spec.replica)]

    async def run(self) -> None:
        """Start everything; wait until all replicas have ended. Raises ReplicaFailed or UsageError."""
        try:
            async with asyncio.TaskGroup() as everything:
                beside = [everything.create_task(self.servers.run())]
                if self._trainer_group is not None:
                    beside.append(everything.create_task(self._trainer_group.run()))
                async with asyncio.TaskGroup() as replicas:
                    for spec in self.specs:
                        replicas.create_task(self._keep(spec))
                for task in beside:
                    task.cancel()
        finally:
            await self._processes.stop_all()

    async def _keep(self, spec: ReplicaSpec) -> None:
        """Waits for the process to end; starts it again unless it ended well, or may not be."""
        path = self.rundir.specs / f"{spec.replica}.json"
        path.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "pipeline.hosts.worker", str(path)]
        while True:
            process = await self._processes.spawn(spec.replica, command, self._environment)
            code = await process.wait()
            if code == 0:
                return
            await self._again(spec.stage, spec.replica, code)

    async def _again(self, stage: str, replica: str, code: int) -> None:
        """Report the loss and wait out the backoff, or give up."""
        why, log = ending(code), self._processes.log(replica)
        words = last_words(log, self._processes.log_start(replica))
        if code == EXIT_DISK_FULL:
            raise UsageError(f"there is no space left for {self.rundir.path}; free some, or choose another --run-dir")
        if code == 2:
            raise UsageError(f"{replica}: {words}")
        if stage in NOT_RESTARTED:
            said = "" if code < 0 else f": {words}"
            raise ReplicaFailed(
                f"{replica} ended with {why}{said}; continue from the last checkpoint with --resume {self.rundir.path}"
            )
        await self._restarts.again(stage, replica, why, words, log)
