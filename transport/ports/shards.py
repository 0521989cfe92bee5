"""A stream that is divided over several hubs, its shards: which of them has a message, and both ends over all of them.

Invariants: all messages whose keys have the same text before the first '/' are in one shard, and so what a hub promises
of them (a key is accepted once, keyed routing) holds for the whole stream; a stream has ended when all its shards have;
who takes asks the shards in turns, so that none of them starves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import xxhash

from transport.errors import UsageError
from transport.ports.inlet import Arrivals, Inlet, LeaseHandle
from transport.ports.outlet import Outlet

T = TypeVar("T")
MARK: Final = "#"


def shards_of(stream: str, count: int) -> tuple[str, ...]:
    """The names that the hubs of a stream have; of one alone it is that of the stream."""
    return (stream,) if count == 1 else tuple(f"{stream}{MARK}{number}" for number in range(count))


def stream_of(shard: str) -> str:
    return shard.partition(MARK)[0]


def shard_of(key: str, count: int) -> int:
    """The shard that has all messages of the key's group: of whatever is before the first '/'."""
    return xxhash.xxh3_64_intdigest(key.partition("/")[0].encode()) % count


def window_of(window: int, count: int) -> int:
    """The part of a window that each shard has, where a stage does not join: rounded up, for one that may hold nothing
    would never be heard."""
    return -(-window // count)


class ShardedOutlet(Generic[T]):
    """The producing end over an outlet for each shard, in their order."""

    def __init__(self, outlets: Sequence[Outlet[T]]) -> None:
        self._outlets = tuple(outlets)

    async def send(self, message: T, key: str) -> None:
        """As that of `Outlet`, of the shard that the key belongs to."""
        await self._outlets[shard_of(key, len(self._outlets))].send(message, key)


class ShardedInlet(Generic[T]):
    """The consuming end over an inlet for each shard. They were opened with the same `arrivals`."""

    def __init__(self, inlets: Sequence[Inlet[T]], arrivals: Arrivals) -> None:
        self._inlets: tuple[Inlet[T], ...] = tuple(inlets)
        self._arrivals = arrivals
        if any(inlet.arrivals is not arrivals for inlet in inlets):
            raise UsageError("inlets of one stream wait for arrivals together; open each with the same `arrivals`")
        self._turn = 0  # the shard that is asked first

    async def receive(self) -> LeaseHandle[T] | None:
        """As that of `Inlet`: the next message of any shard, None once all of them are finished and empty, or drain."""
        self._inlets[0].check_process()
        count = len(self._inlets)
        while True:
            for number in (*range(self._turn, count), *range(self._turn)):
                lease: LeaseHandle[T] | None = self._inlets[number].take()
                if lease is not None:
                    self._turn = (number + 1) % count
                    return lease
            if all([inlet.over() for inlet in self._inlets]):  # each is looked at: one of them may be lost
                return None
            await self._arrivals.wait()

    async def drain(self) -> None:
        for inlet in self._inlets:
            await inlet.drain()

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        await asyncio.gather(*(inlet.close(blame=blame, timeout_s=timeout_s) for inlet in self._inlets))
