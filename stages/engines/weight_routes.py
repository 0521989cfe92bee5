"""The routes of weights into one engine: disk, tensor, distributed, delta, and through the fetcher of another node.

Each route has two halves. `open` runs while the engine generates: verify the slot, assemble the version, join the
engine's process group, have one of our engines load the version beside its weights. `apply` runs while the engine is
paused. A failure in `open` leaves the engine as it was; after a failure in `apply` it may hold a mixture, so it stays
paused until an update succeeds. What `open` does is kept where it can be, so that it is quick once it was done ahead.

A fetcher's route uses two values of the topic: `order/<fetcher>/<engine>`, what the engine is to get (empty: nothing
any more), and `brought/<fetcher>/<engine>`, the progress. Both hold the newest value, so either side may restart.

Invariants:
- only bytes that were verified against the announced digest are sent, and a slot that changed meanwhile is noticed; an
  embedded engine that copies them as they are does both itself, meanwhile;
- a process verifies a version once for all its engines, but anew for an engine whose weights are in doubt;
- an opened bracket is closed, so that any route may follow;
- a process group belongs to one incarnation of an engine, is made anew after a failure, and is destroyed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from configs.schema.rollout import UpdateConfig
from models.engines.client import EngineClient, WeightsUpdated
from models.engines.protocol import ServerInfo
from models.errors import DeltaError, DigestMismatch, EngineError, EngineUnreachable, NotBrought, RouteUnfit
from models.weights.delta_mirror import DeltaMirror
from models.weights.shared_memory_reader import SlotReader
from stages.engines.weight_transfer import GroupTransfer, Preparation, TensorTransfer, Transfer, together
from stages.messages import WeightsAnnouncement
from stages.ports import Topic, read_value
from stages.topic_values import ADDRESS, BROUGHT, ORDER, EngineAddress

if TYPE_CHECKING:
    from models.weights.transfer import WeightGroup


log = logging.getLogger("sluice.weight_routes")

GROUP_TIMEOUT_S = 120.0  # to meet, and for one broadcast
LEAVE_TIMEOUT_S = 2.0  # for the call that ends an engine's group


class WeightRoute(ABC):
    """A route by which one engine gets announced weights."""

    @abstractmethod
    def open(self, client: EngineClient, announcement: WeightsAnnouncement) -> AbstractAsyncContextManager[Transfer]:
        """Prepare while the engine generates. Raises WeightsError or EngineError; the engine is then unchanged."""

    async def ahead(self, client: EngineClient, announcement: WeightsAnnouncement) -> None:
        """Do before the engine's turn what the next `open` need not do again. Raises as `open` does."""
        async with self.open(client, announcement):
            pass


class DiskRoute(WeightRoute):
    """The engine loads the slot, a Hugging Face directory in shared memory."""

    def __init__(self, preparation: Preparation, *, anew: bool = False) -> None:
        self.preparation, self.anew = preparation, anew

    @contextlib.asynccontextmanager
    async def open(self, client: EngineClient, announcement: WeightsAnnouncement) -> AsyncIterator[Transfer]:
        verify = partial(SlotReader, announcement, anew=self.anew)
        yield await self.preparation.make(client, announcement, verify)


class TensorRoute(WeightRoute):
    """This process passes the slot bucket by bucket, in shared memory or as a CUDA handle. Same machine only."""

    gpus: tuple[int, ...] = ()  # the engine's, as this process counts them

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes

    @contextlib.asynccontextmanager
    async def open(self, client: EngineClient, announcement: WeightsAnnouncement) -> AsyncIterator[Transfer]:
        ranks = await _ranks("tensor", client)
        devices = self._devices(client, ranks)
        slot = await asyncio.to_thread(SlotReader, announcement, anew=False)
        transfer = await asyncio.to_thread(TensorTransfer, client, announcement.label, slot, self.bucket_bytes, devices)
        await asyncio.to_thread(transfer.fill, 0)
        yield transfer.apply

    async def ahead(self, client: EngineClient, announcement: WeightsAnnouncement) -> None:
        await asyncio.to_thread(SlotReader, announcement, anew=False)

    def _devices(self, client: EngineClient, ranks: ServerInfo) -> list[str]:
        """Where each rank of the engine takes its tensors from. A rank sees the engine's own GPUs only."""
        count = ranks.tp_size or 1
        if _device(ranks) == "cpu":
            return ["cpu"] * count
        if len(self.gpus) < count:
            raise RouteUnfit(
                f"engine {client.base_url} has {count} tensor-parallel ranks on GPUs, and this run knows the places of "
                f"{len(self.gpus)}: the route tensor must copy to each of them; it works for engines that the run "
                "starts on this machine's GPUs itself, else use --update-weight-transport disk"
            )
        return [f"cuda:{gpu}" for gpu in self.gpus[:count]]


class DistributedRoute(WeightRoute):
    """This process broadcasts the slot, bucket by bucket, to a group of itself and the engine's ranks."""

    def __init__(self, engine: str, bucket_bytes: int, timeout_s: float) -> None:
        self.engine, self.bucket_bytes, self.timeout_s = engine, bucket_bytes, timeout_s
        self._group: WeightGroup | None = None
        self._client: EngineClient | None = None  # of the engine that is in the group
        self._device = "cpu"

    @contextlib.asynccontextmanager
    async def open(self, client: EngineClient, announcement: WeightsAnnouncement) -> AsyncIterator[Transfer]:
        slot = await asyncio.to_thread(SlotReader, announcement, anew=False)
        group = await self._joined(client)
        transfer = GroupTransfer(client, announcement.label, slot, self.bucket_bytes, group, self._device)
        try:
            await asyncio.to_thread(transfer.fill, 0)
            yield transfer.apply
        except BaseException:
            await self.close()  # the two ends may be at different broadcasts now
            raise

    async def ahead(self, client: EngineClient, announcement: WeightsAnnouncement) -> None:
        await asyncio.to_thread(SlotReader, announcement, anew=False)
        await self._joined(client)

    async def _joined(self, client: EngineClient) -> WeightGroup:
        """The group with this client's engine, created at the first update of an incarnation and after a failure."""
        if self._group is not None and self._client is client:
            return self._group
        await self.close()
        ranks = await _ranks("distributed", client)
        self._device = _device(ranks)
        from models.weights.transfer import WeightGroup, address_towards  # torch

        name = f"sluice-{self.engine}-{uuid.uuid4().hex[:8]}"
        backend = "nccl" if self._device == "cuda" else "gloo"
        host = await asyncio.to_thread(address_towards, client.base_url)
        world_size = 1 + (ranks.tp_size or 1)
        group = WeightGroup(name, world_size, backend, host, timeout_s=self.timeout_s)
        try:
            await together(group.join, client.init_group(name, host, group.port, world_size, backend))
        except BaseException:
            group.close()
            raise
        self._group, self._client = group, client
        log.info("%s: weight group %s of %d ranks over %s", self.engine, name, world_size, backend)
        return group

    async def close(self) -> None:
        """Leave the group, if there is one."""
        group, client = self._group, self._client
        self._group = self._client = None
        if group is None or client is None:
            return
        group.close()
        with contextlib.suppress(EngineError, TimeoutError):  # a lost engine has left already
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await client.destroy_group(group.name)


class DeltaRoute(WeightRoute):
    """The version is assembled beside the engine from compressed differences; the engine loads it from there."""

    def __init__(self, mirror: DeltaMirror, preparation: Preparation, *, anew: bool = False) -> None:
        self.mirror, self.preparation, self.anew = mirror, preparation, anew

    @contextlib.asynccontextmanager
    async def open(self, client: EngineClient, announcement: WeightsAnnouncement) -> AsyncIterator[Transfer]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                source = Path(announcement.delta).parent
                manifest = await stack.enter_async_context(self.mirror.lent(announcement, source, anew=self.anew))
            except (DeltaError, DigestMismatch) as error:
                if not Path(announcement.path).is_dir():
                    raise
                log.warning("version %s is loaded from its slot on this machine: %s", announcement.label, error)
                disk = DiskRoute(self.preparation, anew=self.anew)
                yield await stack.enter_async_context(disk.open(client, announcement))
            else:
                yield await self.preparation.make(client, manifest, None)


class WeightRoutes:
    """All routes to one engine. The engines of a process share `mirror`."""

    def __init__(self, engine: str, update: UpdateConfig, mirror: DeltaMirror) -> None:
        bucket_bytes = update.update_weight_buffer_size
        preparation = Preparation(mirror.preparing)
        self._in_full = DiskRoute(preparation, anew=True)
        self._distributed = DistributedRoute(engine, bucket_bytes, GROUP_TIMEOUT_S)
        self.tensor = TensorRoute(bucket_bytes)
        self._routes: dict[str, WeightRoute] = {
            "disk": DiskRoute(preparation),
            "distributed": self._distributed,
            "tensor": self.tensor,
            "delta": DeltaRoute(mirror, preparation),
        }

    def choose(self, announcement: WeightsAnnouncement, *, in_full: bool = False) -> WeightRoute:
        """The announced route; with `in_full` the safest route, all weights loaded from a directory."""
        route = self._routes.get(announcement.transport)
        if route is None:
            raise RouteUnfit(f"weights come by transport {announcement.transport!r}, none of {', '.join(self._routes)}")
        if not in_full:
            return route
        if isinstance(route, DeltaRoute) and not Path(announcement.path).is_dir():
            return DeltaRoute(route.mirror, route.preparation, anew=True)
        return self._in_full

    async def close(self) -> None:
        """Release what is kept between updates. May be called twice."""
        await self._distributed.close()


def _device(ranks: ServerInfo) -> str:
    return "cuda" if (ranks.device or "cpu").startswith("cuda") else "cpu"


async def _ranks(route: str, client: EngineClient) -> ServerInfo:
    """The engine's account of its ranks. Raises RouteUnfit where the route does not reach all of them."""
    ranks = await client.server_info()
    if (ranks.dp_size or 1) > 1 or (ranks.pp_size or 1) > 1:
        raise RouteUnfit(
            f"engine {client.base_url} has dp_size={ranks.dp_size}, pp_size={ranks.pp_size}: the route {route} reaches "
            "tensor-parallel ranks only; use --update-weight-transport disk"
        )
    return ranks


class WeightsOrder(Struct, frozen=True):
    """Topic value: bring the announced weights to the engine's node, and load them `applies` times."""

    id: str
    engine: EngineAddress
    announcement: WeightsAnnouncement
    in_full: bool = False
    applies: int = 0
    flush_cache: bool = False  # at the last load


class WeightsBrought(Struct, frozen=True):
    """Topic value: the weights are on the node, verified, and were loaded `applied` times; or the error."""

    id: str  # of the order
    applied: int = 0
    updated: WeightsUpdated | None = None
    error: str = ""


class FetcherRoute(WeightRoute):
    """Runs the announced route beside the engine, for one update.

    `stands`: whether the engine still exists.
    """

    def __init__(self, topic: Topic, engine: EngineAddress, stands: Callable[[], bool], *, in_full: bool) -> None:
        self.topic, self.engine, self.stands, self.in_full = topic, engine, stands, in_full

    @contextlib.asynccontextmanager
    async def open(self, client: EngineClient, announcement: WeightsAnnouncement) -> AsyncIterator[Transfer]:
        self._order = WeightsOrder(secrets.token_hex(8), self.engine, announcement, self.in_full)
        try:
            await self._carried_out()
            yield self._apply
        finally:
            await place_order(self.topic, self.engine, None)

    async def ahead(self, client: EngineClient, announcement: WeightsAnnouncement) -> None:
        """Nothing: an order brings the weights, in the turn."""

    async def _apply(self, flush_cache: bool) -> WeightsUpdated:
        applies = self._order.applies + 1
        self._order = msgspec.structs.replace(self._order, applies=applies, flush_cache=flush_cache)
        answer = await self._carried_out()
        assert answer.updated is not None, "a carried-out order has a result"
        return answer.updated

    async def _carried_out(self) -> WeightsBrought:
        """Publish the order. Waits for its answer, or for the loss of the engine. Raises NotBrought or
        EngineUnreachable."""
        topic, engine, order = self.topic, self.engine, self._order
        await place_order(topic, engine, order)
        key, revision = f"{BROUGHT}{engine.fetcher}/{engine.engine}", 0
        while True:
            answer = read_value(topic, key, WeightsBrought)
            if answer is not None and answer.id == order.id:
                if answer.error:
                    raise NotBrought(f"{engine.fetcher}: {answer.error}")
                if answer.applied >= order.applies:
                    return answer
            if not self.stands():
                raise EngineUnreachable(engine.url, "it was lost during the transfer of its weights")
            revision = await topic.wait(revision, key, ADDRESS + engine.engine)


async def place_order(topic: Topic, engine: EngineAddress, order: WeightsOrder | None) -> None:
    """Order weights for this engine, in the place of an earlier order; None withdraws it."""
    await topic.publish(f"{ORDER}{engine.fetcher}/{engine.engine}", msgspec.msgpack.encode(order) if order else b"")
