"""The group stage on real streams: assembly, filtering, leases after faults, and several replicas on a keyed stream."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import pytest
from msgspec.structs import replace

from models.import_path import ImportPathError
from stages.group.filters import FilterDecision, FilterState, resolve_filter
from stages.group.stage import GroupStage
from stages.messages import Float32Array, RolloutSlice, Settled, VersionRun, wire
from stages.ports import read_value
from tests.stages.stage_rig import (
    Desk,
    Rig,
    SpanLog,
    before_calls,
    failed,
    idle,
    join,
    make_config,
    make_context,
    make_sample,
    make_slice,
    open_desk,
    running,
    settled,
    take,
    until,
)
from transport.stream import Outlet

PARTS = "tests.stages.custom_parts"


async def test_groups_that_have_left_are_remembered_up_to_a_number(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest, whose duplicates may still come; else a long run would fill the memory."""
    monkeypatch.setattr("stages.group.stage.REMEMBERED_GROUPS", 2)
    for group_id in range(3):
        await desk.send(make_slice(group_id, make_sample(0, reward=1.0), n_samples=1))
        await take(desk.out)
    assert list(desk.stage._finished) == ["1", "2"]


async def test_leases_are_released_only_after_the_group_has_left(desk: Desk) -> None:
    await desk.send(make_slice(0, make_sample(0, reward=1.0), n_samples=2))
    await idle()
    assert desk.rig.hubs["group"].stats().leased == 1
    await desk.send(make_slice(0, make_sample(1, reward=0.0), n_samples=2))
    await take(desk.out)
    await desk.rig.hubs["group"].wait_empty()
    assert desk.rig.hubs["group"].stats().settled == 2


async def test_what_a_killed_replica_held_is_put_together_by_the_next(rig: Rig) -> None:
    ports = await join(rig, "group-0")
    feed, out = await rig.outlet("group"), await rig.inlet("train")
    async with running(GroupStage(make_context()), ports):
        await feed.send(make_slice(0, make_sample(0, reward=1.0), n_samples=3), "a")
        await feed.send(make_slice(0, make_sample(2, reward=0.0), n_samples=3), "b")
        await idle()
        assert rig.hubs["group"].stats().leased == 2
    assert rig.hubs["group"].stats().settled == 0
    rig.hubs["group"].peer_lost("group-0")
    spans = SpanLog()
    async with running(GroupStage(make_context(spans=spans)), await join(rig, "group-1")):
        await feed.send(make_slice(0, make_sample(1, reward=0.5), n_samples=3), "c")
        whole = await take(out)
        assert [sample.index for sample in whole.samples] == [0, 1, 2]
        await rig.hubs["group"].wait_empty()
    assert spans.names == ["group reward 0.5"]


async def test_too_few_members_fail_the_group_with_their_errors(desk: Desk) -> None:
    await desk.send(make_slice(3, failed(0), failed(1), make_sample(2, status="aborted")))
    report = await settled(desk)
    assert (report.group_id, report.outcome) == (3, "failed")
    assert report.detail == "insufficient_members: 0 of 3; ValueError: boom; aborted"
    assert report.tokens == 2 + 2 + 4
    await desk.rig.hubs["group"].wait_empty()


async def test_what_only_a_drain_cut_off_is_discarded_so_that_a_resume_sends_it_again(desk: Desk) -> None:
    """Its members come before the stage has heard of the drain."""
    await desk.send(make_slice(3, make_sample(0, reward=1.0), *(make_sample(at, status="aborted") for at in (1, 2))))
    report = await settled(desk)
    assert (report.outcome, report.detail) == ("discarded", "insufficient_members: 1 of 3; aborted")


SOUND = make_sample(1)
INCONSISTENT = {
    "a log-prob is not finite": make_sample(1, log_probs=[-1.0, math.nan, -1.0, -1.0]),
    "arrays differ in length: ids 7, mask 7, log-probs 7, teacher log-probs 2": make_sample(
        1, teacher_log_probs=wire([-1.0, -2.0], Float32Array)
    ),
    "arrays differ in length: ids 7, mask 5, log-probs 7": make_sample(1, mask=[1, 1]),
    "a token that no weights made (version -1) has loss mask 1": make_sample(1, runs=[(-1, 4)]),
    "a token that no weights made (version -1) has a log-prob; give it 0.0": make_sample(
        1, runs=[(0, 2), (-1, 2)], mask=[1, 1, 0, 0]
    ),
    "a token of the prompt carries a version of the weights; give it version -1": replace(SOUND, prompt_length=4),
    "the prompt has 9 of 7 tokens": replace(SOUND, prompt_length=9),
    "version runs cover 6 of 7 tokens": replace(SOUND, version_runs=(VersionRun(-1, 3), VersionRun(0, 3))),
}


async def test_an_inconsistent_sample_fails_its_group(desk: Desk) -> None:
    for group_id, (words, sample) in enumerate(INCONSISTENT.items()):
        await desk.send(make_slice(group_id, make_sample(0), sample))
        report = await settled(desk)
        assert (report.group_id, report.outcome, report.detail) == (group_id, "failed", f"sample 1: {words}")


NONZERO = {"dynamic_sampling_filter": ("nonzero_std",)}
DIVIDE = {**NONZERO, "dynamic_sampling_filter_path": f"{PARTS}:divide"}


@pytest.mark.parametrize(
    ("filters", "group", "outcome", "detail"),
    [
        (NONZERO, (1.0, 1.0), "filtered", "zero_std_1.0"),
        ({"dynamic_sampling_filter_path": f"{PARTS}:no_sevens"}, (0.0, 1.0), "filtered", "custom"),
        ({"dynamic_sampling_filter_path": f"{PARTS}:short_only"}, (0.0, 1.0), "filtered", "longest_9"),
        (DIVIDE, (1.0, 1.0), "filtered", "zero_std_1.0"),
        (DIVIDE, (0.0, 1.0), "failed", "--dynamic-sampling-filter-path: ZeroDivisionError: division by zero"),
    ],
)
async def test_the_first_filter_that_rejects_names_the_reason(
    filters: dict[str, object], group: tuple[float, float], outcome: str, detail: str
) -> None:
    async with open_desk(make_config(filter=filters)) as one:
        await one.send(make_slice(0, *(make_sample(i, n=9, reward=r) for i, r in enumerate(group))))
        report = await settled(one)
        place = r" \(/.*/custom_parts\.py:\d+ in \w+\)" if outcome == "failed" else ""
        assert report.outcome == outcome
        assert re.fullmatch(re.escape(detail) + place, report.detail)
        assert report.reward == sum(group) / 2
        await one.rig.hubs["group"].wait_empty()


async def test_filters_let_good_groups_pass_and_judge_only_members_that_count() -> None:
    async with open_desk(make_config(filter={**NONZERO, "dynamic_sampling_filter_path": f"{PARTS}:short_only"})) as one:
        await one.send(
            make_slice(0, make_sample(0, reward=1.0), make_sample(1, reward=0.0)),
            make_slice(1, make_sample(0, reward=1.0), make_sample(1, reward=1.0), failed(2)),
        )
        assert (await take(one.out)).group.group_id == 0
        assert (await settled(one)).detail == "zero_std_1.0", "a failed member's missing reward is no variance"


def test_a_filter_that_cannot_be_imported_is_refused_in_words() -> None:
    for path, words in ((f"{PARTS}:nothing", "has no 'nothing'; check the name"), ("nonsense", "must have the form")):
        with pytest.raises(ImportPathError, match=words):
            resolve_filter(make_config(filter={"dynamic_sampling_filter_path": path}), (), FilterState())


async def test_evaluation_rollouts_pass_as_they_are() -> None:
    async with open_desk(make_config(filter=NONZERO)) as one:
        evaluated = await one.rig.inlet("evaluate")
        part = make_slice(0, failed(0), n_samples=4, purpose="eval", dataset="held", pinned_version=3)
        await one.send(part)
        assert await take(evaluated) is not None
        await one.rig.hubs["group"].wait_empty()
        assert one.rig.hubs["settle"].stats().accepted == 0


async def test_a_drain_settles_what_is_incomplete_and_what_still_comes(desk: Desk) -> None:
    await desk.send(make_slice(0, make_sample(0, reward=1.0), n_samples=2), make_slice(1))
    assert (await take(desk.out)).group.group_id == 1
    desk.rig.topic.publish("drain", b"interrupted")
    first = await settled(desk)
    assert (first.group_id, first.outcome, first.detail, first.tokens) == (0, "discarded", "interrupted", 4)
    await desk.send(make_slice(0, make_sample(1, reward=1.0), n_samples=2), make_slice(2))
    assert (await settled(desk)).group_id == 2
    await desk.rig.hubs["group"].wait_empty()
    await desk.end()


async def test_a_group_that_is_being_judged_when_the_drain_comes_is_settled_once(desk: Desk) -> None:
    judging, verdict = asyncio.Event(), asyncio.Event()

    async def slow(slice_: RolloutSlice) -> FilterDecision:
        judging.set()
        await verdict.wait()
        return FilterDecision(True)

    desk.stage._filters = [slow]
    await desk.send(make_slice(0))
    await judging.wait()
    desk.rig.topic.publish("drain", b"interrupted")
    await idle()
    verdict.set()
    await desk.end()
    left = desk.rig.hubs["train"].stats().accepted + desk.rig.hubs["settle"].stats().accepted
    assert left == 1
    assert desk.rig.hubs["group"].stats().settled == 1


async def test_a_part_that_comes_while_its_group_is_discarded_does_no_harm(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, accepted = asyncio.Event(), asyncio.Event()

    async def slow(outlet: Outlet[Any], message: object, key: str) -> None:
        if isinstance(message, Settled):
            sending.set()
            await accepted.wait()

    before_calls(monkeypatch, Outlet, "send", slow)
    await desk.send(make_slice(0, make_sample(0, reward=1.0), n_samples=3))
    await idle()
    desk.rig.topic.publish("drain", b"interrupted")
    await sending.wait()
    await desk.send(make_slice(0, make_sample(1, reward=1.0), n_samples=3))
    await idle()
    accepted.set()
    await desk.end()
    assert desk.rig.hubs["settle"].stats().accepted == 1
    assert desk.rig.hubs["group"].stats().settled == 2


EARLY = {**NONZERO, "dynamic_sampling_filter_path": f"{PARTS}:short_only", "dynamic_sampling_early_after": 2}
MEMBERS = {  # the first two of four rollouts, and the reason why their group is dropped
    "equal": ([make_sample(0, reward=1.0), make_sample(2, reward=1.0)], "zero_std_1.0"),
    "by the custom filter": ([make_sample(0, n=9, reward=0.0), make_sample(2, reward=1.0)], "longest_9"),
    "different": ([make_sample(0, reward=1.0), make_sample(2, reward=0.0)], None),
    "one counts": ([make_sample(0, reward=1.0), failed(2)], None),
    "one is here": ([make_sample(0, reward=1.0)], None),
    "half of the second": ([make_sample(0, reward=1.0), replace(make_sample(2, reward=1.0), sequences=2)], None),
    "one is damaged": ([make_sample(0, reward=1.0), make_sample(2, reward=1.0, log_probs=[math.nan] * 4)], None),
}


def decided(one: Desk) -> list[str]:
    return list(read_value(one.rig.topic, "decided/group-0", tuple[str, ...]) or ())


@pytest.mark.parametrize("case", MEMBERS)
async def test_a_group_is_dropped_for_its_first_rollouts(case: str) -> None:
    """It is settled when the others are here, with the tokens of all, and whatever they are."""
    first, reason = MEMBERS[case]
    async with open_desk(make_config(filter=EARLY)) as one:
        await one.send(make_slice(5, *first, n_samples=4))
        await idle()
        assert (decided(one), one.rig.hubs["settle"].stats().accepted) == (["5"] if reason else [], 0)
        if reason is None:
            return
        await one.send(make_slice(5, make_sample(1, reward=0.5), n_samples=4))
        await one.send(make_slice(5, make_sample(3, status="aborted", n=2), n_samples=4))
        report = await settled(one)
        assert (report.group_id, report.outcome, report.detail) == (5, "filtered", f"{reason}, early")
        assert report.tokens == sum(sample.length - sample.prompt_length for sample in first) + 4 + 2
        await one.rig.hubs["group"].wait_empty()
        assert one.stage.activity.extra["filtered"] == 1


async def test_a_share_of_failed_rollouts_is_that_of_the_rollouts_which_have_ended() -> None:
    filters = {"dynamic_sampling_filter": ("max_failed:0.4",), "dynamic_sampling_early_after": 2}
    async with open_desk(make_config(filter=filters)) as one:
        for group, failures in enumerate((1, 2)):
            members = [make_sample(0), make_sample(1), *(failed(2 + at) for at in range(failures))]
            await one.send(make_slice(group, *members, n_samples=8))
        half = replace(make_sample(4), sequences=2)
        await one.send(make_slice(2, make_sample(0), make_sample(1), failed(2), failed(3), half, n_samples=8))
        await until(lambda: len(decided(one)) > 1)  # news are gathered for a moment
        assert decided(one) == ["1", "2"], "1 of 3 and 2 of 4"
