"""The fetcher of a node: what has to be done beside engines that are not on the engines stage's node.

It has an engine's weights lie on its node and puts them into the engine, as the engines stage orders. That alone
decides when: it pauses the engine, has the order carried out, verifies, and lets the engine go on. A version is fetched
once for all engines of the node (`ports.weights`).

Orders and answers are values of the topic (stages/engines/fetcher_route.py), so that a fetcher, or an engines stage,
that is started anew finds what is to be done.

Invariants:
- nothing is put into an engine that was not asked for: the order counts how often;
- what an order holds (a slot that an engine loads from) is given back when the order is taken back, or another takes
  its place.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

import msgspec

from models.engines.client import EngineClient
from models.engines.errors import EngineError
from models.errors import WeightsError
from models.weights.delta_mirror import DeltaMirror
from stages.base import Stage, StageContext
from stages.engine_entries import BROUGHT, ORDER
from stages.engines.fetcher_route import WeightsBrought, WeightsOrder
from stages.engines.stage import END
from stages.engines.weight_routes import WeightRoutes
from stages.ports import Ports, Topic, read_value

log = logging.getLogger("sluice.fetcher")


class FetcherStage(Stage):
    """All orders of one node, side by side. It has no stream."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        run = uuid.uuid5(uuid.NAMESPACE_URL, str(context.run_dir.resolve())).hex[:12]
        self._mirror = DeltaMirror(f"mirror-{run}-{context.replica}", context.run_dir)

    async def close(self) -> None:
        self._mirror.close()

    async def run(self, ports: Ports) -> None:
        """Waits for orders on the topic; unblocked by the end of the run, or when no engine is left on the node."""
        topic, prefix, retire = ports.topic, f"{ORDER}{self.context.replica}/", f"retire/{self.context.replica}"
        at_work: dict[str, tuple[str, asyncio.Task[None]]] = {}  # engine -> the order's id
        async with asyncio.TaskGroup() as tasks:
            revision = 0
            while topic.get(END) is None and topic.get(retire) is None:
                for key in topic.items(prefix):
                    order = order_at(topic, key)
                    number, task = at_work.pop(key, ("", None))
                    if order is not None and order.id == number and task is not None:
                        at_work[key] = number, task
                        continue
                    if task is not None:
                        task.cancel()
                    if order is not None:
                        at_work[key] = order.id, tasks.create_task(self._carry_out(order, key, ports))
                revision = await topic.wait(revision, prefix, END, retire)
            for _, task in at_work.values():
                task.cancel()

    async def _carry_out(self, order: WeightsOrder, key: str, ports: Ports) -> None:
        """Waits until the order is taken back, which cancels it. Errors are its answer."""
        topic, engine, applied = ports.topic, order.engine, 0
        answer = BROUGHT + key.removeprefix(ORDER)
        told = read_value(topic, answer, WeightsBrought)
        if told is not None and told.id == order.id:  # by an earlier life of this fetcher
            applied = told.applied
        timeout_s = self.config.rollout.request_timeout_secs
        routes = WeightRoutes(engine.engine, self.config.update, self._mirror)
        try:
            async with EngineClient(engine.url, timeout_s=timeout_s, token=engine.token) as client:
                here = await ports.weights.local(order.announcement)
                async with routes.choose(here, in_full=order.in_full).open(client, here) as transfer:
                    await topic.publish(answer, msgspec.msgpack.encode(WeightsBrought(order.id, applied)))
                    while True:
                        order = await self._asked(topic, key, order, applied)
                        with self.activity.working():
                            updated = await transfer.apply(order.flush_cache)
                        applied = order.applies
                        done = WeightsBrought(order.id, applied, updated)
                        await topic.publish(answer, msgspec.msgpack.encode(done))
        except (EngineError, WeightsError) as error:
            log.warning("%s, version %d: %s", engine.engine, order.announcement.version, error)
            self.activity.failures += 1
            await topic.publish(answer, msgspec.msgpack.encode(WeightsBrought(order.id, applied, error=str(error))))
        finally:
            await routes.close()

    async def _asked(self, topic: Topic, key: str, order: WeightsOrder, applied: int) -> WeightsOrder:
        """The order when it asks for the weights to be put in once more. Waits for that."""
        revision = 0
        while True:
            newest = order_at(topic, key)
            if newest is not None and newest.id == order.id and newest.applies > applied:
                return newest
            revision = await topic.wait(revision, key)


def order_at(topic: Topic, key: str) -> WeightsOrder | None:
    """The order below a key; None if there was none, or it was taken back."""
    value = topic.get(key)
    return msgspec.msgpack.decode(value, type=WeightsOrder) if value else None
