"""The trainer as one unit: the train stage and, where there are any, its ranks. They start, are lost and end together,
here or with their node, while engines, prompts and finished groups stay.

The next incarnation loads the newest state: a checkpoint, a recovery point (stages/train/checkpoints.py), or the
initial weights. The ledger is not rolled back, for a step counts once it is reported, and only after its batch is on
disk. So the unit trains those batches again, reports none of them, and announces the version of the ledger's last step.
Thus no group is trained twice in the ledger, versions never fall, and no engine holds weights of a step that never
happened.

A rollback is such a start on purpose, from a checkpoint that the user chose and without the batches after it. The run
does not use a version twice: the checkpoint's weights become the version after the newest, and take the number of one
step. What was sampled before is not trained any more.

Invariants:
- before an incarnation starts, every process of the previous incarnation has ended: a socket, a file or a GPU has one
  user;
- a loss is reported with the process that was lost first, not with those that detected it;
- a loss is counted once, for the unit, whichever process it was;
- what another start would only repeat ends the run: a user's mistake, a full disk, an exception of the train stage, and
  ranks that fail twice before they ever found each other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema import Config
from configs.schema.run import RANK
from models.train.trainer_group.rank_spec import EXIT_PEER_GONE, MEETING, RankSpec, needs_trainer_group, processes_of
from pipeline.errors import EXIT_DISK_FULL, EXIT_USER_ERROR, TrainerDied, UsageError, check_repeatable
from pipeline.facts.stats import STATS_PREFIX
from pipeline.hosts.launcher import Handle, SharedFiles, describe_exit, shared_files
from pipeline.hosts.machine import gpus_to_divide, trainer_group_gpus
from pipeline.hosts.rendezvous import spec_key
from pipeline.hosts.worker import ReplicaSpec
from pipeline.supervise.restarts import HANG_S, POLL_S, STARTS_WITHOUT_SERVING, Supervision, Waiting, end_if_silent
from stages.base import TrainOptions, beside

NOTICE_S: Final = 0.5  # time in which another process may show that it was lost first
END_S: Final = 10.0  # time that ranks get to end after the stage has ended well
ROOM_POLL_S: Final = 2.0  # between two tries to place a unit whose node was lost


class Loss(Struct, frozen=True):
    """Why an incarnation ended: the process that was lost first, and its exit status."""

    name: str
    code: int


def first_lost(codes: Mapping[str, int]) -> Loss | None:
    """Of the exit statuses by process, in the order in which they came; None if all ended well.

    A process that was killed, or met the user's mistake, comes before a process that failed, which may have failed
    because of the former; a process that only noticed the end of its peer comes last.
    """
    failed = [Loss(name, code) for name, code in codes.items() if code]
    causes = [loss for loss in failed if loss.code != EXIT_PEER_GONE]
    certain = [loss for loss in causes if loss.code < 0 or loss.code in (EXIT_USER_ERROR, EXIT_DISK_FULL)]
    return next(iter([*certain, *causes, *failed]), None)


def silence_limit_s(config: Config) -> float:
    """After which a stage counts as hung: it publishes its figures twice a second, also while it computes."""
    return max(HANG_S, config.parallel.distributed_timeout_minutes * 60)


async def exit_codes(processes: Mapping[str, Handle], over: Callable[[Mapping[str, int]], bool]) -> dict[str, int]:
    """Exit statuses by process, in the order in which they came. Waits until `over`, then shortly for the others."""
    codes: dict[str, int] = {}
    changed = asyncio.Event()

    async def watch(name: str, process: Handle) -> None:
        codes[name] = await process.wait()
        changed.set()

    async with asyncio.TaskGroup() as tasks:
        ends = [tasks.create_task(watch(name, process)) for name, process in processes.items()]
        while not over(codes):
            changed.clear()
            await changed.wait()
        await asyncio.wait(ends, timeout=NOTICE_S if any(codes.values()) else END_S)
        for end in ends:
            end.cancel()
    return codes


class Ranks:
    """Starts the ranks of a run. Empty where the train stage trains by itself."""

    def __init__(self, shared: Supervision) -> None:
        """Raises UsageError for too few GPUs."""
        config = self._config = shared.config
        self._placement, self._launcher = shared.placement, shared.launcher
        self._entry, self._topic = shared.entry, shared.topic
        self._count = processes_of(config.parallel) if needs_trainer_group(config) else 0
        self._gpus = trainer_group_gpus(config, gpus_to_divide(config)) if self._count else ()
        self.names = [f"train-rank-{rank}" for rank in range(self._count)]

    async def start(self, incarnation: int, sees: SharedFiles | None) -> dict[str, Handle]:
        """Start all of them; the processes by name."""
        self._topic.drop(MEETING)  # the stage is to find this incarnation there
        if not self.names:
            return {}
        await self._launcher.place(self.names[0], sees=sees)
        with self._launcher.held_port(self.names[0]) as port:
            return {name: await self._spawn(rank, incarnation, port, sees) for rank, name in enumerate(self.names)}

    async def until_lost(self) -> None:
        """Run them beside a train stage that is a task. Waits until all have ended well. Raises TrainerDied: a task
        is not started again."""
        if not self.names:
            return
        processes = await self.start(0, None)
        codes = await exit_codes(processes, lambda codes: any(codes.values()) or len(codes) == len(processes))
        if (loss := first_lost(codes)) is not None:
            raise TrainerDied(
                f"{loss.name} ended with {describe_exit(loss.code)}: {processes[loss.name].last_error()}; with "
                "--runner inprocess the trainer is not started again: continue with --resume "
                f"{self._placement.rundir.path}, or use --runner local"
            )

    @property
    def up(self) -> bool:
        """Whether they have found each other, and rank 0 listens."""
        return self._topic.get(MEETING) is not None

    async def _spawn(self, rank: int, incarnation: int, port: int, sees: SharedFiles | None) -> Handle:
        name, config = self.names[rank], self._config
        await self._launcher.place(name, sees=sees)
        spec = RankSpec(
            rank=rank,
            processes=self._count,
            local_rank=rank % config.parallel.actor_num_gpus_per_node,
            incarnation=incarnation,
            store=(self._launcher.address(self.names[0]), port),
            address=f"trainer-group-{incarnation}.sock",
            # Each incarnation counts its calls from 1, and draws again.
            faults=self._placement.faults(RANK, f"{name}/{incarnation}"),
            run_dir=str(self._placement.rundir.path.absolute()),
        )
        self._topic.publish(spec_key(name), msgspec.msgpack.encode(spec))
        process = self._entry.process(name)
        return await self._launcher.spawn(
            msgspec.structs.replace(process, env=self._environment(rank), gpus=self._gpus, sweep=True)
        )

    def _environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set, for libraries that read it; the ranks have their specifications."""
        per_node = self._config.parallel.actor_num_gpus_per_node
        # All on this machine, whatever its name resolves to; a rank on another host knows its own way to the others.
        one_host = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        return {
            **(one_host if self._launcher.controller is None else {}),
            "RANK": str(rank),
            "WORLD_SIZE": str(self._count),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
        }


class TrainerUnit:
    """The train stage and its ranks as processes. `run` until the stage ends well, or cancel it; the owner of the
    launcher stops them then."""

    def __init__(self, shared: Supervision, ranks: Ranks) -> None:
        self._config, self._rundir = shared.config, shared.placement.rundir
        self._launcher, self._restarts, self._topic = shared.launcher, shared.restarts, shared.topic
        self._entry, self._ranks = shared.entry, ranks
        self._came_up = False  # its ranks, in any incarnation
        self._silence_s = silence_limit_s(self._config)
        self._stage: Handle | None = None  # its process
        self._back: int | None = None  # step of the checkpoint that the user wants to go back to

    async def run(self, spec: ReplicaSpec) -> None:
        """Waits for the good end of the stage; starts the whole unit again after a loss. Raises TrainerDied or
        UsageError."""
        for incarnation in itertools.count():
            processes = await self._start(spec, incarnation)
            self._stage = processes[spec.replica]
            loss = await self._one_incarnation(spec.replica, incarnation, processes)
            if loss is None:
                break
            spec = await self._next(spec, incarnation, loss, processes)
        self._topic.drop(spec_key(spec.replica))

    async def rollback(self, step: int) -> None:
        """End the unit, which then starts again from the checkpoint of a step. Raises UsageError while it starts."""
        if self._stage is None or not self._stage.alive:
            raise UsageError("the trainer is being started again; try again when it trains")
        self._back = step
        await self._stage.kill()

    async def _start(self, spec: ReplicaSpec, incarnation: int) -> dict[str, Handle]:
        """Place and start all processes. Under Ray, a unit that lost its node waits for another node."""
        stage, sees, reported = spec.replica, None, False
        if self._launcher.controller is not None:
            sees = await asyncio.to_thread(shared_files, self._rundir, self._config)
        while True:
            try:
                await self._launcher.place(stage, sees=sees)
                if spec.host:  # other processes reach its sockets there
                    spec = msgspec.structs.replace(spec, host=self._launcher.address(stage))
                ranks = await self._ranks.start(incarnation, sees)
                break
            except UsageError as error:
                if incarnation == 0:
                    raise
                if not reported:
                    self._restarts.lifecycle.say(f"{stage}: waits for a node ({error})")
                reported = True
                await self._release(stage)
                await asyncio.sleep(ROOM_POLL_S)
        self._topic.publish(spec_key(stage), msgspec.msgpack.encode(spec))
        return {stage: await self._launcher.spawn(self._entry.process(stage)), **ranks}

    async def _release(self, stage: str) -> None:
        """Give the unit's places back: its processes are placed together, on other nodes."""
        for name in (stage, *self._ranks.names):
            await self._launcher.release(name)

    async def _one_incarnation(self, stage: str, incarnation: int, processes: Mapping[str, Handle]) -> Loss | None:
        """One incarnation, until none of its processes is left; None if the stage ended well."""
        silence = end_if_silent(self._topic, STATS_PREFIX + stage, stage, processes[stage], self._silence_s)
        async with beside(silence, self._arrival(stage, again=incarnation > 0)):
            codes = await exit_codes(processes, lambda codes: stage in codes or any(codes.values()))
        self._came_up = self._came_up or self._ranks.up  # since the last look
        loss = None if codes.get(stage) == 0 else first_lost(codes)
        for name, process in processes.items():
            if loss is not None or name != stage:
                await process.kill()
        return loss

    async def _arrival(self, stage: str, *, again: bool) -> None:
        """Waits until the ranks are up; a line for the user while that lasts. Ends then, or by cancellation."""
        ranks, say = len(self._ranks.names), self._restarts.lifecycle.say
        waiting = Waiting(stage, say, doing=f"{ranks} ranks are starting since")
        while ranks and not self._ranks.up:
            waiting.tick()
            await asyncio.sleep(POLL_S)
        self._came_up = True
        if ranks and again:
            say(f"{stage}: {ranks} ranks are up again after {waiting.seconds:.0f} s")

    async def _next(
        self, spec: ReplicaSpec, incarnation: int, loss: Loss, processes: Mapping[str, Handle]
    ) -> ReplicaSpec:
        """Report the loss and wait out the backoff; what to start next. Raises TrainerDied or UsageError."""
        stage, process = spec.replica, processes[loss.name]
        words = process.last_line() if loss.name == stage else process.last_error()
        check_repeatable(loss.name, loss.code, words, self._rundir.path)
        why = describe_exit(loss.code) + ("" if loss.name == stage else f" of {loss.name}")
        failed = loss.code > 0 and loss.code != EXIT_PEER_GONE
        if failed and loss.name != stage and not self._came_up and incarnation + 1 >= STARTS_WITHOUT_SERVING:
            raise TrainerDied(
                f"{stage} ended with {why} before its ranks found each other, {incarnation + 1} times: {words}; see "
                f"{process.log}"
            )
        options, back = None, self._back
        self._back = None
        assert isinstance(spec.built_in, TrainOptions)
        # Engines that share its device wait for the lost trainer's turn; an exception of the stage would come again.
        if back is not None:
            self._restarts.lifecycle.lost(spec.stage, stage, f"a rollback to step {back}")
            options = await self._restarts.lifecycle.trainer_state(spec.built_in, back)
        elif not self._config.asynchrony.colocate and not (failed and loss.name == stage):
            await self._restarts.again(spec.stage, stage, why, words, process.log)
            options = await self._restarts.lifecycle.trainer_state(spec.built_in)
        if options is None:
            raise TrainerDied(
                f"{stage} ended with {why}{f': {words}' if failed else ''}; continue from the last checkpoint with "
                f"--resume {self._rundir.path}"
            )
        if self._ranks.names and any(handle.host_lost for handle in processes.values()):
            await self._release(stage)
        return msgspec.structs.replace(spec, built_in=options)
