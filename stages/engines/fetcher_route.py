"""Weights for an engine of another node, by the fetcher that is beside it: the engines stage's side.

On the topic: `order/<fetcher>/<engine>`, what the engine is to get (empty: nothing any more), and
`brought/<fetcher>/<engine>`, how far that has come. Both are the newest value, so that either side may be started anew.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

import msgspec
from msgspec import Struct

from models.engines.client import EngineClient, WeightsUpdated
from models.engines.errors import EngineUnreachable
from models.errors import NotBrought
from stages.engine_entries import ADDRESS, BROUGHT, ORDER
from stages.engines.weight_routes import WeightRoute
from stages.engines.weight_transfer import Transfer
from stages.messages import EngineAddress, WeightsAnnouncement
from stages.ports import Topic, read_value


class WeightsOrder(Struct, frozen=True):
    """Topic value: bring the announced weights to the engine's node; put them in as often as `applies` says."""

    id: str
    engine: EngineAddress
    announcement: WeightsAnnouncement
    in_full: bool = False
    applies: int = 0
    flush_cache: bool = False  # at the last of them


class WeightsBrought(Struct, frozen=True):
    """Topic value: the weights are there and verified, and were put in `applied` times; or why not."""

    id: str  # of the order
    applied: int = 0
    updated: WeightsUpdated | None = None
    error: str = ""


def order_key(engine: EngineAddress) -> str:
    return f"{ORDER}{engine.fetcher}/{engine.engine}"


class FetcherRoute(WeightRoute):
    """Whatever the announced route is, carried out beside the engine. `stands`: whether the engine is still there."""

    def __init__(self, topic: Topic, engine: EngineAddress, stands: Callable[[], bool], *, in_full: bool) -> None:
        self.topic, self.engine, self.stands, self.in_full = topic, engine, stands, in_full

    @contextlib.asynccontextmanager
    async def open(self, client: EngineClient, announcement: WeightsAnnouncement) -> AsyncIterator[Transfer]:
        order = WeightsOrder(secrets.token_hex(8), _address(self.engine), announcement, self.in_full)
        transfer = OrderedTransfer(self, order)
        try:
            await transfer.carried_out()
            yield transfer
        finally:
            await take_back(self.topic, self.engine)


class OrderedTransfer:
    """Weights that lie on the engine's node. Implements `Transfer`."""

    def __init__(self, route: FetcherRoute, order: WeightsOrder) -> None:
        self.route, self.order = route, order

    async def apply(self, flush_cache: bool) -> WeightsUpdated:
        order = msgspec.structs.replace(self.order, applies=self.order.applies + 1, flush_cache=flush_cache)
        self.order = order
        answer = await self.carried_out()
        assert answer.updated is not None, "it was put in"
        return answer.updated

    async def carried_out(self) -> WeightsBrought:
        """Give the order as it is now. Waits for its answer; unblocked by the engine's loss too. Raises NotBrought or
        EngineUnreachable."""
        topic, engine, order = self.route.topic, self.route.engine, self.order
        await topic.publish(order_key(engine), msgspec.msgpack.encode(order))
        key, revision = f"{BROUGHT}{engine.fetcher}/{engine.engine}", 0
        while True:
            answer = read_value(topic, key, WeightsBrought)
            if answer is not None and answer.id == order.id:
                if answer.error:
                    raise NotBrought(f"{engine.fetcher}: {answer.error}")
                if answer.applied >= order.applies:
                    return answer
            if not self.route.stands():
                raise EngineUnreachable(engine.url, "it was lost while its weights were on their way")
            revision = await topic.wait(revision, key, ADDRESS + engine.engine)


async def take_back(topic: Topic, engine: EngineAddress) -> None:
    """No order is left for this engine."""
    await topic.publish(order_key(engine), b"")


def _address(engine: EngineAddress) -> EngineAddress:
    """Without what an entry says more."""
    return EngineAddress(
        engine.engine, engine.url, engine.incarnation, engine.policy, fetcher=engine.fetcher, token=engine.token
    )
