"""The reward stage: what is graded, with which grader, and that a hostile grader costs its own sample only.

What belongs to whole groups (--group-rm) is asked of `Grading` as well, as the group stage asks it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages.base import Activity
from stages.graders.grade import GradeCache
from stages.graders.pool import Grade
from stages.messages import RolloutSlice
from stages.reward.stage import Grading, RewardStage
from tests.stages.reward.answer_server import answering
from tests.stages.stage_rig import make_config, make_context, make_sample, make_slice, open_rig, running, take

GRADE = "tests.stages.custom_parts:grade"
BEHAVE = "tests.stages.graders.sample_graders:behave"
NOTE = "tests.stages.graders.sample_graders:note"
GROUP = "tests.stages.graders.sample_graders:rank_by_length"


@asynccontextmanager
async def grading(
    sections: dict[str, Any] | None = None, judge: str | None = None, **reward: object
) -> AsyncIterator[tuple[RewardStage, Any]]:
    """The stage, and a function that sends slices through it; `judge` is the address of the engine `strict`."""
    config = make_config(reward={"reward_workers": 0, **reward}, **(sections or {}))
    stage = RewardStage(make_context(config))
    async with open_rig() as rig:
        if judge is not None:
            rig.frozen_at("strict", judge)
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


async def graded(slice_: RolloutSlice, **settings: Any) -> tuple[Any, ...]:
    """The samples of a group, by a stage of their own."""
    async with grading(**settings) as (_, send):
        return (await send(slice_))[slice_.group.group_id].samples


@asynccontextmanager
async def opened(sections: dict[str, Any] | None = None, **reward: object) -> AsyncIterator[Grading]:
    """What the stage grades with."""
    subject = Grading(make_context(make_config(reward=reward, **(sections or {}))), Activity())
    await subject.open()
    try:
        yield subject
    finally:
        await subject.close()


def said(group_id: int, *responses: str, **fields: Any) -> RolloutSlice:
    return make_slice(group_id, *(make_sample(i, response=text) for i, text in enumerate(responses)), **fields)


async def test_the_row_names_its_grader_and_a_custom_one_wins_over_both() -> None:
    row = '{"rm_type":"constant:0.25"}'
    async with grading(rm_type="exact") as (_, send):
        found = await send(said(0, "7", label="7"), said(1, "7", label="7", metadata=row))
        assert [found[i].samples[0].reward for i in (0, 1)] == [1.0, 0.25]
    text = said(0, "two words", label="7", metadata=row)
    (sample,) = await graded(text, rm_type="exact", custom_rm_path=GRADE, reward_key="words", reward_workers=1)
    assert (sample.reward, sample.reward_parts) == (2.0, {"score": 9.0, "words": 2.0})


async def test_the_key_names_the_score_of_an_answer_without_one() -> None:
    grader = {"custom_rm_path": "tests.stages.custom_parts:words_alone", "reward_workers": 1}
    (sample,) = await graded(said(0, "two words"), reward_key="words", **grader)
    assert (sample.reward, sample.reward_parts) == (2.0, {"score": 2.0, "words": 2.0, "characters": 9.0})
    (sample,) = await graded(said(0, "two words"), **grader)
    assert "needs a number under 'score'; its keys: words, characters" in (sample.error or "")


@pytest.mark.parametrize(("grader", "reads_all"), [("gsm8k_flex", False), (r"format:.*42\].*", True), (GRADE, True)])
async def test_what_a_tool_said_is_no_answer(grader: str, reads_all: bool) -> None:
    """A number is right where the model stated it behind the tool's result. Some graders look at the whole response."""
    called = "[6*7]42]"
    settings = {"custom_rm_path": grader, "reward_workers": 1} if grader == GRADE else {"rm_type": grader}
    async with grading(**settings) as (_, send):
        members = [make_sample(i, response=called + said) for i, said in enumerate(("=42", "=", ""))]
        tools = [msgspec.structs.replace(sample, answer_start=len(called)) for sample in members]
        found = (await send(make_slice(0, *tools, label="42")))[0].samples
        whole = (await send(make_slice(1, *members, label="42")))[1].samples
    graded, plain = [s.reward for s in found], [s.reward for s in whole]
    assert len(set(plain)) == 1 or reads_all
    assert graded == (plain if reads_all else [1.0, 0.0, 0.0])


@pytest.mark.slow
async def test_a_raising_a_dying_and_a_hanging_grader_fail_their_samples_only() -> None:
    reward = {"custom_rm_path": BEHAVE, "reward_workers": 1, "reward_deadline_s": 1.0, "reward_retries": 0}
    async with grading(**reward) as (stage, send):
        found = await send(said(0, "raise", "fine", "os._exit", "good", "hang"), said(1, "alone"))
        samples = found[0].samples
        assert [s.status for s in samples] == ["failed", "completed", "failed", "completed", "failed"]
        assert [s.reward for s in samples] == [None, 4.0, None, 4.0, None]
        errors = [s.error or "" for s in samples]
        assert errors[0].startswith(f"grader {BEHAVE}: ValueError: no such answer (/")
        assert "the grader process died (exit status 7)" in errors[2]
        assert "no grade within 1 s (--reward-deadline-s)" in errors[4]
        assert found[1].samples[0].reward == 5.0, "the next group is graded as if nothing had happened"
        assert stage.activity.failures == 3


@pytest.mark.parametrize("metadata", ["[]", "not json", '{"rm_type": 3}'])
async def test_strange_metadata_fails_the_group_only(metadata: str) -> None:
    async with grading(rm_type="exact") as (_, send):
        found = await send(said(0, "7", label="7", metadata=metadata), said(1, "7", label="7"))
        strange, plain = found[0].samples[0], found[1].samples[0]
        assert strange.status == "failed"
        assert (strange.error or "").startswith("RewardStage: ") or "grader 3" in (strange.error or "")
        assert plain.reward == 1.0


async def test_errors_may_count_as_zero() -> None:
    async with grading(custom_rm_path=BEHAVE, reward_workers=1, reward_on_error="zero") as (stage, send):
        bad, good = (await send(said(0, "raise", "good")))[0].samples
        assert (bad.status, bad.reward, bad.is_correct) == ("completed", 0.0, None)
        assert (bad.error or "").startswith(f"grader {BEHAVE}: ValueError: no such answer (/")
        assert (good.reward, good.error) == (4.0, None)
        assert stage.activity.failures == 1


SHAPING: dict[str, Any] = {"overlong_buffer_len": 20, "mask_truncated": True, "rm_type": "constant:1"}
SHAPING["sections"] = {"rollout": {"rollout_max_response_len": 100}}


async def test_long_responses_are_penalised_and_truncated_ones_masked() -> None:
    members = (make_sample(0, n=80), make_sample(1, n=85), make_sample(2, n=100, status="truncated"))
    found = await graded(make_slice(0, *members), **SHAPING)
    assert [s.reward for s in found] == pytest.approx([1.0, 0.75, 0.0])
    assert [s.raw_reward for s in found] == [None, 1.0, 1.0]
    assert [s.remove_sample for s in found] == [False, False, True]
    assert [s.reward_parts["overlong_penalty"] for s in found] == pytest.approx([0.0, -0.25, -1.0])


async def test_tokens_that_are_not_trained_do_not_count_as_length() -> None:
    tool = make_sample(0, n=100, mask=[1] * 50 + [0] * 50)
    split = (make_sample(1, n=45, sequences=2), make_sample(1, n=45, sequence=1, sequences=2))
    found = await graded(make_slice(0, tool, *split, n_samples=2), **SHAPING)
    assert [s.reward for s in found] == [1.0, None, 0.5]


async def test_a_redelivered_sample_is_graded_once_but_another_response_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    row = json.dumps({"log": str(log)})
    async with opened(custom_rm_path=NOTE) as subject:
        for _ in range(2):
            found = await subject.grade(said(0, "a", "b", metadata=row))
            assert [s.reward for s in found.samples] == [1.0, 1.0]
        await subject.grade(said(0, "c", "b", metadata=row))
        await subject.grade(said(1, "a", metadata=row))
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["a", "b", "c", "a"]
    assert subject.observed.cached == 3


def test_the_cache_is_bounded_and_keeps_no_failures() -> None:
    cache = GradeCache(2)
    keys = [("train", -1, group, 0, "mine:f", b"") for group in range(3)]
    for key in keys:
        cache.put(key, Grade(float(key[2])))
        cache.get(keys[0])
    assert [cache.get(key) for key in keys] == [Grade(0.0), None, Grade(2.0)]
    cache.put(keys[1], Grade(0.0, error="gone"))
    cache.put(None, Grade(1.0))
    assert [cache.get(key) for key in (*keys, None)] == [Grade(0.0), None, Grade(2.0), None]


async def test_a_part_of_a_group_passes_ungraded_and_the_whole_is_graded_once() -> None:
    """What the reward and the group stage do with a group whose rollouts end one by one."""
    sections = {"rollout": {"rollout_max_response_len": 8}}
    async with opened(sections, group_rm=True, custom_rm_path=GROUP, overlong_buffer_len=8) as subject:
        parts = [make_slice(0, make_sample(k, response="x" * (k + 1)), n_samples=3) for k in range(3)]
        passed = [await subject.grade(part) for part in parts]
        assert passed == parts
        whole = RolloutSlice(parts[0].group, tuple(part.samples[0] for part in passed))
        graded = await subject.grade(whole)
        assert [s.raw_reward for s in graded.samples] == [0.0, 0.5, 1.0]
        assert [s.reward for s in graded.samples] == [-0.5, 0.0, 0.5]
        assert await subject.grade(graded) == graded


async def test_a_group_grader_must_be_a_function_of_the_user() -> None:
    (sample,) = await graded(said(0, "a"), group_rm=True, custom_rm_path="exact", reward_workers=1)
    assert "it is no grader of groups" in (sample.error or "")


async def test_a_reward_model_is_queried_by_the_stage_without_a_process() -> None:
    async with answering("/rm", {"score": 0.5, "helpful": 3}) as (url, server):
        async with grading(rm_type="remote", rm_url=url + "/rm") as (stage, send):
            found = (await send(said(4, "a", "b", label="7", metadata='{"level":2}')))[4].samples
            assert [s.reward for s in found] == [0.5, 0.5]
            assert found[0].reward_parts == {"helpful": 3.0}
            assert not stage._grading._pool._idle
        assert sorted(question["sample_id"] for question in server.bodies) == ["4/0", "4/1"]
        assert server.bodies[0]["prompt"] == "?"
        assert server.bodies[0]["metadata"] == {"level": 2}


async def test_components_may_be_graded_at_several_places() -> None:
    async with answering("/a", 1) as (first, _), answering("/b", 0.5) as (second, _):
        parts = [f"a=remote:{first}/a@1", f"b=remote:{second}/b@2", "c=exact@4", "d=length:4@0.5"]
        right, wrong = await graded(said(0, "7", "17", label="7"), reward_component=parts)
    assert (right.reward, right.reward_parts) == (6.0, {"a": 1.0, "b": 0.5, "c": 1.0, "d": 0.0})
    assert (wrong.reward, right.is_correct, wrong.is_correct) == (2.0, True, False)


async def test_grader_processes_that_cannot_start_are_reported_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    async with answering("/rm", 1) as (url, _):
        for parts in (["c=sleep:0@1"], ["a=remote@1", "c=sleep:0@1"]):
            (sample,) = await graded(said(0, "7"), reward_component=parts, rm_url=f"{url}/rm", reward_workers=1)
            assert (sample.error or "").startswith("RewardStage: PoolError: a grader process ended at its start")


async def test_a_judge_is_found_through_the_topic() -> None:
    answer = {"text": "fine\nScore: 0.25", "meta_info": {"id": "1", "finish_reason": {"type": "stop"}}}
    async with answering("/generate", answer) as (url, server):
        sections = {"engine": {"frozen_engine": [f"strict={url}"]}}
        asked: dict[str, Any] = {"sections": sections, "judge": url, "rm_type": "judge", "judge_engine": "strict"}
        (sample,) = await graded(said(0, "Score: 1"), **asked)
        assert sample.reward == 0.25
        assert "Score: 1" in server.bodies[0]["text"]
    (sample,) = await graded(said(0, "7"), rm_type="judge")
    assert "rm_type 'judge' has no engine; name one with --frozen-engine" in (sample.error or "")


async def test_programs_are_run_through_the_stage() -> None:
    row = json.dumps({"rm_type": "code", "tests": [{"input": "3", "output": "9"}]})
    programs = said(0, "print(int(input()) ** 2)", "print(6)", metadata=row)
    right, wrong = await graded(programs, reward_workers=1)
    assert (right.reward, right.is_correct, wrong.reward) == (1.0, True, 0.0)
    assert (right.reward_parts["pass_frac"], right.answer) == (1.0, right.response)
