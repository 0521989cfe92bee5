"""Hooks and data sources with slime's signatures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Config, FilterConfig
from models.import_path import ImportPathError
from stages.data.prompt_set import Preparer
from stages.errors import DataSourceError
from stages.graders.grade import GradeRequest, UnknownGraderError
from stages.graders.registry import custom_grader
from stages.group.filters import FilterDecision, resolve_filter
from stages.messages import CheckpointReady, RolloutSlice, Settled
from stages.prompts.prompt_sources import DrawnPrompts
from stages.slime.hooks import data_source, eval_data, logged, removed, rollout_log, sample_filter, shown
from stages.train.batch import slice_sequences
from tests.stages.prompt_rig import balanced, prompting, step_done
from tests.stages.stage_rig import make_config, make_group, make_sample, until

CODE = "tests.stages.slime.user_code"


def group_of(*rewards: float) -> RolloutSlice:
    samples = tuple(msgspec.structs.replace(make_sample(i), reward=reward) for i, reward in enumerate(rewards))
    return RolloutSlice(make_group(7, len(rewards), label="x", metadata='{"n":1}'), samples)


def test_samples_are_shown_as_slime_has_them() -> None:
    slice_ = group_of(1.0, 0.0)
    first, second = shown(slice_)
    ours = slice_.samples[1]
    assert (second.group_index, second.index, second.label, second.metadata) == (7, 15, "x", {"n": 1})
    assert (second.reward, second.status, second.remove_sample) == (0.0, first.Status.COMPLETED, False)
    assert second.tokens == ours.token_ids.tolist()
    assert second.response_length == len(second.loss_mask or ()) == len(second.rollout_log_probs or ())
    assert second.rollout_log_probs == ours.log_probs[ours.prompt_length :].tolist()


def test_a_group_filter_of_slimes_signature_says_keep_and_why() -> None:
    config = FilterConfig(dynamic_sampling_filter_path=f"{CODE}:differing_rewards")
    [filter_] = resolve_filter(config, whole=make_config())
    assert filter_(group_of(1.0, 0.0)) == FilterDecision(True, None)
    assert filter_(group_of(1.0, 1.0)) == FilterDecision(False, "all_1")


def test_a_sample_filter_takes_rollouts_out_of_the_loss() -> None:
    slice_ = group_of(1.0, 0.0)
    shorter = msgspec.structs.replace(slice_.samples[1], prompt_length=slice_.samples[1].length - 2)
    slice_ = msgspec.structs.replace(slice_, samples=(slice_.samples[0], shorter))
    kept = removed(sample_filter(f"{CODE}:short_ones"), None, slice_)
    assert [sample.remove_sample for sample in kept.samples] == [slice_.samples[0].response_length < 3, True]
    restored = tuple(msgspec.structs.replace(sample, remove_sample=False) for sample in kept.samples)
    assert restored == slice_.samples, "nothing else is changed"


def test_post_processing_of_slimes_signature_gives_the_advantages() -> None:
    reward = {"custom_reward_post_process_path": f"{CODE}:plus_index"}
    config = make_config(reward=reward, rollout={"n_samples_per_prompt": 2})
    values = [sequence.advantages.max() for sequence in slice_sequences(config, group_of(1.0, 5.0))]
    assert values == [3.0, 7.0]


def test_graders_of_slimes_signature_get_samples() -> None:
    request = GradeRequest(grader="", response="x", label="x", metadata='{"n":1}', n_tokens=3)
    grader = custom_grader(f"{CODE}:rewarded")
    assert grader(request).score == 1.0
    assert grader(msgspec.structs.replace(request, response="y")).score == 0.0
    together = custom_grader(f"{CODE}:rewarded_together")(msgspec.structs.replace(request, responses=("a", "b", "c")))
    assert [grade.score for grade in together.members] == [0.0, 1.0, 2.0]
    with pytest.raises(UnknownGraderError, match="cannot be called as function"):
        custom_grader(f"{CODE}:no_source_at_all")


async def test_a_log_that_raises_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    function = rollout_log(f"{CODE}:log_raises")
    with caplog.at_level(logging.WARNING):
        await logged("--custom-rollout-log-function-path", function, 0, make_config(), [], {}, 1.0)
    assert "--custom-rollout-log-function-path raised OSError: no tracker" in caplog.text


def test_the_data_of_an_evaluation() -> None:
    said = eval_data({"sums": [group_of(1.0), group_of(0.0)]})
    assert said["sums"]["rewards"] == [1.0, 0.0]
    assert said["sums"]["truncated"] == [False, False]
    assert [sample.label for sample in said["sums"]["samples"]] == ["x", "x"]


def encode(text: str) -> list[int]:
    return list(text.encode())


def prompts_of(directory: Path, name: str = "Counting", limit: int | None = None) -> DrawnPrompts:
    return DrawnPrompts(config_of(name), directory, Preparer(False, encode, encode, None, (), False), encode, limit)


def config_of(name: str = "Counting") -> Config:
    return make_config(
        data={"data_source_path": f"{CODE}.{name}"}, rollout={"n_samples_per_prompt": 2, "rollout_batch_size": 2}
    )


async def drained(path: Path, name: str, **options: Any) -> None:
    await prompts_of(path, name, **options).reach(1)


async def test_groups_have_the_sources_prompts_labels_and_metadata(tmp_path: Path) -> None:
    async with prompting(prompts=prompts_of(tmp_path), config=config_of()) as desk:  # type: ignore[arg-type]
        await desk.land(0)
        found = [(await desk.groups.receive()).message for _ in range(4)]  # type: ignore[union-attr]
    assert [(g.prompt, g.label, g.metadata, g.prompt_index) for g in found] == [
        (f"{n}+1=", str(n + 1), f'{{"n":{n}}}', n) for n in range(4)
    ]
    assert found[0].prompt_ids.tolist() == encode("0+1=")


@settings(max_examples=10, deadline=None)
@given(ends=st.lists(st.sampled_from(["trained", "filtered", "stale"]), min_size=2, max_size=10))
async def test_a_resumed_run_is_given_what_the_first_one_would_have_been_given(
    ends: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Open groups keep their prompts, those that were drawn ahead come next, none comes twice, none is left out."""
    place = tmp_path_factory.mktemp("source")
    first = prompts_of(place)
    shown: dict[int, str] = {}
    async with prompting(prompts=first, config=config_of(), eta=3) as desk:  # type: ignore[arg-type]
        await desk.land(0)
        await until(lambda: desk.stage.ledger.admitted == 8)  # drawn in a thread
        trained: list[int] = []
        for group in range(min(len(ends), 6)):
            if ends[group] == "trained":
                trained.append(group)
            else:
                await desk.report(Settled(group, ends[group]))  # type: ignore[arg-type]
        step = len(trained) // 2
        for number in range(step):
            await desk.report(step_done(number + 1, *trained[2 * number : 2 * number + 2]))
        await desk.report(CheckpointReady(step, step, "x"))
        await until(lambda: bool(desk.hooks.commits))
        [(_, snapshot)] = desk.hooks.commits
        assert balanced(desk.stage.ledger)
        for group in snapshot.open:
            shown[group.group_id] = first.get(group.position).prompt
    assert set(snapshot.drawn) >= {group.position for group in snapshot.open} | set(snapshot.requeue)
    second = prompts_of(place)
    second.resume(snapshot.drawn, snapshot.cursor, step)
    for group in snapshot.open:
        assert second.get(group.position).prompt == shown[group.group_id]
        assert second.get(group.position).prompt_ids.tolist() == encode(shown[group.group_id])
    await second.reach(snapshot.cursor + 9)
    assert [second.get(position).prompt for position in range(snapshot.cursor, snapshot.cursor + 9)] == [
        f"{n}+1=" for n in range(snapshot.cursor, snapshot.cursor + 9)
    ]


async def test_prompts_of_groups_that_have_ended_are_not_kept(tmp_path: Path) -> None:
    async with prompting(prompts=prompts_of(tmp_path), config=config_of()) as desk:  # type: ignore[arg-type]
        await desk.land(0)
        await until(lambda: desk.stage.ledger.admitted == 4)
        await desk.report(Settled(0, "filtered"), Settled(1, "failed"), step_done(1, 2, 3))
        await desk.report(CheckpointReady(1, 1, "x"))
        await until(lambda: bool(desk.hooks.commits))
        [(_, snapshot)] = desk.hooks.commits
    assert min(snapshot.drawn) >= 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Empty", r"get_samples\(1\) gave no group"),
        ("Short", "a group of 1 samples, but --n-samples-per-prompt is 2"),
        ("Broken", "get_samples raised OSError: the disk is gone"),
    ],
)
async def test_what_is_wrong_with_a_source_is_one_sentence(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DataSourceError, match=words):
        await drained(tmp_path, name)


async def test_a_prompt_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataSourceError, match="a prompt of 4 tokens, above the limit of 3"):
        await drained(tmp_path, "Counting", limit=3)
    with pytest.raises(DataSourceError, match="load raised FileNotFoundError"):
        prompts_of(tmp_path).resume({}, 0, 7)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoLoad", r"NoLoad has no load\(rollout_id\)"),
        ("ask", "is no class"),
        ("Odd", r"Odd\.get_samples cannot be called with \(self, n\)"),
    ],
)
def test_a_class_that_is_no_source_is_refused_at_the_start(name: str, words: str) -> None:
    with pytest.raises(ImportPathError, match=words):
        data_source(f"{CODE}.{name}")
    assert data_source(f"{CODE}.Counting").__name__ == "Counting"
