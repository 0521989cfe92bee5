"""Turns of a rollout meet the same replica of a loop stage, for as long as it lives and has room."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from configs.schema import Config, StageConfig
from pipeline.graph import build, stream_spec
from stages.messages import RolloutSlice
from stages.staleness_gate import StalenessGate
from tests.stages.stage_rig import make_group, make_sample
from transport import DeadLetter, Hub, Node, Outlet

ROLLOUTS = [(group, index) for group in range(4) for index in range(4)]
NAMES = ("world-0", "world-1")


def refuse(letter: DeadLetter) -> None:
    raise AssertionError(letter.reason)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="t") as directory:  # pytest's own are too deep for a socket path
        yield f"ipc://{directory}/world"


@asynccontextmanager
async def loop_hub(address: str) -> AsyncIterator[tuple[Node, Hub, Outlet[RolloutSlice]]]:
    """The hub of a loop stage's inlet, as the graph of a run describes it."""
    world = StageConfig(name="world", path="my_world:World", loop="generate", replicas=2)
    config = msgspec.structs.replace(Config(), stage=(world,))
    stream = build(config).inlets("world")["in"]
    spec = stream_spec(config, StalenessGate.of(config), stream.name, address, stream.routing)
    async with asyncio.timeout(20), Node("run", "controller") as node:
        hub = await node.hub(spec, refuse)
        yield node, hub, await node.outlet(hub.address, stream.name, RolloutSlice)


async def send(outlet: Outlet[RolloutSlice], rollout: tuple[int, int], turns: int) -> None:
    sample = msgspec.structs.replace(make_sample(rollout[1]), turns=turns)
    slice_ = RolloutSlice(make_group(rollout[0]), (sample,))
    await outlet.send(slice_, slice_.key)


async def test_turns_of_a_rollout_meet_one_replica_until_it_dies(address: str) -> None:
    async with loop_hub(address) as (node, hub, outlet):
        inlets = {name: await node.inlet(hub.address, "world", RolloutSlice, replica=name) for name in NAMES}
        met: dict[tuple[int, int], list[str]] = defaultdict(list)
        arrived = asyncio.Semaphore(0)

        async def work(name: str) -> None:
            """Note who gets which rollout. Ends with the inlet."""
            while (lease := await inlets[name].receive()) is not None:
                rollout = (lease.message.group.group_id, lease.message.samples[0].index)
                met[rollout].append(name)
                if name not in dead:
                    lease.done()
                arrived.release()

        async def all_arrived() -> None:
            for _ in ROLLOUTS:
                await arrived.acquire()

        dead: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            workers = {name: tasks.create_task(work(name)) for name in NAMES}
            for turns in range(1, 6):
                for rollout in ROLLOUTS:
                    await send(outlet, rollout, turns)
                await all_arrived()
            owners = {rollout: set(names) for rollout, names in met.items()}
            assert all(len(names) == 1 for names in owners.values()), "a rollout changed its replica"
            assert set.union(*owners.values()) == set(NAMES), "members of a group are spread"

            dead.add("world-0")  # it takes its next turns and dies with them
            for rollout in ROLLOUTS:
                await send(outlet, rollout, 6)
            await all_arrived()
            workers["world-0"].cancel()
            inlets["world-0"].shut(0)
            hub.peer_lost("world-0")
            orphans = [rollout for rollout in ROLLOUTS if owners[rollout] == {"world-0"}]
            for _ in orphans:
                await arrived.acquire()
            assert all(met[rollout][-2:] == ["world-0", "world-1"] for rollout in orphans), "the other one goes on"
            for rollout in ROLLOUTS:
                await send(outlet, rollout, 7)
            await all_arrived()
            assert all(names[-1] == "world-1" for names in met.values())
            hub.finish()


async def test_a_full_replica_is_passed_over(address: str) -> None:
    async with loop_hub(address) as (node, hub, outlet):
        for name in NAMES:
            await node.inlet(hub.address, "world", RolloutSlice, replica=name, window_items=3)
        for turns in range(1, 7):
            await send(outlet, (1, 1), turns)
        while hub.stats().leased < 6:  # noqa: ASYNC110 - what counters say has no event
            await asyncio.sleep(0.001)
        assert hub.stats().queued == 0
