"""What a started process of the run does: a stage replica or a rank of the trainer group.

Started as `python -m pipeline.hosts.worker RUN_ID TOPIC NAME [KEYS]`, or as a copy of a process that has imported what
it needs (fork_server.py) and opened nothing. It finds everything else on the topic. `train-rank-N` names a rank; rank 0
also announces there that the group is up. Every other name is a stage replica: it connects the ports, sets the stage
up, runs it and publishes its figures. Tasks of the controller call `run_replica` too.

Exit codes: 0 (done, or nothing is left to do), 1 (failed: may be restarted), 2 (the user's mistake, such as an import
path: not restarted), 3 (the peer in the trainer group is gone) and 28 (no space left). The last line of the log gives
the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from configs.schema import Config
from models.fault_injection import FaultPlan, fault_plan
from models.import_path import add_working_directory, import_path, raised
from models.train.trainer_group.rank_spec import MEETING, RankSpec, Rendezvous
from pipeline.errors import exit_code, keep_exit_code, leaf, user_error
from pipeline.facts.otel import span_writer
from pipeline.facts.run_log import release
from pipeline.facts.stats import CPU, QUEUED, STATS_PREFIX, StageStats
from pipeline.hosts import rendezvous
from pipeline.hosts.launcher import SOCKETS
from pipeline.hosts.machine import collect_less, cpu_seconds
from stages.base import Stage, StageContext, StageOptions, TrainOptions, beside
from stages.ports import Inlet as StageInlet
from stages.ports import Lease, Outlet, Ports, wait_value
from transport import ChainLink, EntryInlet, Inlet, Node, StreamFinished, TopicClient

T_co = TypeVar("T_co", covariant=True)


class FaultyInlet(Generic[T_co]):
    """An inlet some of whose messages meet a fault when the stage takes them."""

    def __init__(self, inlet: StageInlet[T_co], plan: FaultPlan) -> None:
        self._inlet, self._plan = inlet, plan

    async def receive(self) -> Lease[T_co] | None:
        """As the inlet. Raises InjectedError, which ends the replica: it is not about the one message."""
        lease = await self._inlet.receive()
        if lease is not None:
            await self._plan.meet(lease.key, lease.attempt)
        return lease


STATS_INTERVAL_S = 0.5
HELD_S: Final = 2.0  # least age of what is reported as held in a chain; of other streams their hubs know it
UNBOUNDED_BYTES: Final = 1 << 60
BUILT_IN: Final = "stages."  # import paths of the project's stages

log = logging.getLogger("sluice.worker")


class PortSpec(Struct, frozen=True):
    """The address of a port and the type of its messages."""

    stream: str
    address: str
    schema: str  # import path of the message type
    window_items: int = 16
    window_bytes: int = 8 << 20


class ReplicaSpec(Struct, frozen=True):
    stage: str
    replica: str
    path: str  # import path of the stage class
    index: int
    replicas: int
    concurrency: int
    run_dir: str
    inlets: dict[str, PortSpec]
    outlets: dict[str, PortSpec]
    loops: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # of a custom stage, as the user wrote them
    built_in: StageOptions | None = None
    run_generation: int = 0
    host: str = ""  # of a train stage: its address for other hosts; empty: there are none
    chained: tuple[ReplicaSpec, ...] = ()  # of the stages that follow it in the same process
    room: int = 0  # of a chain: messages that an inlet holds while a later stage works on them, and that a link holds

    @property
    def members(self) -> tuple[ReplicaSpec, ...]:
        """The replicas of the process in the order of the flow."""
        return (self, *self.chained)

    @property
    def stages(self) -> tuple[str, ...]:
        """Their stages."""
        return tuple(member.stage for member in self.members)


@dataclass
class Place:
    """The place of a replica in its process: the links to its neighbours, None at the ends of a chain."""

    process: ReplicaSpec
    before: ChainLink[Any] | None
    after: ChainLink[Any] | None
    retired: asyncio.Event = field(default_factory=asyncio.Event)  # it takes no new work


async def run_replica(spec: ReplicaSpec, node: Node, topic: TopicClient, config: Config) -> None:
    """Run a replica, with those that are chained to it, until its inlets end or it is retired. Errors of a stage
    propagate."""
    if not spec.chained:
        await _run_member(spec, node, topic, config, Place(spec, None, None))
        return
    links = [_link(before, after, spec.room) for before, after in pairwise(spec.members)]
    ends = zip([None, *links], [*links, None], strict=True)
    members = [(member, Place(spec, *end)) for member, end in zip(spec.members, ends, strict=True)]
    async with beside(_retire(members, node, topic)), asyncio.TaskGroup() as tasks:
        for member, place in members:
            tasks.create_task(_run_member(member, node, topic, config, place))


async def _retire(members: Sequence[tuple[ReplicaSpec, Place]], node: Node, topic: TopicClient) -> None:
    """Waits for the topic `retire/<process>`. From the last member to the first: the link behind it gives what waits in
    it to other replicas, so that a stage ends only after that, and the member takes no new work."""
    await wait_value(topic, rendezvous.retire_key(members[0][0].replica))
    for member, place in reversed(members):
        if place.after is not None:
            await place.after.leave(await _outlet(node, member.outlets["out"], member.replica))
        place.retired.set()


def _link(before: ReplicaSpec, after: ReplicaSpec, room: int) -> ChainLink[Any]:
    custom = not all(member.path.startswith(BUILT_IN) for member in (before, after))
    return ChainLink(import_path(after.inlets["in"].schema), room, copies=custom)


async def _run_member(spec: ReplicaSpec, node: Node, topic: TopicClient, config: Config, place: Place) -> None:
    with span_writer(config, node.run_id, Path(spec.run_dir), spec.replica, spec.stage) as spans:
        counts, options = (spec.index, spec.replicas, spec.concurrency), (spec.options, spec.built_in, spec.loops)
        context = StageContext(config, Path(spec.run_dir), spec.replica, spans, *counts, *options)
        stage: Stage = import_path(spec.path)(context)
        try:
            await stage.setup()
            if config.run.runner != "inprocess" and spec.stage != "train":
                collect_less()
            await _serve(stage, spec, node, topic, place)
        except BaseException:
            # What went wrong decides whether the replica starts again: an error of the clean-up must not replace it.
            try:
                await stage.close()
            except Exception as error:
                log.warning("%s: closing after an error failed as well: %r", spec.replica, error)
            raise
        await stage.close()


async def _serve(stage: Stage, spec: ReplicaSpec, node: Node, topic: TopicClient, place: Place) -> None:
    name, before, after = spec.replica, place.before, place.after
    outlets: dict[str, Any] = {
        key: await _outlet(node, port, name) for key, port in spec.outlets.items() if after is None or key != "out"
    }
    inlets = {key: await _inlet(node, port, name, place) for key, port in spec.inlets.items()}
    taken: dict[str, StageInlet[Any]] = dict(inlets)
    merged = []
    if before is not None:
        taken["in"] = before
        merged.append(before.merge(inlets["in"]))
    if after is not None:
        outlets["out"] = after
        taken = {key: EntryInlet(inlet, after, spec.inlets[key].window_items) for key, inlet in taken.items()}
    run_dir = Path(spec.run_dir)
    fetched = rendezvous.FetchedWeights(node, topic, f"{spec.replica}-{secrets.token_hex(4)}", run_dir)
    weights = rendezvous.OfferedWeights(node, topic, spec.host) if spec.host else fetched
    faults = fault_plan(stage.config, spec.stage, spec.replica, run_generation=spec.run_generation, run_dir=run_dir)
    if faults is not None:
        taken = {key: FaultyInlet(inlet, faults) for key, inlet in taken.items()}
    ports = Ports(spec.replica, taken, outlets, topic, weights)
    report = partial(_stats, stage, spec, place)
    waits = [_publish_stats(report, spec.replica, topic), _drain(place.retired, inlets.values())]
    if not place.process.chained:
        waits.append(_retire([(spec, place)], node, topic))
    async with beside(*waits), asyncio.TaskGroup() as merging:
        for merge in merged:
            merging.create_task(merge)
        try:
            await stage.run(ports)
        finally:
            fetched.close()
        if after is not None:  # which may still hand on what came in here
            await after.end()
            await after.consumed.wait()
        for inlet in inlets.values():  # what a retired replica still holds, parts of groups, goes to another one
            await inlet.close()
    if before is not None:
        await before.give_up()
        before.consumed.set()
    await topic.publish(STATS_PREFIX + spec.replica, report())


async def _outlet(node: Node, port: PortSpec, name: str) -> Outlet[Any]:
    return await node.outlet(port.address, port.stream, import_path(port.schema), replica=name)


async def _inlet(node: Node, port: PortSpec, name: str, place: Place) -> Inlet[Any]:
    """Messages that entered a chain stay in the care of their inlet until its last stage has done with them."""
    items, size = port.window_items, port.window_bytes
    if place.after is not None:
        items, size = max(items, place.process.room), UNBOUNDED_BYTES
    return await node.inlet(
        port.address, port.stream, import_path(port.schema), window_items=items, window_bytes=size, replica=name
    )


def _stats(stage: Stage, spec: ReplicaSpec, place: Place) -> bytes:
    activity = stage.activity
    seconds = activity.settle()
    own = {} if stage.config.run.runner == "inprocess" else {CPU: cpu_seconds(os.getpid())}
    own |= {QUEUED: float(place.before.queued)} if place.before is not None else {}
    stats = StageStats(
        *(spec.stage, spec.replica, time.time()),
        *(seconds["busy"], seconds["starved"], seconds["blocked"], seconds["stalled"]),
        *(activity.items_in, activity.items_out, activity.failures, activity.tokens, activity.in_flight),
        extra={**activity.extra, **own},
        held=place.before.held(HELD_S) if place.before is not None else {},
    )
    return msgspec.msgpack.encode(stats)


async def _drain(retired: asyncio.Event, inlets: Collection[Inlet[Any]]) -> None:
    """Waits for the retirement. The inlets end then: messages not yet begun return to their hubs."""
    await retired.wait()
    for inlet in inlets:
        await inlet.drain()


async def _publish_stats(report: Callable[[], bytes], replica: str, topic: TopicClient) -> None:
    """Waits for the clock; runs until cancelled."""
    while True:
        await topic.publish(STATS_PREFIX + replica, report())
        await asyncio.sleep(STATS_INTERVAL_S)


TRAINER_LOCK: Final = ".trainer"
LOCK_POLL_S: Final = 0.5


@contextlib.asynccontextmanager
async def only_trainer(run_dir: Path) -> AsyncIterator[None]:
    """Holds the place of the run's train stage. Waits for the end of one before, which writes there too: cut off from
    the run, on a node of which nothing is heard, it may live on for a while."""
    with (run_dir / TRAINER_LOCK).open("w") as lock:
        waits = False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not waits:
                log.warning("another train stage still writes in %s; this one begins when it has ended", run_dir)
            waits = True
            await asyncio.sleep(LOCK_POLL_S)
        yield


async def _run_replica_process(entry: rendezvous.Entry, name: str) -> None:
    trains = name.startswith("train-")  # and offers its weights
    async with entry.serving_node(name, lambda: topic) if trains else entry.node(name) as node:
        topic = await node.topic(entry.topic)
        spec, config = await rendezvous.read(topic, name, ReplicaSpec)
        if isinstance(spec.built_in, TrainOptions):
            own = rendezvous.trainers_place(topic, spec.built_in, spec.run_dir, config)
            async with only_trainer(Path(spec.run_dir)) if spec.host else contextlib.nullcontext():
                await run_replica(msgspec.structs.replace(spec, built_in=own), node, topic, config)
            return
        with rendezvous.settled(topic, spec.run_dir, config) as (run_dir, config_here):
            chained = tuple(msgspec.structs.replace(member, run_dir=run_dir) for member in spec.chained)
            here = msgspec.structs.replace(spec, run_dir=run_dir, chained=chained)
            await run_replica(here, node, topic, config_here)


async def find_rank_spec(entry: rendezvous.Entry, name: str) -> tuple[RankSpec, Config]:
    """The specification of this rank. Its connection ends here: a rank that computes answers nothing for minutes."""
    async with entry.node(name) as node:
        return await rendezvous.read(await node.topic(entry.topic), name, RankSpec)


async def announce_meeting(entry: rendezvous.Entry, name: str, meeting: Rendezvous) -> None:
    async with entry.node(name) as node:
        await (await node.topic(entry.topic)).publish(MEETING, msgspec.msgpack.encode(meeting))


def _run_rank_process(entry: rendezvous.Entry, name: str) -> None:
    """A rank of the trainer group."""
    spec, config = asyncio.run(find_rank_spec(entry, name))
    spec = msgspec.structs.replace(spec, address=str(Path(os.environ[SOCKETS], spec.address)))
    from models.train.trainer_group.rank import run_rank  # imports torch

    run_rank(spec, config, lambda meeting: asyncio.run(announce_meeting(entry, name, meeting)))


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    add_working_directory()
    entry, name = rendezvous.from_command(argv)
    where = f"pid {os.getpid()} on {socket.gethostname()}"
    logging.info("%s starts: %s, sluice %s", name, where, release())
    is_rank = name.startswith("train-rank-")
    try:
        if is_rank:
            _run_rank_process(entry, name)
        else:
            import uvloop

            uvloop.run(_run_replica_process(entry, name))
        logging.info("%s ends: its work is done, or it is not needed any more", name)
    except BaseException as error:
        cause = leaf(error)
        if isinstance(cause, StreamFinished):  # other replicas took the work of this one, and the run is complete
            logging.info("%s ends: %s", name, cause)
            return 0
        logging.exception("%s failed", name)
        known = user_error(cause)
        logging.error("%s", raised(cause) if known is None else f"{type(cause).__name__}: {known}")
        if is_rank:
            logging.shutdown()
            os._exit(exit_code(cause))  # at once: threads of a broken process group may wait for ever
        return exit_code(cause)
    finally:
        keep_exit_code()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
