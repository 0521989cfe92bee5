"""Fan-out, membership and group grading in the group stage, on real streams."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stages.messages import Float32Array, Sample, WeightsAnnouncement, wire
from tests.stages.group_rig import Desk, failed, open_desk, settled
from tests.stages.stage_rig import idle, make_config, make_sample, make_slice, take

PARTS = "tests.stages.custom_parts"


def parts(index: int, n: int, *, reward: float | None = None, **fields: Any) -> list[Sample]:
    """The sequences of a rollout; the last one is graded."""
    return [
        make_sample(index, sequence=k, sequences=n, reward=reward if k == n - 1 else None, response=f"{k}", **fields)
        for k in range(n)
    ]


async def test_a_rollout_with_several_sequences_is_complete_with_its_last_sequence(desk: Desk) -> None:
    first, second, third = parts(0, 3, reward=1.0, is_correct=True)
    await desk.send(make_slice(0, second, make_sample(1, reward=0.0, is_correct=False), n_samples=2))
    await desk.send(make_slice(0, third, n_samples=2))
    await idle()
    assert desk.rig.hubs["group"].stats().settled == 0, "both rollouts are here, but not all of the first"
    await desk.send(make_slice(0, first, n_samples=2))
    whole = await take(desk.out)
    assert [(s.index, s.sequence) for s in whole.samples] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [s.reward for s in whole.samples] == [1.0, 1.0, 1.0, 0.0]
    assert [s.is_correct for s in whole.samples] == [True, True, True, False]
    await desk.rig.hubs["group"].wait_empty()


async def test_a_redelivered_rollout_that_fans_out_otherwise_is_dropped(desk: Desk) -> None:
    first = parts(0, 2, reward=1.0)
    again = parts(0, 3, reward=5.0)
    await desk.send(make_slice(0, first[0], n_samples=2), make_slice(0, *again, n_samples=2))
    await desk.send(make_slice(0, first[1], make_sample(1, reward=0.0), n_samples=2))
    assert [s.reward for s in (await take(desk.out)).samples] == [1.0, 1.0, 0.0]


async def test_a_rollout_with_a_failed_sequence_is_no_member(desk: Desk) -> None:
    broken = [
        make_sample(0, sequence=0, sequences=2, status="failed", error="tool lost"),
        parts(0, 2, reward=1.0)[1],
    ]
    await desk.send(make_slice(0, *broken, *(make_sample(i, reward=float(i)) for i in (1, 2)), n_samples=3))
    assert [s.index for s in (await take(desk.out)).samples] == [1, 2]
    await desk.send(make_slice(1, *broken, make_sample(1, reward=1.0), n_samples=2))
    report = await settled(desk)
    assert report.detail == "insufficient_members: 1 of 2; tool lost"
    assert report.reward == 1.0, "both rollouts were graded, and each counts once"


async def test_why_members_failed_is_told_once_where_their_group_goes_on(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for number, why in enumerate(["tool lost", "tool lost", "engine gone"]):
        members = [make_sample(i, reward=float(i)) for i in (0, 1)]
        await desk.send(make_slice(number, *members, make_sample(2, status="failed", error=why), n_samples=3))
        assert len((await take(desk.out)).samples) == 2
    told = [
        record.getMessage().split(" goes on with ")[1] for record in caplog.records if record.name == "sluice.group"
    ]
    assert told == [f"2 of its 3 rollouts; others failed: {why}" for why in ("tool lost", "engine gone")]


async def test_sequences_do_not_count_twice_in_what_is_reported() -> None:
    async with open_desk(make_config(filter={"dynamic_sampling_filter": ("reward:0.9_1",)})) as one:
        members = [*parts(0, 3, reward=1.0, is_correct=True), make_sample(1, reward=0.0, is_correct=False)]
        await one.send(make_slice(0, *members, n_samples=2))
        report = await settled(one)
        assert (report.detail, report.reward, report.pass_rate, report.tokens) == ("reward_low", 0.5, 0.5, 16)


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "on_policy_distillation"])
async def test_one_member_is_enough_for_an_estimator_that_compares_none(estimator: str) -> None:
    async with open_desk(make_config(algorithm={"advantage_estimator": estimator})) as one:
        await one.send(make_slice(0, make_sample(0, reward=1.0), failed(1)))
        assert len((await take(one.out)).samples) == 1


async def test_a_removed_sample_stays_a_member(desk: Desk) -> None:
    await desk.send(make_slice(0, make_sample(0, reward=1.0, remove_sample=True), make_sample(1, reward=0.0)))
    assert [s.remove_sample for s in (await take(desk.out)).samples] == [True, False]


async def test_a_teacher_that_scored_another_text_fails_the_group(desk: Desk) -> None:
    scored = make_sample(1, reward=0.0, teacher_log_probs=wire([-1.0, -2.0], Float32Array))
    await desk.send(make_slice(0, make_sample(0, reward=1.0), scored))
    assert (await settled(desk)).detail == (
        "sample 1: arrays differ in length: ids 7, mask 7, log-probs 7, teacher log-probs 2"
    )


async def test_the_staleness_filter_learns_of_new_weights() -> None:
    async with open_desk(make_config(filter={"dynamic_sampling_filter": ("staleness:1",)})) as one:
        await one.send(make_slice(0))
        assert (await take(one.out)).group.group_id == 0
        announced = WeightsAnnouncement(0, 2, "slot", "0", 2)
        one.rig.topic.publish("weights", msgspec.msgpack.encode(announced))
        await idle()
        await one.send(make_slice(1))
        assert (await settled(one)).detail == "too_stale"


async def test_a_second_group_of_a_prompt_is_a_duplicate() -> None:
    async with open_desk(make_config(filter={"dynamic_sampling_filter": ("duplicate_prompt",)})) as one:
        await one.send(make_slice(0), make_slice(1))
        assert (await take(one.out)).group.group_id == 0
        assert (await settled(one)).detail == "duplicate_prompt"


async def test_groups_that_are_only_good_enough_as_a_fallback_pass() -> None:
    async with open_desk(make_config(filter={"dynamic_sampling_filter": ("nonzero_std_fallback",)})) as one:
        await one.send(make_slice(0, make_sample(0, reward=1.0), make_sample(1, reward=1.0)))
        assert (await take(one.out)).group.group_id == 0


GROUP_RM = {"group_rm": True, "custom_rm_path": f"{PARTS}:best_of_group", "reward_workers": 1}


async def test_a_whole_group_is_graded_when_its_last_rollout_has_come() -> None:
    async with open_desk(make_config(reward=GROUP_RM)) as one:
        await one.send(make_slice(0, make_sample(0, response="a"), n_samples=3))
        await one.send(make_slice(0, make_sample(1, response="abc"), make_sample(2, response="ab"), n_samples=3))
        assert [s.reward for s in (await take(one.out)).samples] == [0.0, 1.0, 0.0]
        await one.rig.hubs["group"].wait_empty()


async def test_evaluated_groups_are_graded_whole_as_well() -> None:
    async with open_desk(make_config(reward=GROUP_RM)) as one:
        evaluated = await one.rig.inlet("evaluate")
        fields: dict[str, Any] = {"purpose": "eval", "dataset": "held", "pinned_version": 3, "n_samples": 2}
        await one.send(make_slice(0, make_sample(0, response="a"), **fields))
        await one.send(make_slice(0, make_sample(0, response="train"), n_samples=2))
        await one.send(make_slice(0, make_sample(1, response="abc"), **fields))
        found = await take(evaluated)
        assert [(s.index, s.reward) for s in found.samples] == [(0, 0.0), (1, 1.0)]
        one.rig.topic.publish("drain", b"interrupted")
        assert (await settled(one)).group_id == 0, "the group in training of the same number is another one"
        await one.rig.hubs["group"].wait_empty()
