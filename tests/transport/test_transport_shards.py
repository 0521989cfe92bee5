"""Streams with several hubs: where a message goes, and that both ends behave as those of one hub."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import DeadLetter, Hub, Inlet, LinkRefused, Node, Outlet, ShardedInlet, ShardedOutlet, StreamSpec
from transport.links.memory import MemoryNetwork, MemoryNode
from transport.ports.inlet import Arrivals, LeaseHandle
from transport.ports.shards import shard_of, shards_of, stream_of, window_of
from transport.spec import Routing
from transport.testing.net import take_one, until

KEYS = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=12)


@given(group=KEYS, rests=st.lists(st.text(max_size=8), max_size=5), count=st.integers(1, 9))
def test_all_of_a_group_is_in_one_shard(group: str, rests: list[str], count: int) -> None:
    shards = {shard_of(group, count), *(shard_of(f"{group}/{rest}", count) for rest in rests)}
    assert len(shards) == 1
    assert shards <= set(range(count))


def test_groups_are_divided_evenly_and_always_alike() -> None:
    counts = [sum(shard_of(f"{group}/0,1/2", 3) == shard for group in range(3000)) for shard in range(3)]
    assert min(counts) > 900, counts
    assert [shard_of(str(group), 4) for group in range(8)] == [1, 0, 0, 0, 3, 2, 1, 2], "also after an update"


@given(window=st.integers(1, 1 << 60), count=st.integers(1, 64))
def test_windows_of_all_shards_are_together_the_window(window: int, count: int) -> None:
    assert window_of(window, count) >= 1
    assert window <= window_of(window, count) * count <= window + count


@given(stream=st.sampled_from(["group", "generate.return", "my-stage"]), count=st.integers(1, 12))
def test_shards_have_names_of_their_own(stream: str, count: int) -> None:
    names = shards_of(stream, count)
    assert len(set(names)) == count
    assert {stream_of(name) for name in names} == {stream}
    assert count > 1 or names == (stream,)


class Sharded:
    """A stream with hubs in memory."""

    def __init__(self, node: Node, count: int, routing: Routing) -> None:
        self.node, self.names, self.routing = node, shards_of("s", count), routing
        self.hubs: list[Hub] = []
        self.letters: list[DeadLetter] = []

    async def open(self) -> None:
        for name in self.names:
            self.hubs.append(await self.node.hub(StreamSpec(name, name, routing=self.routing), self.letters.append))

    async def outlet(self, replica: str) -> ShardedOutlet[str]:
        outlets: list[Outlet[str]] = [await self.node.outlet(n, n, str, replica=replica) for n in self.names]
        return ShardedOutlet(outlets)

    async def inlet(self, replica: str, window: int = 1000) -> ShardedInlet[str]:
        arrivals, inlets = Arrivals(), list[Inlet[str]]()
        for name in self.names:
            inlets.append(
                await self.node.inlet(name, name, str, window_items=window, replica=replica, arrivals=arrivals)
            )
        return ShardedInlet(inlets, arrivals)

    def finish(self) -> None:
        for hub in self.hubs:
            hub.finish()

    def key_in(self, shard: int, after: int = 0) -> str:
        """One that belongs to a shard, and no other of the first `after`."""
        return [str(i) for i in range(1000) if shard_of(str(i), len(self.names)) == shard][after]


@contextlib.asynccontextmanager
async def sharded(count: int = 2, routing: Routing = "least_loaded") -> AsyncIterator[Sharded]:
    async with asyncio.timeout(20), MemoryNode("run", "node-0", MemoryNetwork()) as node:
        made = Sharded(node, count, routing)
        await made.open()
        yield made


async def taken(inlet: ShardedInlet[str]) -> list[str]:
    """All until the end of the stream."""
    found = []
    while (lease := await inlet.receive()) is not None:
        found.append(lease.key)
        lease.done()
    return found


PARTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), unique=True, max_size=40)


@settings(max_examples=25, deadline=None)
@given(parts=PARTS, held=PARTS, count=st.integers(2, 4), replicas=st.integers(1, 3))
def test_one_replica_gets_all_parts_of_a_keyed_group(
    parts: Sequence[tuple[int, int]], held: Sequence[tuple[int, int]], count: int, replicas: int
) -> None:
    """Some are held before there are other replicas."""
    first = [f"{group}/{part}" for group, part in held]
    then = [f"{group}/{part}" for group, part in parts if (group, part) not in held]

    async def run() -> None:
        found: list[list[LeaseHandle[str]]] = [[] for _ in range(replicas)]

        async def take(number: int, inlet: ShardedInlet[str]) -> None:
            while (lease := await inlet.receive()) is not None:
                found[number].append(lease)

        async with sharded(count, "keyed") as stream, asyncio.TaskGroup() as tasks:
            outlet = await stream.outlet("reward-0")
            tasks.create_task(take(0, await stream.inlet("group-0")))
            for key in first:
                await outlet.send("x", key)
            await until(lambda: len(found[0]) == len(first))
            for number in range(1, replicas):
                tasks.create_task(take(number, await stream.inlet(f"group-{number}")))
            for key in then:
                await outlet.send("x", key)
            await until(lambda: sum(map(len, found)) == len(first) + len(then))
            for lease in [lease for leases in found for lease in leases]:
                lease.done()
            stream.finish()
        assert sorted(lease.key for leases in found for lease in leases) == sorted([*first, *then])
        groups = [{lease.key.partition("/")[0] for lease in leases} for leases in found]
        assert sum(map(len, groups)) == len(set().union(*groups)), "a group was taken by two"

    asyncio.run(run())


async def test_the_end_is_that_of_all_shards() -> None:
    async with sharded() as stream, asyncio.TaskGroup() as tasks:
        inlet, outlet = await stream.inlet("a-0"), await stream.outlet("b-0")
        await outlet.send("x", stream.key_in(1))
        lease = await take_one(inlet)
        waiting = tasks.create_task(inlet.receive())
        stream.hubs[0].finish()
        stream.hubs[1].finish()
        await stream.hubs[0].wait_empty()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done(), "what is held may come again"
        lease.done()
        assert await waiting is None


async def test_shards_take_turns() -> None:
    async with sharded() as stream:
        outlet, inlet = await stream.outlet("b-0"), await stream.inlet("a-0")
        many = [stream.key_in(0, number) for number in range(20)]
        for key in [*many, stream.key_in(1, 0), stream.key_in(1, 1)]:
            await outlet.send("x", key)
        leases = [await inlet.receive() for _ in range(4)]
        assert sorted(shard_of(lease.key, 2) for lease in leases if lease is not None) == [0, 0, 1, 1]
        rest = [await inlet.receive() for _ in range(18)]
        assert [lease.key for lease in [*leases, *rest] if lease and shard_of(lease.key, 2) == 0] == many, "in order"


async def test_a_delivery_of_any_shard_wakes_one_of_those_that_wait() -> None:
    async with sharded() as stream, asyncio.TaskGroup() as tasks:
        inlet, outlet = await stream.inlet("a-0"), await stream.outlet("b-0")
        waiting = [tasks.create_task(inlet.receive()) for _ in range(3)]
        keys = [stream.key_in(shard) for shard in (1, 0)]
        for count, key in enumerate(keys, 1):
            await outlet.send("x", key)
            await until(lambda count=count: sum(task.done() for task in waiting) == count)  # type: ignore[misc]
        assert {lease.key for task in waiting if task.done() and (lease := task.result())} == set(keys)
        waiting[2].cancel()


async def test_what_was_not_begun_goes_to_others_from_all_shards() -> None:
    async with sharded() as stream:
        inlet, outlet = await stream.inlet("a-0"), await stream.outlet("b-0")
        keys = [stream.key_in(shard, number) for shard in (0, 1) for number in range(3)]
        for key in keys:
            await outlet.send("x", key)
        begun = await take_one(inlet)
        await inlet.drain()
        assert await inlet.receive() is None
        other = await stream.inlet("a-1")
        begun.done()
        stream.finish()
        assert sorted([begun.key, *await taken(other)]) == sorted(keys)


async def test_a_shard_that_refuses_is_a_fault_of_the_stream() -> None:
    async with sharded() as stream:
        arrivals = Arrivals()
        inlets: list[Inlet[str]] = [await stream.node.inlet(n, n, str, arrivals=arrivals) for n in stream.names]
        inlet = ShardedInlet(inlets, arrivals)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(failing(inlet))
            await asyncio.sleep(0)
            inlets[1].link_refusal = "it does not know this node"
            inlets[1].flush(0.0)
            await waiting


async def failing(inlet: ShardedInlet[str]) -> None:
    with pytest.raises(LinkRefused, match="it does not know this node"):
        await inlet.receive()
