"""The ranks that train one policy together, supervised as one: they start together, and one that ends, ends all.

Invariants:
- before an incarnation starts, every process of the one before has ended: a socket, a file or a GPU has one user;
- ranks end with their train stage, before another one takes its place, and that is no loss of theirs;
- the loss is told with the rank that was lost first, not with those that noticed;
- a trainer group that never came up is started twice, then its error ends the run; a user's mistake ends it at
  once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema import Config
from configs.schema.debug import RANK
from models.fault_injection import fault_plan
from models.train.trainer_group.rank_spec import (
    EXIT_STAGE_GONE,
    MEETING,
    RankSpec,
    Rendezvous,
    needs_trainer_group,
    processes_of,
)
from pipeline.errors import EXIT_DISK_FULL, EXIT_USER_ERROR, ReplicaFailed, UsageError, check_repeatable
from pipeline.hosts.gpus import gpus_to_divide, slices, trainers_gpu
from pipeline.hosts.launcher import Handle, Launcher, Resources, ending
from pipeline.hosts.rendezvous import Entry, spec_key
from pipeline.hosts.shared_files import SharedFiles, shared_files
from pipeline.record.run_directory import RunDir
from pipeline.supervise.restart_server import POLL_S, STARTS_WITHOUT_SERVING, Waiting
from pipeline.supervise.restarts import Restarts
from stages.ports import read_value
from transport import TopicServer

TRAINER_GROUP: Final = "trainer-group"  # the name under which its restarts are counted
STAGE: Final = "train"
NOTICE_S: Final = 0.5  # time in which the others may show that they were lost first
END_S: Final = 10.0  # time that ranks get to end after the first has ended well
LONG_REPEAT_BATCHES: Final = 50  # runs up to which it is no matter to repeat all of it
STAGE_GONE_S: Final = 5.0  # time in which the runner learns of the stage's end itself


class Loss(Struct, frozen=True):
    """Why an incarnation ended: the rank that was lost first."""

    rank: int
    code: int


def check_trainer_group(config: Config) -> None:
    """Raises UsageError for a trainer group that this machine's runners do not start."""
    nodes = config.parallel.actor_num_nodes
    if needs_trainer_group(config) and nodes > 1 and config.run.runner != "ray":
        raise UsageError(
            f"--actor-num-nodes {nodes} places the trainer on several machines, but --runner {config.run.runner} "
            "starts all processes on this one; set --actor-num-nodes 1, or --runner ray"
        )


def verdict(codes: Mapping[int, int]) -> Loss | None:
    """Of the exit statuses so far by rank, in the order in which they came: who was lost first; None if none was.

    A rank that was killed, or made the user's mistake, comes before one that failed: it failed of the other's end.
    """
    failed = [Loss(rank, code) for rank, code in codes.items() if code]
    certain = [loss for loss in failed if loss.code < 0 or loss.code in (EXIT_USER_ERROR, EXIT_DISK_FULL)]
    return next(iter([*certain, *failed]), None)


def trainer_group_gpus(config: Config, visible: Sequence[str]) -> tuple[str, ...]:
    """GPUs of the ranks, one each, from the one that `--train-device` names on; none on a CPU. Raises UsageError."""
    first = trainers_gpu(config)
    if first is None or not visible:
        return ()
    count = config.parallel.actor_num_gpus_per_node
    chosen = tuple(visible[first : first + count])
    if len(chosen) < count:
        raise UsageError(
            f"--actor-num-gpus-per-node {count} needs as many GPUs from --train-device {config.train.train_device} on, "
            f"but {len(visible)} are visible; lower it, set CUDA_VISIBLE_DEVICES, or train with --train-device cpu"
        )
    return chosen


def engines_gpus(config: Config, visible: Sequence[str], engines: int) -> tuple[tuple[str, ...], ...]:
    """GPUs of each engine: those that the trainer has not, or all if that leaves too few. Raises UsageError."""
    per_engine = config.sglang.rollout_num_gpus_per_engine
    if config.asynchrony.colocate:
        return slices(visible, engines, per_engine, None)  # the trainer's too: they take turns
    if not needs_trainer_group(config):
        return slices(visible, engines, per_engine, trainers_gpu(config))
    taken = trainer_group_gpus(config, visible)
    free = [gpu for gpu in visible if gpu not in taken]
    return slices(free if engines * per_engine <= len(free) else visible, engines, per_engine, None)


class TrainerGroup:
    """The ranks of one run. `run` until they end well, or cancel it; whoever has the launcher stops them then."""

    def __init__(
        self,
        config: Config,
        rundir: RunDir,
        launcher: Launcher,
        restarts: Restarts,
        entry: Entry,
        topic: TopicServer,
        run_generation: int = 0,
    ) -> None:
        """Raises UsageError for too few GPUs."""
        self._run_generation = run_generation
        self._config, self._rundir, self._launcher, self._restarts = config, rundir, launcher, restarts
        self._entry, self._topic = entry, topic
        self._count = processes_of(config.parallel)
        self._gpus = trainer_group_gpus(config, gpus_to_divide(config))
        self._came_up = False
        self._stage_gone, self._stage_there, self._none_left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stages_lost = 0
        self._stage_there.set()
        self._none_left.set()
        self._sees: SharedFiles | None = None  # what must be on the ranks' nodes

    async def run(self) -> None:
        """Waits for the end of the ranks; starts all again after a loss. Raises ReplicaFailed or UsageError."""
        total = self._config.rollout.num_rollout or 0
        if self._config.checkpoint.save_interval is None and total > LONG_REPEAT_BATCHES:
            self._restarts.lifecycle.say(
                f"{TRAINER_GROUP}: without --save-interval a lost rank makes all {self._count} of them repeat the run "
                "from its start; set the number of batches that you would rather repeat"
            )
        if self._launcher.controller is not None:
            self._sees = await asyncio.to_thread(shared_files, self._rundir, self._config)
        for incarnation in itertools.count():
            await self._launcher.place(_name(0), sees=self._sees)
            await self._stage_there.wait()  # last: a stage that is lost from here on waits for what follows
            stages_lost = self._stages_lost
            self._none_left.clear()
            with self._launcher.held_port(_name(0)) as port:
                running = [await self._spawn(rank, incarnation, port) for rank in range(self._count)]
                loss = await self._one_incarnation(incarnation, running)
            self._none_left.set()
            if loss is None:
                return
            if not await self._lost_with_stage(loss, stages_lost):
                await self._after(loss, incarnation, running[loss.rank])

    async def stage_lost(self) -> None:
        """The train stage was killed. Waits until its ranks have ended, since they write what the next one reads."""
        self._stages_lost += 1
        self._stage_there.clear()
        self._stage_gone.set()
        await self._none_left.wait()
        self._topic.drop(MEETING)  # the next stage is not to look for them there

    def stage_again(self) -> None:
        """Another train stage takes its place: start the ranks for it."""
        self._stage_gone.clear()
        self._stage_there.set()

    async def _one_incarnation(self, incarnation: int, running: Sequence[Handle]) -> Loss | None:
        """One incarnation, until none of its processes is left; None if it ended well."""
        ranks = range(self._count)
        codes: dict[int, int] = {}

        async def watch(rank: int) -> None:
            codes[rank] = await running[rank].wait()

        async with asyncio.TaskGroup() as tasks:
            ends = [tasks.create_task(watch(rank)) for rank in ranks]
            arrival = tasks.create_task(self._arrival(incarnation))
            gone = tasks.create_task(self._stage_gone.wait())
            await asyncio.wait([gone, *ends], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                loss: Loss | None = Loss(0, EXIT_STAGE_GONE)
            else:
                ended_well = not any(codes.values())
                await asyncio.wait(ends, timeout=END_S if ended_well else NOTICE_S)
                loss = verdict(codes)
            gone.cancel()
            arrival.cancel()
            self._came_up = self._came_up or self._met() >= incarnation  # since the last look
            for process in running:
                await process.kill()
        return loss

    async def _spawn(self, rank: int, incarnation: int, port: int) -> Handle:
        name = _name(rank)
        await self._launcher.place(name, sees=self._sees)
        spec = RankSpec(
            rank=rank,
            processes=self._count,
            local_rank=rank % self._config.parallel.actor_num_gpus_per_node,
            incarnation=incarnation,
            store=(self._launcher.address(_name(0)), port),
            address=f"trainer-group-{incarnation}.sock",
            # Calls are counted from one by each incarnation, and draw anew.
            faults=fault_plan(
                self._config,
                RANK,
                f"{name}/{incarnation}",
                run_generation=self._run_generation,
                run_dir=self._rundir.path,
            ),
        )
        self._topic.publish(spec_key(name), msgspec.msgpack.encode(spec))
        process = self._entry.process("pipeline.hosts.trainer_rank", name, env=self._rank_environment(rank), sweep=True)
        return await self._launcher.spawn(process, Resources(self._gpus))

    def _rank_environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set, for what reads it; the ranks have their specifications."""
        per_node = self._config.parallel.actor_num_gpus_per_node
        # All on this machine, whatever its name resolves to; each on another host knows its own way to the others.
        one_host = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        return {
            **(one_host if self._launcher.controller is None else {}),
            "RANK": str(rank),
            "WORLD_SIZE": str(self._count),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
        }

    async def _arrival(self, incarnation: int) -> None:
        """Waits for the topic to name the incarnation. Unblocked by it, or by cancellation."""
        waiting = Waiting(TRAINER_GROUP, self._restarts.lifecycle.say, doing=f"{self._count} ranks are starting since")
        while self._met() < incarnation:
            waiting.tick()
            await asyncio.sleep(POLL_S)
        self._came_up = True
        if incarnation > 0:
            self._restarts.lifecycle.say(
                f"{TRAINER_GROUP}: {self._count} ranks are up again after {waiting.seconds:.0f} s; they restore the "
                "newest save and repeat what came after it"
            )

    def _met(self) -> int:
        met = read_value(self._topic, MEETING, Rendezvous)
        return -1 if met is None else met.incarnation

    async def _lost_with_stage(self, loss: Loss, before: int) -> bool:
        """Whether the ranks ended because their train stage did, of which the runner may learn later than they.
        `before`: stages that were lost before they started."""
        if loss.code == EXIT_STAGE_GONE and self._stages_lost == before:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STAGE_GONE_S):
                    await self._stage_gone.wait()
        return self._stages_lost > before

    async def _after(self, loss: Loss, incarnation: int, process: Handle) -> None:
        """Tell the loss and wait out the backoff, or give up. Raises ReplicaFailed or UsageError."""
        log, words = process.log, process.last_error()
        check_repeatable(_name(loss.rank), loss.code, words, self._rundir.path)
        why = f"{ending(loss.code)} of rank {loss.rank}"
        if not self._came_up and incarnation + 1 >= STARTS_WITHOUT_SERVING:
            raise ReplicaFailed(
                f"{TRAINER_GROUP} ended with {why} before it came up, {incarnation + 1} times: {words}; see {log}"
            )
        await self._restarts.again(STAGE, TRAINER_GROUP, why, words, log)


def _name(rank: int) -> str:
    return f"train-rank-{rank}"
