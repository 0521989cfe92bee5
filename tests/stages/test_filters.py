"""Group filters: what each keeps and drops, their forms and errors; fan-out, membership and group grading."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from configs.schema.data import FilterConfig
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.errors import FilterError, FilterNameError
from stages.group.filters import FilterDecision, FilterState, parse_filters, zero_std
from stages.messages import Int32Array, RolloutSlice, Sample, TurnReward, WeightsAnnouncement, wire
from stages.rollouts import runs_of
from stages.sample_log import SAMPLES_FILE, SampleLog, drop_after
from stages.staleness_gate import filters_on
from tests.stages.stage_rig import Desk, idle, make_config, make_sample, make_slice, open_desk, settled, take


def graded(*rewards: float, **fields: Any) -> RolloutSlice:
    return make_slice(0, *(make_sample(i, reward=r) for i, r in enumerate(rewards)), **fields)


def judged(*correct: bool | None) -> RolloutSlice:
    return make_slice(0, *(make_sample(i, reward=0.0, is_correct=c) for i, c in enumerate(correct)))


def verdict(name: str, slice_: RolloutSlice, state: FilterState | None = None) -> str | None:
    """The reason of the filter's rejection, None if it keeps the group."""
    (rule,) = parse_filters([name], state)
    decision = rule(slice_)
    assert isinstance(decision, FilterDecision)
    return None if decision.keep else decision.reason


def test_nonzero_std_counts_rollouts_and_not_their_sequences() -> None:
    """Two sequences of one rollout are one member: no group of one is kept because it has several."""
    parts = [make_sample(0, reward=1.0, sequence=k, sequences=2) for k in range(2)]
    assert verdict("nonzero_std", make_slice(0, *parts, n_samples=1)) == "zero_std_1.0"


@pytest.mark.parametrize(
    ("correct", "reason"),
    [
        ([True] * 3 + [False] * 5, None),
        ([True, False], None),
        ([False] * 8, "pass_rate_low"),
        ([True] * 8, "pass_rate_high"),
        ([True] + [False] * 9, None),  # 0.1: bounds are inclusive
    ],
)
def test_pass_rate_goes_by_the_verdict(correct: list[bool], reason: str | None) -> None:
    assert verdict("pass_rate:0.1_0.9", judged(*correct)) == reason


def test_pass_rate_without_verdicts_is_an_error_and_not_a_silence() -> None:
    with pytest.raises(FilterError, match="grader that reports is_correct"):
        verdict("pass_rate:0.1_0.9", graded(1.0, 0.0))


def test_length_counts_trainable_tokens_of_whole_rollouts() -> None:
    short = make_slice(0, make_sample(0, n=4), make_sample(1, n=6, mask=[1, 1, 0, 0, 0, 0]))  # mean 3
    assert verdict("length:3_3", short) is None
    assert verdict("length:4_9", short) == "too_short"
    assert verdict("length:1_2", short) == "too_long"
    fanned = make_slice(0, *(make_sample(0, n=4, sequence=k, sequences=3) for k in range(3)), n_samples=1)
    assert verdict("length:12_12", fanned) is None


def test_staleness_compares_with_the_newest_published_weights() -> None:
    slice_ = make_slice(0, make_sample(0, runs=[(3, 2), (5, 2)]), make_sample(1, version=5))
    state = FilterState(version=5)
    assert verdict("staleness:2", slice_, state) is None
    state.version = 6
    assert verdict("staleness:2", slice_, state) == "too_stale"
    masked = make_slice(0, make_sample(0, runs=[(3, 2), (5, 2)], mask=[0, 0, 1, 1]), make_sample(1, version=5))
    assert verdict("staleness:2", masked, state) is None, "only trained tokens have an age"


@pytest.mark.parametrize(("members", "reason"), [(4, None), (3, None), (2, "failed_members")])
def test_max_failed_counts_the_members_that_are_missing(members: int, reason: str | None) -> None:
    slice_ = make_slice(0, *(make_sample(i) for i in range(members)), n_samples=4)
    assert verdict("max_failed:0.25", slice_) == reason


def test_a_prompt_text_is_trained_once_per_epoch() -> None:
    state = FilterState(remembers=True)
    first, second = make_slice(0), make_slice(1)  # the same text
    assert verdict("duplicate_prompt", first, state) is None
    assert verdict("duplicate_prompt", second, state) is None, "the first was not passed on"
    state.passes(first.group)
    assert verdict("duplicate_prompt", second, state) == "duplicate_prompt"
    assert verdict("duplicate_prompt", first, state) is None, "a redelivery of the group itself"
    assert verdict("duplicate_prompt", make_slice(2, requeued=1), state) is None, "asked again, as the first was stale"


def test_only_the_last_two_epochs_are_remembered() -> None:
    state = FilterState()
    parse_filters(["nonzero_std"], state)
    state.passes(make_slice(0).group)
    assert state.passed == {}, "nobody asks for them"
    parse_filters(["duplicate_prompt"], state)
    for epoch in range(5):
        state.passes(msgspec.structs.replace(make_slice(epoch).group, epoch=epoch))
    assert sorted(state.passed) == [3, 4]


def test_the_fallback_is_no_link_of_the_chain() -> None:
    """Such groups pass on to the trainer, which knows when they are needed."""
    assert parse_filters(["nonzero_std_fallback"]) == []
    assert filters_on(FilterConfig(dynamic_sampling_filter=("nonzero_std_fallback",)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonzero_sdt", "'nonzero_sdt' is unknown; did you mean nonzero_std"),
        ("xyz", "is unknown; choose one of nonzero_std, nonzero_std_fallback"),
        ("nonzero_std:1", "nonzero_std takes no argument; write nonzero_std"),
        ("pass_rate", "'' is no range; write pass_rate:LOW_HIGH, as in pass_rate:0.1_0.9"),
        ("pass_rate:0.9_0.1", "the lower bound 0.9 is above the upper bound 0.1; write pass_rate:LOW_HIGH"),
        ("pass_rate:0.1_1.5", "1.5 must be between 0 and 1; write"),
        ("reward:a_b", "'a' is no number; write reward:LOW_HIGH"),
        ("reward:nan_1", "nan must be finite"),
        ("length:-1_10", "-1 must be finite and at least 0; write length:MIN_MAX"),
        ("staleness:1.5", "1.5 is no whole number of versions; write staleness:N, as in staleness:2"),
        ("max_failed:2", "2 must be between 0 and 1; write max_failed:SHARE"),
    ],
)
def test_a_filter_that_cannot_be_read_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(FilterNameError, match="--dynamic-sampling-filter") as caught:
        parse_filters([name])
    assert words in str(caught.value)


@given(st.floats(-5, 5), st.floats(-5, 5), st.lists(st.floats(-6, 6), min_size=1, max_size=6))
def test_reward_keeps_exactly_the_means_within_its_bounds(a: float, b: float, rewards: list[float]) -> None:
    low, high = sorted((a, b))
    mean = float(sum(rewards) / len(rewards))
    if min(abs(mean - low), abs(mean - high)) < 1e-9:
        return
    reason = "reward_low" if mean < low else "reward_high" if mean > high else None
    assert verdict(f"reward:{low!r}_{high!r}", graded(*rewards)) == reason


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8))
def test_equal_rewards_are_what_zero_std_means(rewards: list[float]) -> None:
    assert (zero_std(graded(*rewards)) is None) == (len(set(rewards)) > 1)


PARTS = "tests.stages.custom_parts"


def parts(index: int, n: int, *, reward: float | None = None, **fields: Any) -> list[Sample]:
    """The sequences of a rollout; the last one is graded."""
    return [
        make_sample(index, sequence=k, sequences=n, reward=reward if k == n - 1 else None, response=f"{k}", **fields)
        for k in range(n)
    ]


async def test_a_redelivered_rollout_that_fans_out_otherwise_is_dropped(desk: Desk) -> None:
    """As one that comes again in the same form."""
    first, twice, again = parts(0, 2, reward=1.0), parts(0, 2, reward=3.0), parts(0, 3, reward=5.0)
    await desk.send(make_slice(0, first[1], n_samples=2), make_slice(0, *again, n_samples=2))
    await desk.send(make_slice(0, twice[1], n_samples=2), make_slice(0, make_sample(1, reward=0.0), n_samples=2))
    await desk.send(make_slice(0, first[0], n_samples=2))
    assert [s.reward for s in (await take(desk.out)).samples] == [1.0, 1.0, 0.0]
    await desk.rig.hubs["group"].wait_empty()


async def test_a_rollout_with_a_failed_sequence_is_no_member(desk: Desk) -> None:
    broken = [make_sample(0, sequence=0, sequences=2, status="failed", error="tool lost"), parts(0, 2, reward=1.0)[1]]
    await desk.send(make_slice(0, *broken, *(make_sample(i, reward=float(i)) for i in (1, 2)), n_samples=3))
    assert [s.index for s in (await take(desk.out)).samples] == [1, 2]
    await desk.send(make_slice(1, *broken, make_sample(1, reward=1.0), n_samples=2))
    report = await settled(desk)
    assert report.detail == "insufficient_members: 1 of 2; tool lost"
    assert report.reward == 1.0, "both rollouts were graded, and each counts once"


async def test_why_members_failed_is_reported_once_where_their_group_goes_on(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for number, why in enumerate(["tool lost", "tool lost", "engine gone"]):
        members = [make_sample(i, reward=float(i)) for i in (0, 1)]
        await desk.send(make_slice(number, *members, make_sample(2, status="failed", error=why), n_samples=3))
        assert len((await take(desk.out)).samples) == 2
    reported = [
        record.getMessage().split(" continues with ")[1] for record in caplog.records if record.name == "sluice.group"
    ]
    assert reported == [f"2 of its 3 rollouts; others failed: {why}" for why in ("tool lost", "engine gone")]


async def test_failed_rollouts_are_counted_by_reason_once_each_and_interrupted_ones_are_not(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what counts with reward 0, and what failed in a group that failed."""
    monkeypatch.setattr("stages.group.stage.MOST_REASONS", 3)
    lost = [make_sample(2, sequence=k, sequences=2, status="failed", error="tool lost") for k in (0, 1)]
    await desk.send(make_slice(0, *(make_sample(i, reward=float(i)) for i in (0, 1)), *lost, n_samples=3))
    await take(desk.out)
    zero = make_sample(0, reward=0.0, error="no number")
    await desk.send(make_slice(1, zero, make_sample(1, status="failed", error="tool lost"), n_samples=2))
    await settled(desk)
    cut = [make_sample(i, status="aborted", error="the run stops") for i in (0, 1)]
    broken = [make_sample(i, status="failed", error=f"part {i}") for i in (2, 3, 4)]
    broken.append(make_sample(5, status="failed", error="tool lost"))
    await desk.send(make_slice(2, *cut, *broken, n_samples=6))
    await settled(desk)
    found = {name: n for name, n in desk.stage.activity.extra.items() if name.startswith("failed/")}
    names = {"tool lost": 3, "no number": 1, "part 2": 1, "other reasons": 2}
    assert found == {f"failed/{name}": n for name, n in names.items()}


async def test_sequences_do_not_count_twice_in_what_is_reported() -> None:
    async with open_desk(make_config(filter={"dynamic_sampling_filter": ("reward:0.9_1",)})) as one:
        members = [*parts(0, 3, reward=1.0, is_correct=True), make_sample(1, reward=0.0, is_correct=False)]
        await one.send(make_slice(0, *members, n_samples=2))
        report = await settled(one)
        assert (report.detail, report.reward, report.pass_rate, report.tokens) == ("reward_low", 0.5, 0.5, 16)


async def test_a_second_group_of_a_prompt_is_a_duplicate() -> None:
    """And the staleness filter before it learns of new weights."""
    names = ("staleness:1", "duplicate_prompt")
    async with open_desk(make_config(filter={"dynamic_sampling_filter": names})) as one:
        await one.send(make_slice(0), make_slice(1))
        assert (await take(one.out)).group.group_id == 0
        assert (await settled(one)).detail == "duplicate_prompt"
        announced = WeightsAnnouncement(0, 2, "slot", "0", 2)
        one.rig.topic.publish("weights", msgspec.msgpack.encode(announced))
        await idle()
        await one.send(make_slice(2))
        assert (await settled(one)).detail == "too_stale"


async def test_a_whole_group_is_graded_when_its_last_rollout_has_come() -> None:
    """One of an evaluation as well; a group in training of the same number is another one. The graders end with the
    stage."""
    before = set(psutil.Process().children())
    group_rm = {"group_rm": True, "custom_rm_path": f"{PARTS}:best_of_group", "reward_workers": 1}
    async with open_desk(make_config(reward=group_rm)) as one:
        evaluated = await one.rig.inlet("evaluate")
        fields: dict[str, Any] = {"purpose": "eval", "dataset": "held", "pinned_version": 3, "n_samples": 2}
        await one.send(make_slice(0, make_sample(0, response="a"), **fields))
        await one.send(make_slice(0, make_sample(0, response="a"), n_samples=3))
        await one.send(make_slice(0, make_sample(1, response="abc"), **fields))
        assert [(s.index, s.reward) for s in (await take(evaluated)).samples] == [(0, 0.0), (1, 1.0)]
        await one.send(make_slice(0, make_sample(1, response="abc"), make_sample(2, response="ab"), n_samples=3))
        assert [s.reward for s in (await take(one.out)).samples] == [0.0, 1.0, 0.0]
        await one.rig.hubs["group"].wait_empty()
        graders = set(psutil.Process().children()) - before
        assert graders
    assert not any(grader.is_running() for grader in graders)


# samples.jsonl: what is in a line, how large the file becomes, and what killed and resumed writers do to it.


def a_log(path: Path, **observe: Any) -> SampleLog:
    return SampleLog(make_config(observe=observe), path)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / SAMPLES_FILE).read_text().splitlines()]


def characters(place: Path) -> Tokenizer:
    """A tokenizer of single characters in the form of a checkpoint's."""
    backend = tokenizers.Tokenizer(WordLevel({c: i for i, c in enumerate("0123456789+=[] ?")}, "?"))
    backend.pre_tokenizer, backend.decoder = Split(Regex("."), "isolated"), Fuse()
    backend.save(str(place / "tokenizer.json"))
    return load_tokenizer(str(place))


async def test_a_line_says_what_the_model_wrote_and_what_it_was_told(tmp_path: Path) -> None:
    tokenizer = characters(tmp_path)
    parts = [tokenizer.encode(text) for text in ("12+34=", "[12+34]", "46", "46 ")]
    ids = [i for part in parts for i in part]
    n = [len(part) for part in parts]
    sample = make_sample(
        1,
        prompt=parts[0],
        runs=[(3, n[1] - 1), (4, 1), (-1, n[2]), (4, n[3])],
        mask=[1] * n[1] + [0] * n[2] + [0] * n[3],
        response="[12+34]4646 ",
        reward=0.5,
        is_correct=True,
        turn_rewards=(TurnReward(n[0] + n[1], 0.25),),
    )
    sample = msgspec.structs.replace(sample, token_ids=wire(ids, Int32Array))
    log = SampleLog(make_config(train={"hf_checkpoint": str(tmp_path)}), tmp_path)
    await log.trained(1, [make_slice(7, sample, n_samples=2, prompt=parts[0])], {}, {})
    (row,) = rows(tmp_path)
    assert row["turns"] == [
        {"role": "model", "tokens": n[1], "text": "[12+34]", "reward": 0.25},
        {"role": "observation", "tokens": n[2], "text": "46"},
        {"role": "model", "tokens": n[3], "text": "46 "},
    ]
    assert (row["group"], row["index"], row["step"], row["outcome"]) == (7, 1, 1, "trained")
    assert (row["reward"], row["is_correct"], row["status"]) == (0.5, True, "completed")
    assert row["ids"] == ids
    assert (row["prompt_tokens"], row["response_tokens"]) == (n[0], sum(n[1:]))
    assert row["loss_mask"] == [[0, n[0]], [1, n[1]], [0, n[2] + n[3]]]
    assert row["versions"] == [[-1, n[0]], [3, n[1] - 1], [4, 1], [-1, n[2]], [4, n[3]]]


@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        ({}, "sums"),
        ({"environment": [{"name": "sums"}]}, "12+34="),
        ({"rollout": {"custom_generate_function_path": "m.f"}}, "12+34="),
        ({"rollout": {"rollout_function_path": "m.f"}}, "12+34="),
    ],
)
async def test_the_prompt_of_a_line_is_what_the_model_read(
    tmp_path: Path, settings: dict[str, Any], prompt: str
) -> None:
    """Where the row is only the task, its first observation or the messages of its first request."""
    ids = characters(tmp_path).encode("12+34=")
    log = SampleLog(make_config(train={"hf_checkpoint": str(tmp_path)}, **settings), tmp_path)
    told = make_slice(0, make_sample(0, prompt=ids), n_samples=2)
    unbegun = make_sample(1, prompt=(), n=0, status="failed", error="no episode")
    slice_ = msgspec.structs.replace(told, group=msgspec.structs.replace(told.group, prompt="sums"))
    await log.trained(1, [msgspec.structs.replace(slice_, samples=(*told.samples, unbegun))], {}, {})
    assert [row["prompt"] for row in rows(tmp_path)] == [prompt, "sums"]


@given(st.lists(st.integers(0, 1), max_size=40))
def test_runs_of_a_mask_give_the_mask_again(mask: list[int]) -> None:
    runs = list(runs_of(np.array(mask, dtype=np.uint8)))
    assert [value for value, n in runs for _ in range(n)] == mask
    assert all(a[0] != b[0] for a, b in pairwise(runs))


async def test_groups_that_were_not_trained_are_few_in_each_interval(tmp_path: Path) -> None:
    log = a_log(tmp_path, samples_interval=10, samples_groups=2)
    for step in (0, 0, 4, 9, 10, 11, 12):
        await log.ended(step, make_slice(step), "filtered", "zero_std")
    assert [row["step"] for row in rows(tmp_path)[::2]] == [0, 0, 10, 11]
    assert {(row["outcome"], row["detail"]) for row in rows(tmp_path)} == {("filtered", "zero_std")}
    await log.ended(30, make_slice(1, purpose="eval"), "failed", "")
    assert all(row["outcome"] == "filtered" for row in rows(tmp_path)), "an evaluation has results of its own"


async def test_a_torn_line_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    await a_log(tmp_path).trained(1, [make_slice(1)], {}, {})
    whole = (tmp_path / SAMPLES_FILE).read_bytes()
    for torn in (b'{"step": 2, "outc', b"x" * 200_000):
        (tmp_path / SAMPLES_FILE).write_bytes(whole + torn)
        await a_log(tmp_path).ended(2, make_slice(2), "stale", "")
        assert [row["group"] for row in rows(tmp_path)] == [1, 1, 2, 2]


async def test_a_resumed_run_drops_what_never_happened(tmp_path: Path) -> None:
    log = a_log(tmp_path, samples_interval=1)
    for step in (1, 2, 3):
        await log.trained(step, [make_slice(step)], {}, {})
    await log.ended(3, make_slice(9), "stale", "")
    with (tmp_path / SAMPLES_FILE).open("ab") as file:
        file.write(b'{"step": 1, torn')
    drop_after(tmp_path, 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 1, 2, 2]
    drop_after(tmp_path, 0)
    assert rows(tmp_path) == []


async def test_writers_beside_each_other_leave_whole_lines(tmp_path: Path) -> None:
    logs = [a_log(tmp_path, samples_interval=1) for _ in range(4)]
    async with asyncio.TaskGroup() as tasks:
        for place, log in enumerate(logs):
            for step in range(1, 11):
                tasks.create_task(log.trained(step, [make_slice(100 * place + step)], {}, {}))
    assert len(rows(tmp_path)) == 4 * 10 * 2


async def test_a_full_disk_and_a_missing_directory_cost_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_log(tmp_path / "nowhere").trained(1, [make_slice(1)], {}, {})
    (tmp_path / SAMPLES_FILE).symlink_to("/dev/full")
    await a_log(tmp_path).trained(1, [make_slice(1)], {}, {})
