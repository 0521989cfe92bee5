"""The runner: every stage replica of a run, and its servers and trainer group beside them, supervised.

A replica is a process (`ProcessRunner`) or, for tests and debugging, a task of this process (`TaskRunner`); stages,
streams and protocol are the same.

Invariants: a replica that ends without being asked to is reported as lost at once, so that its leases move on, and is
started again with backoff within a bounded budget; the trainer is not, since its state is in its last checkpoint (the
ranks of its trainer group are: they are no replica), and neither is a task; servers and ranks live as long as the
replicas; nothing is left running when `run` returns, however it returns.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from configs.schema import Config
from models.train.trainer_group.rank_spec import needs_trainer_group
from pipeline.errors import EXIT_DISK_FULL, ReplicaFailed, UsageError
from pipeline.hosts.launcher import Handle, Launcher, ProcessSpec, ending
from pipeline.hosts.replica import ReplicaSpec, run_replica
from pipeline.record.run_directory import RunDir
from pipeline.supervise.restarts import EngineSpec, Lifecycle, Restarts
from pipeline.supervise.servers import Servers, Supervised
from pipeline.supervise.trainer_group import TrainerGroup
from transport import Node

NOT_RESTARTED = ("train",)


class Runner(ABC):
    """What both runners share: all but how one replica is run."""

    in_process: ClassVar[bool]

    def __init__(
        self,
        config: Config,
        rundir: RunDir,
        node: Node,
        launcher: Launcher,
        specs: Sequence[ReplicaSpec],
        engines: Sequence[EngineSpec],
        lifecycle: Lifecycle,
    ) -> None:
        self.config, self.rundir, self.node, self.launcher, self.specs = config, rundir, node, launcher, specs
        self._restarts = Restarts(lifecycle, config.run.max_restarts)
        self._beside: list[Supervised] = [
            Servers(config, engines, launcher, self._restarts, in_process=self.in_process)
        ]
        if needs_trainer_group(config):
            self._beside.append(TrainerGroup(config, rundir, launcher, self._restarts))
        self._running: set[str] = set()

    @property
    def restarts(self) -> dict[str, int]:
        """By the name of the replica or server."""
        return self._restarts.counts

    def alive(self) -> list[str]:
        """Replicas (not servers) that have not ended."""
        return sorted(self._running)

    async def run(self) -> None:
        """Start everything; wait until all replicas have ended. An error of any of them propagates."""
        try:
            async with asyncio.TaskGroup() as everything:
                beside = [everything.create_task(one.run()) for one in self._beside]
                async with asyncio.TaskGroup() as replicas:
                    for spec in self.specs:
                        replicas.create_task(self._run(spec))
                for task in beside:
                    task.cancel()
        finally:
            await self.launcher.stop_all()

    async def _run(self, spec: ReplicaSpec) -> None:
        self._running.add(spec.replica)
        await self._keep(spec)
        self._running.discard(spec.replica)

    @abstractmethod
    async def _keep(self, spec: ReplicaSpec) -> None:
        """Waits for the end of a replica that ends well."""


class TaskRunner(Runner):
    """Replicas are tasks on the controller's own node; engines of ours are threads."""

    in_process = True

    async def _keep(self, spec: ReplicaSpec) -> None:
        await run_replica(spec, self.node, self.config)


class ProcessRunner(Runner):
    """Replicas are processes, which are started again."""

    in_process = False

    async def _keep(self, spec: ReplicaSpec) -> None:
        """Waits for the process to end; starts it again unless it ended well, or may not be."""
        path = self.rundir.specs / f"{spec.replica}.json"
        path.write_bytes(msgspec.json.encode(spec))
        argv = (sys.executable, "-m", "pipeline.hosts.worker", str(path))
        while True:
            process = await self.launcher.spawn(ProcessSpec(spec.replica, argv))
            code = await process.wait()
            if code == 0:
                return
            await self._again(spec, code, process)

    async def _again(self, spec: ReplicaSpec, code: int, process: Handle) -> None:
        """Report the loss and wait out the backoff, or give up. Raises ReplicaFailed or UsageError."""
        why, words = ending(code), process.last_words()
        if code == EXIT_DISK_FULL:
            raise UsageError(f"there is no space left for {self.rundir.path}; free some, or choose another --run-dir")
        if code == 2:
            raise UsageError(f"{spec.replica}: {words}")
        if spec.stage in NOT_RESTARTED:
            said = "" if code < 0 else f": {words}"
            raise ReplicaFailed(
                f"{spec.replica} ended with {why}{said}; continue from the last checkpoint with --resume "
                f"{self.rundir.path}"
            )
        await self._restarts.again(spec.stage, spec.replica, why, words, process.log)
