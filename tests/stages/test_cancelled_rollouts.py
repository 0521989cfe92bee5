"""`--cancel-stale-rollouts`: what is too old for every later batch is not generated to its end, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.engines.protocol import SamplingParams
from stages.messages import VersionRun, WeightsAnnouncement
from stages.rollouts import new_sample
from stages.sampling.requests import SampleRequest, SampleResult
from tests.stages.engine_rig import LENGTH, ONCE, SLOW_MS, Log, World, core_of, simulated, started
from tests.stages.stage_rig import Desk, idle, make_group, make_sample, make_slice, settled, until

BOUND = {"max_staleness": 1}
ENDLESS = 50_000  # tokens


def running(world: World) -> int:
    core = core_of(world.engines[0])
    core.load()  # brings the schedule up to now
    return core.schedule.running


async def all_written(world: World, count: int) -> None:
    """Wait until so many responses run and all have tokens: one without is begun anew by an update, by new weights."""
    core = core_of(world.engines[0])
    await until(lambda: running(world) == count)
    enough = core.totals().generation_tokens + 3 * count
    await until(lambda: running(world) == count and core.totals().generation_tokens >= enough)


async def publish(world: World, version: int) -> None:
    world.weights.publish(version)
    await world.weights.landed(version)
    await until(lambda: world.stage.sampler.directory.published == version)
    await idle()


async def grow_old(world: World) -> None:
    """What runs is two versions old, one more than the bound, and then the engine becomes fast with the next update."""
    for version in (1, 2):
        await publish(world, version)
    world.hurry(0)
    await publish(world, 3)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("members", [1, 4])
async def test_a_response_that_no_later_batch_may_train_is_ended(tmp_path: Path, mode: str, members: int) -> None:
    sections = {"asynchrony": BOUND, "rollout": {"rollout_max_response_len": ENDLESS}}
    async with started(tmp_path, engine=simulated(SLOW_MS, ENDLESS), pause_mode=mode, **sections) as world:
        await world.ask(make_group(0, members))
        await all_written(world, members)
        await publish(world, 1)
        await all_written(world, members)
        assert not world.stage.sampler.oldest
        await world.ask(make_group(1, 1))
        await all_written(world, members + 1)
        await publish(world, 2)
        ended = await world.whole(members)
        await until(lambda: running(world) == 1)  # the other is one version old
        assert [sample.status for sample in ended] == ["aborted"] * members
        assert all(sample.error is None and sample.version_runs[1].version == 0 for sample in ended), (
            "they keep their tokens"
        )
        [target] = world.stage.sampler.directory.serving()
        assert target.slots.taken == 1
        await all_written(world, 1)
        await publish(world, 3)
        [other] = await world.whole(1)
        assert (other.status, other.version_runs[1].version) == ("aborted", 1)


async def test_a_response_that_a_rollback_left_behind_is_ended(tmp_path: Path) -> None:
    """It is young enough by its version, which the run has left."""
    sections = {"asynchrony": {"max_staleness": 5}, "rollout": {"rollout_max_response_len": ENDLESS}}
    async with started(tmp_path, engine=simulated(SLOW_MS, ENDLESS), **sections) as world:
        await world.ask(make_group(0, 1))
        await all_written(world, 1)
        newest = msgspec.msgpack.decode(world.rig.topic.get("weights") or b"", type=WeightsAnnouncement)
        left = msgspec.structs.replace(newest, version=newest.version + 1, floor=newest.version + 1)
        world.rig.topic.publish("weights", msgspec.msgpack.encode(left))
        [ended] = await world.whole(1)
        assert (ended.status, ended.version_runs[1].version) == ("aborted", newest.version)


KEPT: dict[str, dict[str, Any]] = {
    "not wanted": {"asynchrony": {**BOUND, "cancel_stale_rollouts": False}},
    "stale tokens are masked": {"asynchrony": {**BOUND, "async_unused_samples_handler": "train_masked"}},
    "old tokens are masked": {"asynchrony": BOUND, "correction": {"mask_offpolicy_in_partial_rollout": True}},
    "an evaluation": {"asynchrony": BOUND},
}


@pytest.mark.parametrize("case", KEPT)
async def test_what_can_still_be_trained_is_not_ended(tmp_path: Path, case: str) -> None:
    async with started(tmp_path, engine=simulated(SLOW_MS), **KEPT[case]) as world:
        await world.ask(make_group(0, 2, purpose="eval" if case == "an evaluation" else "train"))
        await grow_old(world)
        assert [sample.status for sample in await world.whole(2)] == ["completed"] * 2


async def test_a_request_of_a_program_is_not_ended(tmp_path: Path) -> None:
    """A gateway asks with requests as they are made for a rollout."""
    async with started(tmp_path, engine=simulated(SLOW_MS), asynchrony=BOUND) as world, asyncio.TaskGroup() as tasks:
        request = world.stage.turns.requests.of(make_group(0, 1), (new_sample([1, 2, 3], 0),), LENGTH, None)
        asked = tasks.create_task(world.stage.sampler.sample(request))
        await grow_old(world)
        [result] = await asked
        assert (result.finish, len(result.token_ids)) == ("stop", LENGTH)


@pytest.mark.parametrize("key", ["decided/group-0", "dead"])
@pytest.mark.parametrize("members", [1, 4])
async def test_a_group_whose_outcome_is_known_is_ended(tmp_path: Path, key: str, members: int) -> None:
    """A filter drops it for its first rollouts, or it lost one for good. Others go on, and evaluations too."""
    sections = {"asynchrony": {"max_staleness": 9}, "rollout": {"rollout_max_response_len": ENDLESS}}
    async with started(tmp_path, engine=simulated(SLOW_MS, ENDLESS), **sections) as world:
        evaluated = make_group(2, 1, purpose="eval")
        for group in (make_group(0, members), make_group(1, 1), evaluated):
            await world.ask(group)
        await all_written(world, members + 2)
        world.rig.topic.publish(key, msgspec.msgpack.encode(("7", "0", evaluated.key)))
        ended = await world.whole(members)
        assert [(sample.status, sample.response_length > 0) for sample in ended] == [("aborted", True)] * members
        await until(lambda: running(world) == 2)
        [target] = world.stage.sampler.directory.serving()
        assert target.slots.taken == 2


async def test_a_conversation_whose_group_is_decided_has_no_further_turn(tmp_path: Path) -> None:
    async with started(tmp_path, rollout={"max_turns": 3}, **ONCE) as world:
        world.rig.topic.publish("decided/group-3", msgspec.msgpack.encode(("0",)))
        await idle()
        back = await world.rig.outlet("generate.return")
        for group in (0, 1):
            await back.send(make_slice(group, make_sample(0, status="pending"), n_samples=1), str(group))
            [sample] = await world.whole(1)
            assert (sample.status, sample.length) == (("aborted", 7), ("completed", 7 + 40))[group]


async def test_what_is_too_old_already_is_not_continued(tmp_path: Path, log: Log) -> None:
    """After an engine was lost, for instance."""
    async with started(tmp_path, asynchrony=BOUND) as world:
        await publish(world, 2)
        request = SampleRequest(SamplingParams(max_new_tokens=9), token_ids=[1, 2, 3], cancel_stale=True)
        for version in (0, 1):
            made = SampleResult("aborted", (5,), (-1.0,), (VersionRun(version, 1),))
            async with world.stage.sampler.stream(request, [made]) as members:
                [(_, result)] = [member async for member in members]
            assert (result.finish, len(log)) == (("aborted", 0), ("length", 1))[version]


async def test_a_conversation_that_grew_too_old_has_no_further_turn(tmp_path: Path) -> None:
    sections = {"rollout": {"max_turns": 3}, "asynchrony": BOUND}
    async with started(tmp_path, **sections, **ONCE) as world:
        await publish(world, 2)
        back = await world.rig.outlet("generate.return")
        for group, version in enumerate((0, 1)):
            await back.send(
                make_slice(group, make_sample(0, version=version, status="pending"), n_samples=1), str(group)
            )
            [sample] = await world.whole(1)
            assert (sample.status, sample.length) == (("aborted", 7), ("completed", 7 + 40))[version]


async def test_a_group_that_was_ended_is_stale(desk: Desk) -> None:
    """Also where this stage has not heard of the version: then it is discarded, which a resume sends again too."""
    desk.rig.topic.publish("weights", msgspec.msgpack.encode(WeightsAnnouncement(0, 3, "slot", "0", 3)))
    await idle()
    for group, version in enumerate((0, 3)):
        await desk.send(make_slice(group, *(make_sample(at, status="aborted", version=version) for at in range(3))))
        report = await settled(desk)
        assert report.outcome == ("discarded" if version else "stale")
    assert report.detail == "insufficient_members: 0 of 3; aborted"
