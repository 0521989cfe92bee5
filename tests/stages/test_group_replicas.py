"""Several group stages on one keyed stream: all rollouts of a group meet in one, also when one comes or goes."""

from __future__ import annotations

import random
from typing import Any

from stages.group.stage import GroupStage
from stages.messages import RolloutSlice
from tests.stages.group_rig import join
from tests.stages.stage_rig import Rig, idle, make_context, make_sample, make_slice, open_rig, running, take

GROUPS, MEMBERS = 40, 4


def single_members(seed: int) -> list[RolloutSlice]:
    """Every rollout of every group in a slice of its own, in any order."""
    parts = [
        make_slice(group, make_sample(member, reward=float(member)), n_samples=MEMBERS)
        for group in range(GROUPS)
        for member in range(MEMBERS)
    ]
    random.Random(seed).shuffle(parts)
    return parts


async def keyed_rig(rig: Rig) -> None:
    await rig.stream("group", RolloutSlice, routing="keyed")


async def whole_groups(rig: Rig) -> list[int]:
    inlet = await rig.inlet("train")
    found = [await take(inlet) for _ in range(GROUPS)]
    assert all([sample.index for sample in one.samples] == list(range(MEMBERS)) for one in found)
    return [one.group.group_id for one in found]


async def test_each_group_is_put_together_in_one_of_two_replicas() -> None:
    async with open_rig() as rig:
        await keyed_rig(rig)
        ports = [await join(rig, f"group-{i}") for i in range(2)]
        stages = [GroupStage(make_context(replica=f"group-{i}")) for i in range(2)]
        async with running(stages[0], ports[0]), running(stages[1], ports[1]):
            feed = await rig.outlet("group")
            for part in single_members(0):
                await feed.send(part, part.key)
            assert sorted(await whole_groups(rig)) == list(range(GROUPS))
            assert all(stage.activity.items_out > 0 for stage in stages), "both had a share"
            await idle()
            assert rig.hubs["group"].stats().settled == GROUPS * MEMBERS


async def test_what_a_retired_replica_holds_is_put_together_by_the_others() -> None:
    async with open_rig() as rig:
        await keyed_rig(rig)
        feed = await rig.outlet("group")
        parts = single_members(1)
        ports = [await join(rig, f"group-{i}") for i in range(2)]
        async with (
            running(GroupStage(make_context()), ports[0]),
            running(GroupStage(make_context()), ports[1]) as going,
        ):
            for part in parts[:80]:
                await feed.send(part, part.key)
            await idle()
            await retire(ports[1].inlets["in"], going)
            for part in parts[80:120]:
                await feed.send(part, part.key)
            late = await join(rig, "group-2")
            async with running(GroupStage(make_context()), late):
                for part in parts[120:]:
                    await feed.send(part, part.key)
                assert sorted(await whole_groups(rig)) == list(range(GROUPS))
                await idle()
                assert rig.hubs["group"].stats().settled == GROUPS * MEMBERS
                assert rig.hubs["train"].stats().duplicates == 0


async def retire(inlet: Any, task: Any) -> None:
    """As the replica does that is told to: it takes nothing more, its stage ends, its ports are closed."""
    await inlet.drain()
    await task
    await inlet.close()
