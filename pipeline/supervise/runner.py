"""The runner: every stage replica of a run, and its servers beside them, supervised.

A replica is a process (`ProcessRunner`) or, for tests and debugging, a task of this process (`TaskRunner`); stages,
streams and protocol are the same.

Invariants: a replica that ends although its work is not done is reported as lost at once, so that its leases move on,
and is started again with backoff within a bounded budget; a task is not; the number of a replica is used once; servers
live as long as the replicas; nothing is left running when `run` returns, however it returns, but servers after an
error, where another start of the run may take them over.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from functools import partial
from typing import ClassVar, Final

import msgspec

from configs.graph import SINGLE
from models.checkpoint import final_path, manifests
from models.train.trainer_group.rank_spec import PeerGone
from pipeline.errors import UsageError, check_repeatable, leaf
from pipeline.graph import Placement
from pipeline.hosts.launcher import Launcher, describe_exit, run_until
from pipeline.hosts.rendezvous import Entry, Keys, admit, retire_key, spec_key
from pipeline.hosts.worker import ReplicaSpec, run_replica
from pipeline.supervise.lifecycle import Lifecycle, damage
from pipeline.supervise.restarts import Restarts, Supervision
from pipeline.supervise.servers import Servers
from pipeline.supervise.trainer_unit import Ranks, TrainerUnit
from stages.base import TrainOptions, beside
from stages.engines.stage import END
from transport import Node

ROOM_POLL_S: Final = 1.0
RANKS_END_S: Final = 10.0  # for the supervisor to see how a rank ended, which the train stage notices first


class Runner(ABC):
    """What both runners share: all but how one replica is run."""

    in_process: ClassVar[bool]

    def __init__(
        self, placement: Placement, node: Node, launcher: Launcher, lifecycle: Lifecycle, keys: Keys = None
    ) -> None:
        config, topic = placement.config, lifecycle.topic
        self.config, self.rundir, self.placement = config, placement.rundir, placement
        self.node, self.topic, self.launcher, self.lifecycle = node, topic, launcher, lifecycle
        _, worker = keys or ("", "")
        self.entry = Entry(placement.rundir.run_id, topic.address, str(worker), partial(admit, topic))
        launcher.say = lifecycle.say
        restarts = Restarts(lifecycle, config.run.max_restarts)
        self._shared = Supervision(placement, topic, launcher, restarts, self.entry)
        self._ranks = Ranks(self._shared)
        self._servers = Servers(self._shared, in_process=self.in_process)
        self._trainer: TrainerUnit | None = None  # where it is started again
        self._replicas: asyncio.TaskGroup | None = None  # while it runs
        self._running: dict[str, ReplicaSpec] = {}
        self._retiring: dict[str, str] = {}  # with the reason
        self._counts = {node.name: node.replicas for node in placement.graph.nodes}  # replicas that are to run
        self._numbers = Counter[str]()  # of the next replica of a stage

    def alive(self) -> list[str]:
        """Replicas (not servers) that have not ended."""
        return sorted(self._running)

    async def run(self) -> None:
        """Start everything; wait until all replicas have ended. An error of any of them propagates."""
        try:
            async with beside(self._servers.run()):
                async with asyncio.TaskGroup() as self._replicas:
                    for stages in self.placement.processes(self._counts):
                        self._start(self._new(stages))
                self._replicas = None
        except Exception:  # neither a normal end nor a stop by the user: the next start may take over the servers
            self.launcher.leave()
            raise
        finally:
            await self.launcher.stop_all()

    def replicas(self, stage: str) -> list[str]:
        """Replicas of a stage, or engines, that are to stay, the oldest first."""
        if stage == "engine":
            return self._servers.engines
        staying = [spec for name, spec in self._running.items() if name not in self._retiring]
        return [member.replica for spec in staying for member in spec.members if member.stage == stage]

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

        New processes are started; surplus ones, the youngest, take no new work, finish what they hold (an engine gives
        it back), and end. A chain is surplus where one of its stages gets a second replica; stages with one replica
        each are chained again. Raises UsageError.
        """
        if (why := self.refusal(stage, count)) is not None:
            raise UsageError(why)
        if stage == "engine":
            self._servers.scale(count)
            return
        self._counts[stage] = count
        wanted = Counter(self.placement.processes(self._counts))
        for name, spec in self._running.items():
            if name in self._retiring:
                continue
            wanted[spec.stages] -= 1
            if wanted[spec.stages] < 0:
                down = spec.stages == (stage,)
                self._retiring[name] = f"{stage} is scaled down" if down else f"for {stage} is scaled"
                self.topic.publish(retire_key(name), b"")
        for stages, missing in wanted.items():
            for _ in range(missing):
                self._start(self._new(stages))
        self.topic.publish(f"scale/{stage}", str(count).encode())

    def _new(self, stages: tuple[str, ...]) -> ReplicaSpec:
        """The specification of a further process with these stages."""
        members = []
        for stage in stages:
            number, self._numbers[stage] = self._numbers[stage], self._numbers[stage] + 1
            members.append(self.placement.replica(self.placement.graph.node(stage), number, self._counts[stage]))
        first, *others = members
        return msgspec.structs.replace(first, chained=tuple(others), room=self.placement.room) if others else first

    def _start(self, spec: ReplicaSpec) -> None:
        assert self._replicas is not None
        self._running[spec.replica] = spec
        self._replicas.create_task(self._run(spec))

    async def _run(self, spec: ReplicaSpec) -> None:
        await self._supervise(spec)
        spec = self._running.pop(spec.replica)  # apart from its neighbours by now, perhaps
        if spec.replica in self._retiring:
            why = self._retiring.pop(spec.replica)
            self.topic.drop(retire_key(spec.replica))
            await self.launcher.release(spec.replica)
            for member in spec.members:
                self.lifecycle.retired(member.stage, member.replica, why)

    async def rollback(self, step: int) -> None:
        """Start the trainer again from the checkpoint of a step. Raises UsageError where it cannot be."""
        spared = self.lifecycle.recorder.spared  # no newer checkpoint removes it meanwhile
        new = {step} - spared
        spared |= new
        try:
            trainer = await self._trainer_to_go_back(step)
            await trainer.rollback(step)
        except UsageError:
            spared -= new
            raise

    async def _trainer_to_go_back(self, step: int) -> TrainerUnit:
        """Raises UsageError where the checkpoint or the run is none to go back with."""
        total, batch = self.config.rollout.num_rollout, self.config.rollout.rollout_batch_size
        if total is not None and self.lifecycle.recorder.ledger.steps(batch) >= total:
            raise UsageError(
                f"all {total} steps are trained, and to go back takes the number of a next one; resume the run with a "
                "larger --num-rollout"
            )
        kept = [manifest.step for manifest in await asyncio.to_thread(manifests, self.rundir.checkpoints)]
        checkpoint = final_path(self.rundir.checkpoints, step)
        if step not in kept:
            steps = ", ".join(map(str, sorted(kept))) or "none"
            raise UsageError(
                f"no checkpoint of step {step} is kept, but of {steps}; choose one of these, and keep more with "
                "--save-interval and --keep-last-n"
            )
        if (fault := await asyncio.to_thread(damage, checkpoint)) is not None:
            raise UsageError(fault)
        if self._trainer is None or self.config.asynchrony.colocate:
            how = "--runner inprocess" if self._trainer is None else "--colocate"
            raise UsageError(
                f"with {how} the trainer is not started again in a running run; drain the run, and begin another with "
                f"--hf-checkpoint {checkpoint / 'hf'}"
            )
        return self._trainer

    @abstractmethod
    async def _supervise(self, spec: ReplicaSpec) -> None:
        """Waits for the end of a replica that ends well."""


class TaskRunner(Runner):
    """Replicas are tasks on the controller's own node; embedded and simulated engines are threads."""

    in_process = True

    async def _supervise(self, spec: ReplicaSpec) -> None:
        topic = await self.node.topic(self.topic.address, replica=spec.replica)
        ranks = [self._ranks.until_lost()] if isinstance(spec.built_in, TrainOptions) else []
        async with beside(*ranks):
            try:
                await run_replica(spec, self.node, topic, self.config)
            except Exception as error:
                if isinstance(leaf(error), PeerGone):  # a moment later `until_lost` ends this block, and says why
                    await asyncio.sleep(RANKS_END_S)
                raise


class ProcessRunner(Runner):
    """Replicas are processes, which are started again."""

    in_process = False

    async def _supervise(self, spec: ReplicaSpec) -> None:
        """Waits for the process to end; starts it again unless it ended well, or may not be."""
        if isinstance(spec.built_in, TrainOptions):
            self._trainer = TrainerUnit(self._shared, self._ranks)
            await self._trainer.run(spec)
            return
        name = spec.replica
        process = self.entry.process(name, [member.replica for member in spec.chained])
        self.topic.publish(spec_key(name), msgspec.msgpack.encode(spec))
        while True:
            handle = await run_until(self.launcher.spawn(process), self._until_unwanted(name))
            if handle is None:  # no host had room for it
                break
            code = await handle.wait()
            if code == 0 or name in self._retiring:
                break
            check_repeatable(name, code, handle.last_line(), self.rundir.path)
            if spec.chained:
                spec = self._separate(spec)
            await self._shared.restarts.again(spec.stage, name, describe_exit(code), handle.last_line(), handle.log)
        self.topic.drop(spec_key(name))

    def _separate(self, chain: ReplicaSpec) -> ReplicaSpec:
        """Start the stages of a chain that was lost in processes of their own, so that the next loss shows which stage
        it was, and only messages of that stage are blamed. Returns the first stage's specification."""
        first = self._running[chain.replica] = msgspec.structs.replace(chain, chained=())
        self.topic.publish(spec_key(first.replica), msgspec.msgpack.encode(first))
        for member in chain.chained:
            self.lifecycle.release(member.replica)
            self._start(member)
        self.lifecycle.say(f"{', '.join(chain.stages)} shared a process that was lost, they get one each from now on")
        return first

    async def _until_unwanted(self, replica: str) -> None:
        """Waits until a replica for which no host has room is not wanted any more."""
        revision, keys = 0, (END, retire_key(replica))
        while all(self.topic.get(key) is None for key in keys):
            revision = await self.topic.wait(revision, *keys)
        while replica not in self.launcher.waiting:  # noqa: ASYNC110  (a launcher announces nothing)
            await asyncio.sleep(ROOM_POLL_S)
