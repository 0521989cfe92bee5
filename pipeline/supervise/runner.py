"""The runner: every stage replica of a run, and its servers and trainer group beside them, supervised.

A replica is a process (`ProcessRunner`) or, for tests and debugging, a task of this process (`TaskRunner`); stages,
streams and protocol are the same.

Invariants: a replica that ends without being asked to is reported as lost at once, so that its leases move on, and is
started again with backoff within a bounded budget; the train stage only where nothing of it is lost, that is, where all
its steps but the newest are in a checkpoint (its trainer group then starts with it; a rank that is lost always), and a
task is not; the number of a replica is used once; servers and ranks live as long as the replicas; nothing is left
running when `run` returns, however it returns, but servers after an error, where another start of the run may take them
over.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, Final

import msgspec

from configs.graph import SINGLE
from configs.schema import Config
from models.train.trainer_group.rank_spec import needs_trainer_group
from pipeline.errors import ReplicaFailed, UsageError, check_repeatable
from pipeline.hosts.launcher import Handle, Launcher, ending, unless
from pipeline.hosts.rendezvous import Entry, Keys, admit, retire_key, spec_key
from pipeline.hosts.replica import ReplicaSpec, run_replica
from pipeline.hosts.shared_files import shared_files
from pipeline.placement import Placement
from pipeline.supervise.hub_processes import HubProcesses
from pipeline.supervise.restarts import Lifecycle, Restarts
from pipeline.supervise.servers import Servers
from pipeline.supervise.trainer_group import TrainerGroup
from stages.base import TrainOptions, beside
from stages.engines.stage import END
from transport import Node, TopicServer

ROOM_POLL_S: Final = 1.0


class Runner(ABC):
    """What both runners share: all but how one replica is run."""

    in_process: ClassVar[bool]

    def __init__(
        self,
        placement: Placement,
        node: Node,
        topic: TopicServer,
        launcher: Launcher,
        lifecycle: Lifecycle,
        keys: Keys = None,
    ) -> None:
        config = placement.config
        self.config, self.rundir, self.placement = config, placement.rundir, placement
        self.node, self.topic, self.launcher, self.lifecycle = node, topic, launcher, lifecycle
        _, worker = keys or ("", "")
        self.entry = Entry(placement.run_id, topic.address, str(worker), partial(admit, topic))
        launcher.say = lifecycle.say
        self._restarts = Restarts(lifecycle, config.run.max_restarts)
        self._group: TrainerGroup | None = None
        if needs_trainer_group(config):
            generation = placement.run_generation
            self._group = TrainerGroup(config, self.rundir, launcher, self._restarts, self.entry, topic, generation)
        self.hub_processes: HubProcesses | None = None
        self._servers = Servers(placement, topic, launcher, self._restarts, self.entry, in_process=self.in_process)
        self._replicas: asyncio.TaskGroup | None = None  # while it runs
        self._running: dict[str, ReplicaSpec] = {}
        self._retiring: set[str] = set()
        self._numbers = {node.name: node.replicas for node in placement.graph.nodes}  # of the next replica

    def alive(self) -> list[str]:
        """Replicas (not servers) that have not ended."""
        return sorted(self._running)

    async def run(self) -> None:
        """Start everything; wait until all replicas have ended. An error of any of them propagates."""
        try:
            ranks = [] if self._group is None else [self._group.run()]
            hubs = [] if self.hub_processes is None else [self.hub_processes.run(self.entry, self._restarts)]
            async with beside(self._servers.run(), *ranks, *hubs):
                async with asyncio.TaskGroup() as self._replicas:
                    for spec in self.placement.replicas():
                        self._start(spec)
                self._replicas = None
        except Exception:  # neither the end nor the user's word: another start may go on with the servers
            self.launcher.leave()
            raise
        finally:
            await self.launcher.stop_all()

    def replicas(self, stage: str) -> list[str]:
        """Replicas of a stage, or engines, that are to stay, the oldest first."""
        if stage == "engine":
            return self._servers.engines
        return [name for name, spec in self._running.items() if spec.stage == stage and name not in self._retiring]

    def refusal(self, stage: str, count: int) -> str | None:
        """Why a stage, or the engines, cannot be brought to `count` now; None if they can."""
        present, why = self.replicas(stage), None
        if stage == "engine" and present and count >= 1:
            why = self._servers.scalable() or self.placement.lacks_gpus(count - len(present))
        elif self._replicas is None or not present or count < 1 or (count > 1 and stage in SINGLE):
            why = SINGLE.get(stage, "a stage that runs has at least one replica, and only such a stage is scaled")
        return None if why is None else f"{stage} cannot be scaled from {len(present)} to {count} replicas: {why}"

    def scale(self, stage: str, count: int) -> None:
        """Bring a running stage, or the engines, to `count` replicas, and say so on the topic (`scale/<stage>`).

        New ones are started; of surplus ones the youngest take no new work, finish what they hold (an engine gives it
        back), and end. Raises UsageError.
        """
        if (why := self.refusal(stage, count)) is not None:
            raise UsageError(why)
        if stage == "engine":
            self._servers.scale(count)
            return
        present = self.replicas(stage)
        for name in present[count:]:
            self._retiring.add(name)
            self.topic.publish(retire_key(name), b"")
        for _ in range(count - len(present)):
            number, self._numbers[stage] = self._numbers[stage], self._numbers[stage] + 1
            self._start(self.placement.replica(self.placement.graph.node(stage), number, count))
        self.topic.publish(f"scale/{stage}", str(count).encode())

    def _start(self, spec: ReplicaSpec) -> None:
        assert self._replicas is not None
        self._running[spec.replica] = spec
        self._replicas.create_task(self._run(spec))

    async def _run(self, spec: ReplicaSpec) -> None:
        await self._keep(spec)
        del self._running[spec.replica]
        if spec.replica in self._retiring:
            self._retiring.remove(spec.replica)
            self.topic.drop(retire_key(spec.replica))
            await self.launcher.release(spec.replica)
            self.lifecycle.retired(spec.stage, spec.replica)

    @abstractmethod
    async def _keep(self, spec: ReplicaSpec) -> None:
        """Waits for the end of a replica that ends well."""


class TaskRunner(Runner):
    """Replicas are tasks on the controller's own node; engines of ours are threads."""

    in_process = True

    async def _keep(self, spec: ReplicaSpec) -> None:
        topic = await self.node.topic(self.topic.address, replica=spec.replica)
        await run_replica(spec, self.node, topic, self.config)


class ProcessRunner(Runner):
    """Replicas are processes, which are started again."""

    in_process = False

    async def _keep(self, spec: ReplicaSpec) -> None:
        """Waits for the process to end; starts it again unless it ended well, or may not be."""
        process = self.entry.process("pipeline.hosts.worker", spec.replica)
        while True:
            if spec.host:  # it trains: which host it is on is told others, and decides what it sees
                sees = await asyncio.to_thread(shared_files, self.rundir, self.config)
                await self.launcher.place(spec.replica, sees=sees)
                spec = msgspec.structs.replace(spec, host=self.launcher.address(spec.replica))
            self.topic.publish(spec_key(spec.replica), msgspec.msgpack.encode(spec))
            handle = await unless(self.launcher.spawn(process), self._over(spec.replica))
            if handle is None:  # no host had room for it
                break
            code = await handle.wait()
            if code == 0 or spec.replica in self._retiring:
                break
            spec = await self._again(spec, code, handle)
        self.topic.drop(spec_key(spec.replica))

    async def _over(self, replica: str) -> None:
        """Waits until a replica for which no host has room is not wanted any more."""
        revision, keys = 0, (END, retire_key(replica))
        while all(self.topic.get(key) is None for key in keys):
            revision = await self.topic.wait(revision, *keys)
        while replica not in self.launcher.waiting:  # noqa: ASYNC110  (a launcher announces nothing)
            await asyncio.sleep(ROOM_POLL_S)

    async def _again(self, spec: ReplicaSpec, code: int, process: Handle) -> ReplicaSpec:
        """Report the loss and wait out the backoff, or give up; what to start. Raises ReplicaFailed or UsageError."""
        why, words = ending(code), process.last_line()
        check_repeatable(spec.replica, code, words, self.rundir.path)
        options = spec.built_in
        if not isinstance(options, TrainOptions):
            await self._restarts.again(spec.stage, spec.replica, why, words, process.log)
            return spec
        found = None
        alone = goes_on_alone(self.config) and (self._group is None or not process.host_lost)  # ranks are placed once
        if code < 0 and alone:  # an exception would come again
            if self._group is not None:
                await self._group.stage_lost()
            await self._restarts.again(spec.stage, spec.replica, why, words, process.log)
            found = await self.lifecycle.trainer_goes_on(options, spec.inlets["in"].stream)
        if found is None:
            said = "" if code < 0 else f": {words}"
            raise ReplicaFailed(
                f"{spec.replica} ended with {why}{said}; continue from the last checkpoint with --resume "
                f"{self.rundir.path}"
            )
        if self._group is not None:
            self._group.stage_again()
        return msgspec.structs.replace(spec, built_in=found)


def goes_on_alone(config: Config) -> bool:
    """Whether a train stage that was killed may be started again while all else goes on: engines that share a device
    with it know the one that is gone, and differences of weights follow each other."""
    others = config.asynchrony.colocate or config.update.update_weight_transport == "delta"
    return not others and config.debug.load_debug_rollout_data is None
