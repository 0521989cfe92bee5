"""The evaluate stage: one result and one release for every pinned version; pass@k and best@k by golden numbers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import EvalConfig
from stages.evaluate import EvaluateStage, best_at_k, estimates, interval, majority, pass_at_k
from stages.messages import EVAL_BASE, EvalDone, PromptGroup, RolloutSlice, Sample, WeightsAnnouncement
from stages.ports import Ports
from stages.sampling.rollout_requests import Requests
from stages.slime.types import sampling_parameters
from tests.stages.prompt_rig import Rows
from tests.stages.slime import user_code
from tests.stages.stage_rig import (
    REPORT,
    Rig,
    before_calls,
    idle,
    make_config,
    make_context,
    make_sample,
    numbers,
    open_rig,
    running,
    take,
    time_limit,
    until,
)
from transport.stream import Inlet, Outlet
from transport.topic import TopicClient


@dataclass
class Desk:
    """The streams around a stage: its prompts, the answers to them, and its reports."""

    rig: Rig
    asked: Inlet[Any]
    answers: Outlet[Any]
    reports: Inlet[Any]

    async def prompts(self, n: int) -> list[PromptGroup]:
        return [await take(self.asked) for _ in range(n)]

    async def answer(self, group: PromptGroup, *samples: Sample) -> None:
        slice_ = RolloutSlice(group, samples)
        await self.answers.send(slice_, slice_.key)

    async def answer_all(self, groups: list[PromptGroup], version: int) -> None:
        for group in groups:
            await self.answer(group, *(make_sample(i, version=version, reward=1.0) for i in range(group.n_samples)))

    def pin(self, version: int) -> None:
        pin(self.rig, version)
        self.rig.applied(version)

    async def released(self, version: bytes) -> None:
        """Wait for the release, which may come before or after the result."""
        await self.rig.topic_until(lambda: self.rig.topic.get("eval/released") == version)

    async def result(self) -> EvalDone:
        found = await take(self.reports)
        assert isinstance(found, EvalDone)
        return found


def pin(rig: Rig, version: int) -> None:
    announcement = WeightsAnnouncement(0, version, "slot", "0" * 32, 2, pinned=True)
    rig.topic.publish(f"weights/pinned/{version}", msgspec.msgpack.encode(announcement))


async def join(rig: Rig, replica: str = "evaluate-0") -> Ports:
    return await rig.join(
        {"in": ("evaluate", RolloutSlice)},
        {"out": ("generate.eval", PromptGroup), "settle": ("settle", REPORT)},
        replica=replica,
    )


async def around(rig: Rig) -> Desk:
    return Desk(rig, await rig.inlet("generate.eval"), await rig.outlet("evaluate"), await rig.inlet("settle"))


def make_stage(**evaluation: object) -> EvaluateStage:
    observe = evaluation.pop("observe", {})
    sections = {"eval_prompt_data": ("held=held.jsonl",), **evaluation}
    return EvaluateStage(make_context(make_config(eval=sections, observe=observe)))


@pytest.fixture(autouse=True)
def _held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.data.prompt_set.load_eval_prompts", lambda config, name, path: Rows(n=3))


@asynccontextmanager
async def open_desk(**evaluation: object) -> AsyncIterator[Desk]:
    async with open_rig() as rig, running(make_stage(**evaluation), await join(rig)):
        yield await around(rig)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    with time_limit():
        async with open_desk() as opened:
            yield opened


@pytest.mark.parametrize(
    ("entry", "name", "path"),
    [
        ("math=data/test.jsonl@[0:9]", "math", "data/test.jsonl@[0:9]"),
        ("data/test.jsonl@[0:9]", "test", "data/test.jsonl@[0:9]"),
        ("data/a=b.jsonl", "a=b", "data/a=b.jsonl"),
    ],
)
def test_data_sets_are_named(entry: str, name: str, path: str) -> None:
    assert EvalConfig(eval_prompt_data=(entry,)).data_sets == ((name, path),)


async def test_each_data_set_has_its_own_settings_over_the_common_ones() -> None:
    """Samples, grader (of rows that name none), sampling and lengths."""
    sampled = {"temperature": 0.7, "top_p": 0.5, "top_k": 9, "max_response_len": 5, "stop": ["###"]}
    own = {"hard": {"n_samples": 3, "rm_type": "f1", **sampled}}
    common = {"n_samples_per_eval_prompt": 2, "eval_max_response_len": 4, "eval_prompt_data": ("held=a", "hard=b")}
    common["eval_stop_token_ids"] = (4,)
    rollout = {"rollout_max_response_len": 7, "rollout_stop": ("END",)}
    config = make_config(eval={**common, "eval_sets": own}, rollout=rollout)
    async with open_desk(**common, eval_sets=own) as one:
        one.pin(1)
        groups = await one.prompts(6)
    requests = Requests(config, 100)
    found = set()
    for group in groups:
        sample = make_sample(n=0)
        params = requests.params(group, sample, requests.budget(group, sample), 1)
        drawn = sampling_parameters(params)
        assert (params.stop, params.stop_token_ids) == (["END", "###"] if group.dataset == "hard" else ["END"], [4])
        for name in ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids"):
            assert drawn[name] == getattr(params, name)
        grader = group.row_metadata.get("rm_type")
        found.add((group.dataset, group.n_samples, grader, params.temperature, params.top_p, params.max_new_tokens))
    assert found == {("held", 2, None, 0.0, 1.0, 4), ("hard", 3, "f1", 0.7, 0.5, 5)}


async def test_no_more_rollouts_than_allowed_are_under_way() -> None:
    with time_limit():
        async with open_desk(n_samples_per_eval_prompt=2, eval_max_in_flight=5) as one:
            one.pin(1)
            first, second = await one.prompts(2)
            await idle()
            assert one.rig.hubs["generate.eval"].stats().accepted == 2, "two rollouts more would be six"
            await one.answer(first, make_sample(0, version=1, reward=1.0))
            await one.answer_all(await one.prompts(1), 1)
            await one.answer(first, make_sample(1, version=1, reward=1.0))
            await one.answer_all([second], 1)
            assert (await one.result()).metrics["eval/held-prompts"] == 3


async def test_a_pinned_version_is_queried_when_every_engine_has_it_and_scored_once() -> None:
    async with open_desk(n_samples_per_eval_prompt=2) as one:
        one.pin(3)
        one.rig.applied(2, engine=1)
        await idle()
        assert one.rig.hubs["generate.eval"].stats().accepted == 0
        one.rig.applied(3, engine=1)
        groups = await one.prompts(3)
        assert [(g.group_id, g.prompt_index, g.n_samples) for g in groups] == [(EVAL_BASE + i, i, 2) for i in range(3)]
        assert {(g.purpose, g.dataset, g.pinned_version) for g in groups} == {("eval", "held", 3)}
        assert [numbers(g.prompt_ids) for g in groups] == [[0], [1], [2]]
        for group, reward in zip(groups, (1.0, 0.0, 0.5), strict=True):
            await one.answer(group, make_sample(0, version=3, reward=reward))
            cut = make_sample(1, version=3, reward=reward, status="truncated", n=8)
            await one.answer(group, cut)
        done = await one.result()
        assert (done.version, done.complete, done.detail) == (3, True, "")
        assert done.metrics["eval/held"] == 0.5
        assert done.metrics["eval/held-truncated_ratio"] == 0.5
        assert done.metrics["eval/held-failed_ratio"] == 0.0
        assert done.metrics["eval/held-response_len"] == 6.0
        assert done.metrics["eval/held-mixed_versions"] == 0.0
        await one.released(b"3")
        one.rig.applied(4)
        await idle()
        assert one.rig.hubs["generate.eval"].stats().accepted == 3, "the same pin is not evaluated again"


async def test_answers_of_another_version_or_data_set_are_ignored_and_duplicates_count_once(desk: Desk) -> None:
    desk.pin(1)
    groups = await desk.prompts(3)
    strange = [
        msgspec.structs.replace(groups[0], pinned_version=0),
        msgspec.structs.replace(groups[0], dataset="other"),
    ]
    for group in strange:
        await desk.answer(group, make_sample(0, version=1, reward=9.0))
    await desk.answer(groups[0], make_sample(0, version=1, reward=1.0))
    await desk.answer(groups[0], make_sample(0, version=1, reward=9.0, turns=2))
    await desk.answer_all(groups[1:], 1)
    assert (await desk.result()).metrics["eval/held"] == 1.0
    await desk.rig.hubs["evaluate"].wait_empty()


async def test_the_deadline_gives_up_and_releases() -> None:
    async with open_desk(eval_deadline_s=0.05) as one:
        one.pin(0)
        late, *_ = await one.prompts(3)
        done = await one.result()
        assert (done.complete, done.detail) == (False, "--eval-deadline-s 0.05 passed")
        assert "eval/held" not in done.metrics
        await one.released(b"0")
        await one.answer(late, make_sample(0, reward=1.0))
        await one.rig.hubs["evaluate"].wait_empty()  # nothing holds an answer that comes too late
        one.pin(1)
        assert (await one.result()).version == 1


@pytest.mark.parametrize("applied", [True, False])
async def test_a_drain_ends_an_evaluation_and_releases(applied: bool, desk: Desk) -> None:
    """Also one of a pin that no engine will apply."""
    pin(desk.rig, 4)
    desk.rig.applied(4 if applied else 3)
    if applied:
        await desk.answer_all((await desk.prompts(3))[:1], 4)
    await idle()
    desk.rig.topic.publish("drain", b"interrupted")
    done = await desk.result()
    assert (done.version, done.complete, done.detail) == (4, False, "drained")
    await desk.released(b"4")


async def test_the_result_is_in_custody_before_the_version_is_released(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[int] = []

    async def look(topic: TopicClient, key: str, value: bytes) -> None:
        if key == "eval/released":
            accepted.append(desk.rig.hubs["settle"].stats().accepted)

    before_calls(monkeypatch, TopicClient, "publish", look)
    pin(desk.rig, 0)
    desk.rig.topic.publish("drain", b"interrupted")
    await desk.result()
    await desk.released(b"0")
    assert accepted == [1]


async def test_a_restarted_stage_first_evaluates_the_version_that_engines_hold(rig: Rig) -> None:
    pin(rig, 0)
    rig.applied(0)
    pin(rig, 1)  # the trainer may: version 0 has landed
    async with running(make_stage(), await join(rig)):
        await idle()
        assert rig.hubs["generate.eval"].stats().accepted == 3


async def test_a_stage_that_is_killed_in_an_evaluation_finishes_it_after_its_restart(rig: Rig) -> None:
    ports = await join(rig)
    one = await around(rig)
    one.pin(0)
    async with running(make_stage(), ports):
        groups = await one.prompts(3)
        await one.answer_all(groups[:2], 0)
        await idle()
    rig.hubs["evaluate"].peer_lost("evaluate-0")
    again = make_stage()
    async with running(again, await join(rig, "evaluate-1")):
        await until(lambda: len(again._answers.get(0, ())) == 2)  # redelivered
        await one.answer_all(groups[2:], 0)
        await idle()
        assert rig.hubs["settle"].stats().accepted == 1
        assert (await one.result()).complete


async def test_pass_at_k_comes_from_the_verdicts_and_a_failed_answer_is_wrong() -> None:
    async with open_desk(n_samples_per_eval_prompt=4) as one:
        one.pin(3)
        solved = {0: (True, False, False, False), 1: (True, True, True, True), 2: (False, False, False, None)}
        for group in await one.prompts(3):
            members = [
                make_sample(i, version=3, status="failed", error="grader died")
                if correct is None
                else make_sample(i, version=3, reward=1.0 if correct else -1.0, is_correct=correct)
                for i, correct in enumerate(solved[group.prompt_index])
            ]
            await one.answer(group, *members)
        metrics = (await one.result()).metrics
        assert metrics["eval/held-pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
        assert metrics["eval/held-pass@2"] == pytest.approx((0.5 + 1 + 0) / 3)
        assert metrics["eval/held-pass@4"] == pytest.approx(2 / 3)
        assert metrics["eval/held-mean@4"] == pytest.approx(1.25 / 3)


async def test_the_most_frequent_answer_is_scored_and_every_figure_has_an_interval_over_prompts() -> None:
    """Two of three prompts are right by majority; of 2 in 3 Wilson's interval is 0.2077 .. 0.9385."""
    async with open_desk(n_samples_per_eval_prompt=3) as one:
        one.pin(3)
        given = {0: ("7", "8", "7"), 1: ("7", "9", "9"), 2: ("7", "7", "7")}
        for group in await one.prompts(3):
            answers = enumerate(given[group.prompt_index])
            correct = "7" if group.prompt_index != 1 else "0"
            members = [
                make_sample(i, version=3, reward=4.0 * (text == correct), is_correct=text == correct, answer=text)
                for i, text in answers
            ]
            await one.answer(group, *members)
        metrics = (await one.result()).metrics
    assert metrics["eval/held-prompts"] == 3.0
    assert metrics["eval/held-maj@3"] == pytest.approx(2 / 3)
    assert metrics["eval/held-maj@3-ci_low"] == pytest.approx(0.2077, abs=1e-4)
    assert metrics["eval/held-maj@3-ci_high"] == pytest.approx(0.9385, abs=1e-4)
    assert [metrics[f"eval/held-{name}"] for name in ("pass@1", "mean@3")] == pytest.approx([5 / 9, 5 / 9])
    assert metrics["eval/held"] == pytest.approx(20 / 9)
    # Means per prompt 8/3, 0, 4: of the 27 draws of three, 1 gives 0, 3 give 8/9, 3 give 10/3, 1 gives 4: tails of
    # 2.5 % begin at the first and the last.
    assert (metrics["eval/held-ci_low"], metrics["eval/held-ci_high"]) == (pytest.approx(0.0), pytest.approx(4.0))


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        ("a+ a+ b-", 1.0),
        ("a+ b- b-", 0.0),
        ("a+ b-", 0.5),
        ("a+ b- c- d-", 0.25),
        ("?- ?- ?- a+", 1.0),
        ("?-", 0.0),
        ("a+ a- b-", 0.5),
    ],
)
def test_a_majority_is_of_the_answers_that_are_there(answers: str, value: float) -> None:
    """`a+` is the answer a, judged right; `?` is no answer; the last case is a grader that contradicts itself."""
    samples = [
        make_sample(i, is_correct=mark == "+", answer=None if text == "?" else text)
        for i, (text, mark) in enumerate(answers.split())
    ]
    assert majority(samples) == value


def test_spaces_make_no_other_answer_and_without_answers_there_is_no_majority() -> None:
    spaced = [make_sample(i, is_correct=i < 2, answer=text) for i, text in enumerate(("x + 1", "x+1", "x-1"))]
    assert estimates([spaced])["maj@3"] == 1.0
    assert "maj@3" not in estimates([[make_sample(i, is_correct=True) for i in range(3)]])
    assert "maj@1" not in estimates([[make_sample(0, is_correct=True, answer="7")]])


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 20, 0.0, 0.16113), (5, 10, 0.23659, 0.76341), (8, 10, 0.49016, 0.94332), (30, 30, 0.88649, 1.0)],
)
def test_wilsons_interval_golden(right: int, n: int, low: float, high: float) -> None:
    assert interval([1.0] * right + [0.0] * (n - right)) == (
        pytest.approx(low, abs=1e-5),
        pytest.approx(high, abs=1e-5),
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_an_interval_holds_the_mean_and_stays_between_0_and_1(values: list[float]) -> None:
    low, high = interval(values)
    assert 0.0 <= low <= sum(values) / len(values) + 1e-12
    assert sum(values) / len(values) - 1e-12 <= high <= 1.0


def test_other_rewards_are_resampled() -> None:
    """400 values: close to the normal approximation, mean +- 1.96 standard errors, and the same each time."""
    values = [float(i % 5) - 1.0 for i in range(400)]  # mean 1, variance 2
    low, high = interval(values)
    assert (low, high) == (pytest.approx(1 - 0.1386, abs=0.015), pytest.approx(1 + 0.1386, abs=0.015))
    assert interval(values) == (low, high)


async def test_an_answer_of_mixed_versions_does_not_count(desk: Desk) -> None:
    """A sub-agent that other weights made spoils its answer; what no weights made is of no version."""
    desk.pin(3)
    mixed, *rest = await desk.prompts(3)
    await desk.answer(mixed, make_sample(0, runs=[(3, 2), (4, 2)], reward=1.0))
    for version, group in zip((2, 3), rest, strict=True):
        first = make_sample(0, runs=[(version, 2), (-1, 2)], mask=[1, 1, 0, 0], sequences=2)
        await desk.answer(group, first, make_sample(0, version=3, reward=0.5, sequence=1, sequences=2))
    done = await desk.result()
    assert (done.complete, done.detail) == (False, "some answers are missing or of another version")
    assert (done.metrics["eval/held"], done.metrics["eval/held-mixed_versions"]) == (0.5, 2.0)
    await desk.released(b"3")


async def test_a_function_that_logs_gets_each_data_set() -> None:
    """And each has its own score."""
    user_code.STARTED.clear()
    log = {"custom_eval_rollout_log_function_path": "tests.stages.slime.user_code:log_evaluation"}
    async with open_desk(eval_prompt_data=("one=a.jsonl", "two=b.jsonl"), observe=log) as one:
        one.pin(2)
        for number, group in enumerate(await one.prompts(6)):
            await one.answer(group, make_sample(0, version=2, reward=float(number)))
        done = await one.result()
    assert (done.metrics["eval/one"], done.metrics["eval/two"], done.complete) == (1.0, 4.0, True)
    questions, answers = ["q0", "q1", "q2"], ["a0", "a1", "a2"]
    assert [
        (2, [0.0, 1.0, 2.0], questions, answers, 1.0),
        (2, [3.0, 4.0, 5.0], questions, answers, 4.0),
    ] == user_code.STARTED


@pytest.mark.parametrize(
    ("n", "correct", "k", "value"),
    [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (8, 2, 4, 0.785714), (8, 0, 8, 0.0), (8, 1, 8, 1.0), (1, 1, 1, 1.0)],
)
def test_pass_at_k_golden(n: int, correct: int, k: int, value: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(value, abs=1e-6)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_hit(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    draws = list(itertools.combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=7), st.data())
def test_best_at_k_is_the_mean_of_the_maxima_of_all_draws(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    draws = list(itertools.combinations(rewards, k))
    assert best_at_k(rewards, k) == pytest.approx(sum(map(max, draws)) / len(draws), abs=1e-9)


def test_nothing_gives_nothing() -> None:
    assert estimates([]) == estimates([[]]) == {}


async def test_a_function_evaluates_all_sets_in_one_call_and_its_failure_is_the_reason() -> None:
    sets = ("held=held.jsonl", "other=other.jsonl")
    async with open_desk(eval_function_path="my.module:evaluate", eval_prompt_data=sets) as desk:
        desk.pin(3)
        [group] = await desk.prompts(1)
        assert (group.pinned_version, group.n_samples, group.purpose) == (3, 1, "eval")
        left = {
            "data": {"mine": {"rewards": [1.0, 0.5], "truncated": [1.0, 0.0]}},
            "metrics": {"m": 2.0},
            "versions": [3],
        }
        await desk.answer(group, make_sample(0, reward=0.0, left=msgspec.json.encode(left).decode()))
        result = await desk.result()
        assert (result.version, result.complete) == (3, True)
        metrics = {name: value for name, value in result.metrics.items() if name != "eval/time_s"}
        assert metrics == {
            "eval/mine": 0.75,
            "eval/mine-prompts": 2.0,
            "eval/mine-truncated_ratio": 0.5,
            "eval_function/m": 2.0,
        }
        for version, answered, complete in ((4, [3, 4], False), (5, [5], True)):
            desk.pin(version)
            [group] = await desk.prompts(1)
            mixed = msgspec.json.encode({**left, "versions": answered}).decode()
            await desk.answer(group, make_sample(0, reward=0.0, left=mixed))
            assert (await desk.result()).complete == complete, "answers of other versions do not count as this one"
        desk.pin(6)
        [group] = await desk.prompts(1)
        await desk.answer(
            group, make_sample(0, status="failed", error="--eval-function-path my.module:evaluate: OSError")
        )
        result = await desk.result()
        assert (result.complete, result.detail) == (False, "--eval-function-path my.module:evaluate: OSError")


@pytest.mark.parametrize(("apart", "waits"), [(0, [None]), (1, [None, 1.0])])
async def test_it_looks_at_the_clock_only_while_engines_of_its_own_are_not_ready(
    apart: int, waits: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float | None] = []

    async def wait(limit_s: float | None, change: Awaitable[Any]) -> Any:
        found.append(limit_s)
        return await change

    monkeypatch.setattr("stages.evaluate.wait_at_most", wait)
    async with open_desk(eval_engines=apart) as desk:
        await idle()
        assert found == [None], "nothing is to be evaluated"
        pin(desk.rig, 7)  # whose weights no engine has
        await until(lambda: len(found) > 1)
        assert list(dict.fromkeys(found)) == waits


async def test_an_evaluation_whose_own_engines_stay_away_is_given_up() -> None:
    """Else a run could not end. The engines of the rollouts carry the version, and do not answer evaluations."""
    async with open_desk(eval_engines=1, eval_deadline_s=0.2) as desk:
        desk.pin(0)
        found = await desk.result()
        assert (found.complete, found.detail) == (False, "no engine was ready for it within --eval-deadline-s 0.2")
        await desk.released(b"0")
