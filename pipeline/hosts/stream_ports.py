"""Both ends of streams, for whoever has some: opened where the hubs are, and brought to where they come up next.

Invariant: a hub in a process of its own may die at any moment, also while a port connects to it: the port waits for the
one that takes its place, for as long as that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from models.import_path import import_path
from pipeline.hosts.launcher import unless
from pipeline.hosts.rendezvous import Topic, stream_address
from pipeline.hosts.stream_hub import stream_key
from transport import Inlet, Node, Outlet, ShardedInlet, ShardedOutlet
from transport.ports.inlet import Arrivals
from transport.ports.shards import shards_of

P = TypeVar("P", Inlet[Any], Outlet[Any])
AnyInlet = Inlet[Any] | ShardedInlet[Any]
AnyOutlet = Outlet[Any] | ShardedOutlet[Any]


class PortSpec(Struct, frozen=True):
    """Where a port connects and what it carries."""

    stream: str
    address: str  # empty: the topic says, for a stream whose hubs are in processes of their own
    schema: str  # import path of the message type
    window_items: int = 16  # of each shard
    window_bytes: int = 8 << 20
    shards: int = 1


class StreamPorts:
    """Opens ports of one replica. `follow` runs beside whoever uses them."""

    def __init__(self, node: Node, topic: Topic, replica: str) -> None:
        self._node, self._topic, self._replica = node, topic, replica
        self._moving: list[tuple[str, Inlet[Any] | Outlet[Any]]] = []  # those of shards that are elsewhere

    async def outlet(self, port: PortSpec) -> AnyOutlet:
        """Waits for the hubs of all shards."""
        schema = import_path(port.schema)
        outlets = [await self.shard_outlet(name, schema, port.address) for name in shards_of(port.stream, port.shards)]
        return outlets[0] if len(outlets) == 1 else ShardedOutlet(outlets)

    async def shard_outlet(self, shard: str, schema: type[Any], address: str = "") -> Outlet[Any]:
        connect = partial(self._node.outlet, stream=shard, schema=schema, replica=self._replica)
        return await self._opened(shard, address, connect)

    async def inlet(self, port: PortSpec) -> AnyInlet:
        """Waits for the hubs of all shards."""
        arrivals, schema, inlets = Arrivals(), import_path(port.schema), list[Inlet[Any]]()
        for shard in shards_of(port.stream, port.shards):
            connect = partial(
                self._node.inlet, stream=shard, schema=schema, window_items=port.window_items,
                window_bytes=port.window_bytes, replica=self._replica, arrivals=arrivals,
            )  # fmt: skip
            inlets.append(await self._opened(shard, port.address, connect))
        return inlets[0] if len(inlets) == 1 else ShardedInlet(inlets, arrivals)

    async def follow(self) -> None:
        """Waits for hubs that have moved, and lets their ports connect there; runs until cancelled."""
        revision = 0
        while True:
            for shard, port in self._moving:
                address = self._topic.get(stream_key(shard))
                if address is not None and address.decode() != port.address:
                    port.move(address.decode())
            revision = await self._topic.wait(revision, stream_key(""))

    async def _opened(self, shard: str, address: str, connect: Callable[[str], Coroutine[Any, Any, P]]) -> P:
        if address:
            return await connect(address)
        while True:
            there = await stream_address(self._topic, shard)
            port = await unless(connect(there), self._moved(shard, there))
            if port is not None:
                self._moving.append((shard, port))
                return port

    async def _moved(self, shard: str, address: str) -> None:
        """Waits until a hub is at another address."""
        revision, key = 0, stream_key(shard)
        while await stream_address(self._topic, shard) == address:
            revision = await self._topic.wait(revision, key)
