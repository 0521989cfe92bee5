"""The reward stage: what is graded, with which grader, and that a hostile grader costs its own sample only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stages.messages import RolloutSlice
from stages.reward import RewardStage
from tests.stages.stage_rig import make_config, make_context, make_sample, make_slice, open_rig, running, take

GRADE = "tests.stages.custom_parts:grade"
BEHAVE = "tests.stages.graders.sample_graders:behave"


@asynccontextmanager
async def grading(**reward: object) -> AsyncIterator[tuple[RewardStage, Any]]:
    """The stage, and a function that sends slices through it."""
    stage = RewardStage(make_context(make_config(reward={"reward_workers": 0, **reward})))
    async with open_rig() as rig:
        ports = await rig.join({"in": ("reward", RolloutSlice)}, {"out": ("group", RolloutSlice)})
        feed, out = await rig.outlet("reward"), await rig.inlet("group")

        async def send(*slices: RolloutSlice) -> dict[int, RolloutSlice]:
            for slice_ in slices:
                await feed.send(slice_, slice_.key)
            found = [await take(out) for _ in slices]
            return {slice_.group.group_id: slice_ for slice_ in found}

        async with running(stage, ports):
            yield stage, send
        assert rig.letters == []


def said(group_id: int, *responses: str, **fields: Any) -> RolloutSlice:
    return make_slice(group_id, *(make_sample(i, response=text) for i, text in enumerate(responses)), **fields)


async def test_finished_samples_are_graded_and_others_left_alone() -> None:
    async with grading(rm_type="exact") as (_, send):
        members = (
            make_sample(0, response="7"),
            make_sample(1, response="8", status="truncated"),
            make_sample(2, response="7", status="failed", error="engine: gone"),
            make_sample(3, response="7", status="aborted"),
        )
        found = (await send(make_slice(0, *members, label="7")))[0].samples
        assert [s.reward for s in found] == [1.0, 0.0, None, None]
        assert [s.is_correct for s in found] == [True, False, None, None]
        assert [s.status for s in found] == ["completed", "truncated", "failed", "aborted"]
        assert found[2].error == "engine: gone"


async def test_the_row_names_its_grader_and_a_custom_one_wins_over_both() -> None:
    row = '{"rm_type":"constant:0.25"}'
    async with grading(rm_type="exact") as (_, send):
        found = await send(said(0, "7", label="7"), said(1, "7", label="7", metadata=row))
        assert [found[i].samples[0].reward for i in (0, 1)] == [1.0, 0.25]
    async with grading(rm_type="exact", custom_rm_path=GRADE, reward_workers=1) as (_, send):
        found = await send(said(0, "two words", label="7", metadata=row))
        (sample,) = found[0].samples
        assert sample.reward == 9.0
        assert sample.reward_parts == {"words": 2.0}


async def test_graders_that_draw_get_a_seed_of_each_sample() -> None:
    rewards = []
    for _ in range(2):
        async with grading(rm_type="random") as (_, send):
            found = await send(said(0, *["x"] * 32))
            rewards.append([s.reward for s in found[0].samples])
    assert rewards[0] == rewards[1], "a redelivered slice gets the same rewards"
    assert len(set(rewards[0])) > 1


async def test_the_length_grader_counts_tokens() -> None:
    async with grading(rm_type="length:4") as (_, send):
        found = await send(make_slice(0, make_sample(0, n=4), make_sample(1, n=40)))
        first, second = (s.reward for s in found[0].samples)
        assert first > second


async def test_a_raising_a_dying_and_a_hanging_grader_fail_their_samples_only() -> None:
    async with grading(custom_rm_path=BEHAVE, reward_workers=1, reward_deadline_s=1.0, reward_retries=0) as (
        stage,
        send,
    ):
        found = await send(said(0, "raise", "fine", "os._exit", "good", "hang"), said(1, "alone"))
        samples = found[0].samples
        assert [s.status for s in samples] == ["failed", "completed", "failed", "completed", "failed"]
        assert [s.reward for s in samples] == [None, 4.0, None, 4.0, None]
        errors = [s.error or "" for s in samples]
        assert errors[0] == f"grader {BEHAVE}: ValueError: no such answer"
        assert "the grader process died (exit code 7)" in errors[2]
        assert "no grade within 1 s (--reward-deadline-s)" in errors[4]
        assert found[1].samples[0].reward == 5.0, "the next group is graded as if nothing had happened"
        assert stage.activity.failures == 3


async def test_an_unknown_grader_fails_samples_in_words() -> None:
    async with grading(rm_type="exat") as (_, send):
        (sample,) = (await send(said(0, "7", label="7")))[0].samples
        assert sample.status == "failed"
        assert "did you mean 'exact'?" in (sample.error or "")


async def test_a_row_without_a_label_fails_in_words() -> None:
    async with grading(rm_type="exact") as (_, send):
        (sample,) = (await send(said(0, "7", label=None)))[0].samples
        assert "the sample has no label" in (sample.error or "")


@pytest.mark.parametrize("metadata", ["[]", "not json", '{"rm_type": 3}'])
async def test_strange_metadata_fails_the_group_only(metadata: str) -> None:
    async with grading(rm_type="exact") as (_, send):
        found = await send(said(0, "7", label="7", metadata=metadata), said(1, "7", label="7"))
        assert found[0].samples[0].status == "failed"
        assert (found[0].samples[0].error or "").startswith("RewardStage: ") or "grader 3" in (
            found[0].samples[0].error or ""
        )
        assert found[1].samples[0].reward == 1.0
