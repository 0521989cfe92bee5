"""The engines stage: the single owner of the engines, from their first weights to the last abort; and its fetchers.

The supervisor starts and restarts engine and router processes and publishes their addresses. This stage attaches to
each engine, frozen ones too, and alone controls them: it loads weights, frees and restores memory, registers engines
with the router, watches loads, and publishes the engine directory (`directory/<engine>`) and `router_state`. All
other parts are clients of these values, so they start, die and move without touching an engine.

A fetcher does on another node what must happen beside its engines: it keeps the weights of a version on that node and
loads them into an engine. The engines stage decides when: it pauses the engine, orders the load, verifies, and
resumes the engine. A version is fetched once for all engines of a node (`ports.weights`). Orders and answers are
values of the topic (stages/engines/weight_routes.py), so a restarted fetcher or engines stage finds what is to be
done.

Invariants:
- there is one replica, and no stream: its state is on the topic and in the engines themselves;
- engines outlive it: while it is away they keep their weights, and the directory stands; after a restart it attaches
  again and loads nothing where nothing is due;
- it ends when the controller says so, after all streams: generation and evaluation need the engines until then;
- a fetcher loads nothing without an order, and orders are numbered;
- a slot that an engine loads from is released when its order is withdrawn or replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import Final

import msgspec

from configs.schema import router_kind
from models.engines.client import EngineClient
from models.errors import EngineError, WeightsError
from models.weights.delta_mirror import DeltaMirror
from stages.base import Stage, StageContext, side_by_side
from stages.engines.colocation import all_given_back, colocated
from stages.engines.engine_control import EngineControl
from stages.engines.load_watch import LoadWatch
from stages.engines.router_workers import RouterWorkers
from stages.engines.weight_routes import WeightRoutes, WeightsBrought, WeightsOrder
from stages.ports import Ports, Topic, read_value
from stages.topic_values import ADDRESS, BROUGHT, ORDER, addresses, updates_ended

END: Final = "end"  # topic key: the streams have ended, so engines are not needed any more


class _WeightsStage(Stage):
    """A stage that loads weights into engines. They share one local copy of delta weights, named after the run, so that
    the copy of a killed stage is taken over."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        run = uuid.uuid5(uuid.NAMESPACE_URL, str(context.run_dir.resolve())).hex[:12]
        self._mirror = DeltaMirror(f"mirror-{run}-{context.replica}", context.run_dir)

    async def close(self) -> None:
        self._mirror.close()


class EnginesStage(_WeightsStage):
    """All engines that have an address."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.engines: dict[str, EngineControl] = {}
        self.watch = LoadWatch(self.config, self.engines, self.activity)
        self.router = RouterWorkers(self.activity) if router_kind(self.config) != "none" else None

    async def run(self, ports: Ports) -> None:
        """Waits for the topic: new engines, a drain, the end. Unblocked by the end alone."""
        topic = ports.topic
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.watch.run(topic))]
            if self.router is not None:
                background.append(tasks.create_task(self.router.run(topic)))
            revision, aborted = 0, False
            while topic.get(END) is None:
                for name in addresses(topic).keys() - self.engines.keys():
                    control = self.engines[name] = EngineControl(name, self, self._mirror, ports.weights)
                    background.append(tasks.create_task(control.follow(topic)))
                if topic.get("drain") is not None and not aborted:
                    aborted = True
                    # A draining client sends nothing more and keeps the partial output.
                    await side_by_side(map(_abort, self.engines.values()))
                revision = await topic.wait(revision, ADDRESS, "drain", END)
            await updates_ended(topic, self.config.run.drain_s / 2)  # an engine outlives the run, if it is external
            if colocated(self.config):
                await all_given_back(topic, self.config.run.drain_s / 2)  # for a trainer that still has to save
            for task in background:
                task.cancel()


async def _abort(control: EngineControl) -> None:
    if control.client is not None:
        with contextlib.suppress(EngineError):  # an engine that is down holds nothing
            await control.client.abort()


log = logging.getLogger("sluice.fetcher")


class FetcherStage(_WeightsStage):
    """Carries out all orders of one node concurrently. It has no stream."""

    async def run(self, ports: Ports) -> None:
        """Waits for orders on the topic; unblocked by the end of the run, or when no engine is left on the node."""
        topic, prefix, retire = ports.topic, f"{ORDER}{self.context.replica}/", f"retire/{self.context.replica}"
        at_work: dict[str, tuple[str, asyncio.Task[None]]] = {}  # engine -> the order's id
        async with asyncio.TaskGroup() as tasks:
            revision = 0
            while topic.get(END) is None and topic.get(retire) is None:
                for key in topic.items(prefix):
                    order = read_value(topic, key, WeightsOrder)
                    if key in at_work and (order is None or order.id != at_work[key][0]):
                        at_work.pop(key)[1].cancel()
                    if order is not None and key not in at_work:
                        at_work[key] = order.id, tasks.create_task(self._carry_out(order, key, ports))
                revision = await topic.wait(revision, prefix, END, retire)
            if topic.get(END) is not None:
                await updates_ended(topic, self.config.run.drain_s / 2)
            for _, task in at_work.values():
                task.cancel()

    async def _carry_out(self, order: WeightsOrder, key: str, ports: Ports) -> None:
        """Runs until the order is withdrawn, which cancels it. An error becomes the answer."""
        topic, engine, applied = ports.topic, order.engine, 0
        answer = BROUGHT + key.removeprefix(ORDER)
        previous = read_value(topic, answer, WeightsBrought)
        if previous is not None and previous.id == order.id:  # answered by an earlier process of this fetcher
            applied = previous.applied
        timeout_s = self.config.rollout.request_timeout_secs
        routes = WeightRoutes(engine.engine, self.config.update, self._mirror)
        try:
            async with EngineClient(engine.url, timeout_s=timeout_s, token=engine.token) as client:
                here = await ports.weights.local(order.announcement)
                async with routes.choose(here, in_full=order.in_full).open(client, here) as transfer:
                    await topic.publish(answer, msgspec.msgpack.encode(WeightsBrought(order.id, applied)))
                    while True:
                        order = await self._next_apply(topic, key, order, applied)
                        with self.activity.working():
                            updated = await transfer(order.flush_cache)
                        applied = order.applies
                        done = WeightsBrought(order.id, applied, updated)
                        await topic.publish(answer, msgspec.msgpack.encode(done))
        except (EngineError, WeightsError) as error:
            log.warning("%s, version %d: %s", engine.engine, order.announcement.version, error)
            self.activity.failures += 1
            await topic.publish(answer, msgspec.msgpack.encode(WeightsBrought(order.id, applied, error=str(error))))
        finally:
            await routes.close()

    async def _next_apply(self, topic: Topic, key: str, order: WeightsOrder, applied: int) -> WeightsOrder:
        """The order once it wants the weights loaded again. Waits for that."""
        revision = 0
        while True:
            newest = read_value(topic, key, WeightsOrder)
            if newest is not None and newest.id == order.id and newest.applies > applied:
                return newest
            revision = await topic.wait(revision, key)
