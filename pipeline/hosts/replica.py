"""One stage replica, wherever it runs: connect the ports, set the stage up, run it, publish its figures.

`ReplicaSpec` is all that a replica needs to know beside the configuration; a task of the controller and the worker
process both come here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from msgspec import Struct

from configs.schema import Config
from models.fault_injection import fault_plan
from models.import_path import import_path
from pipeline.hosts.faulty_inlet import FaultyInlet
from pipeline.hosts.processors import cpu_seconds
from pipeline.hosts.rendezvous import awaited, retire_key
from pipeline.hosts.stream_ports import AnyInlet, PortSpec, StreamPorts
from pipeline.hosts.weights_source import FetchedWeights, OfferedWeights
from pipeline.observe.stats import CPU, STATS_PREFIX, StageStats
from pipeline.observe.trace import TraceWriter
from stages.base import Stage, StageContext, StageOptions, beside
from stages.ports import Inlet as TakenFrom
from stages.ports import Ports
from transport import Node, TopicClient

STATS_INTERVAL_S = 0.5

log = logging.getLogger("sluice.replica")


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
    host: str = ""  # of a train stage: under which other hosts reach what it binds; empty: there are none


async def run_replica(spec: ReplicaSpec, node: Node, topic: TopicClient, config: Config) -> None:
    """Run one replica until its inlets end, or it is retired. Errors of the stage propagate."""
    trace, enabled = Path(spec.run_dir, "trace"), config.observe.trace
    with TraceWriter(trace, spec.replica, stage=spec.stage, enabled=enabled) as spans:
        context = StageContext(
            config=config,
            run_dir=Path(spec.run_dir),
            replica=spec.replica,
            spans=spans,
            index=spec.index,
            replicas=spec.replicas,
            concurrency=spec.concurrency,
            options=spec.options,
            built_in=spec.built_in,
            loops=spec.loops,
        )
        stage: Stage = import_path(spec.path)(context)
        try:
            await stage.setup()
            await _serve(stage, spec, node, topic)
        except BaseException:
            # What went wrong decides whether the replica starts again: an error of the clean-up must not replace it.
            try:
                await stage.close()
            except Exception as error:
                log.warning("%s: closing after an error failed as well: %r", spec.replica, error)
            raise
        await stage.close()


async def _serve(stage: Stage, spec: ReplicaSpec, node: Node, topic: TopicClient) -> None:
    streams = StreamPorts(node, topic, spec.replica)
    outlets = {name: await streams.outlet(port) for name, port in spec.outlets.items()}
    inlets = {name: await streams.inlet(port) for name, port in spec.inlets.items()}
    fetched = FetchedWeights(node, topic, f"{spec.replica}-{secrets.token_hex(4)}", Path(spec.run_dir))
    weights = OfferedWeights(node, topic, spec.host) if spec.host else fetched
    taken: dict[str, TakenFrom[Any]] = dict(inlets)
    faults = fault_plan(
        stage.config, spec.stage, spec.replica, run_generation=spec.run_generation, run_dir=Path(spec.run_dir)
    )
    if faults is not None:
        taken = {name: FaultyInlet(inlet, faults) for name, inlet in inlets.items()}
    ports = Ports(spec.replica, taken, outlets, topic, weights)
    async with beside(_publish_stats(stage, spec, ports), _retire(spec, topic, inlets.values()), streams.follow()):
        try:
            await stage.run(ports)
        finally:
            fetched.close()
        for inlet in inlets.values():  # what a retired replica still holds, parts of groups, goes to another one
            await inlet.close()
    await ports.topic.publish(STATS_PREFIX + spec.replica, _stats(stage, spec))


def _stats(stage: Stage, spec: ReplicaSpec) -> bytes:
    activity = stage.activity
    seconds = activity.settle()
    own = {} if stage.config.run.runner == "inprocess" else {CPU: cpu_seconds(os.getpid())}
    return StageStats(
        stage=spec.stage,
        replica=spec.replica,
        unix_s=time.time(),
        busy_s=seconds["busy"],
        starved_s=seconds["starved"],
        blocked_s=seconds["blocked"],
        stalled_s=seconds["stalled"],
        items_in=activity.items_in,
        items_out=activity.items_out,
        failures=activity.failures,
        tokens=activity.tokens,
        in_flight=activity.in_flight,
        extra={**activity.extra, **own},
    ).encode()


async def _retire(spec: ReplicaSpec, topic: TopicClient, inlets: Collection[AnyInlet]) -> None:
    """Waits for the topic `retire/<replica>`. The inlets end then: what was not begun goes back to their hubs."""
    await awaited(topic, retire_key(spec.replica))
    for inlet in inlets:
        await inlet.drain()


async def _publish_stats(stage: Stage, spec: ReplicaSpec, ports: Ports) -> None:
    """Waits for the clock; runs until cancelled."""
    while True:
        await ports.topic.publish(STATS_PREFIX + spec.replica, _stats(stage, spec))
        await asyncio.sleep(STATS_INTERVAL_S)
