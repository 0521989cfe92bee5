"""Generate functions and rollout functions with slime's signatures, in the generate stage."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Config
from models.import_path import ImportPathError
from models.slime_arguments import slime_arguments
from pipeline.record.kept_files import uncertain_in
from stages.base import Activity
from stages.data.prepare import Preparer
from stages.errors import DataSourceError
from stages.graders.grade import GradeRequest, UnknownGraderError
from stages.graders.registry import custom_grader
from stages.group.filters import FilterDecision, import_filter
from stages.messages import NO_IDS, CheckpointReady, Prefix, PromptGroup, RolloutSlice, Sample, Settled
from stages.prompts.prompt_sources import DrawnPrompts
from stages.records.once import EPISODES_DIR
from stages.reward.stage import Grading
from stages.rollouts import new_sample, rollout_fault, rollouts, trained_masks
from stages.slime import Sample as Given
from stages.slime.convert import ReturnedError, given_sample, returned_rollout
from stages.slime.hooks import (
    data_source,
    eval_data,
    generate_function,
    logged,
    removed,
    rollout_log,
    sample_filter,
    shown,
)
from stages.train.batch import slice_sequences
from tests.stages.engine_rig import Log, World, generating, simulated, started
from tests.stages.prompt_rig import balanced, prompting, step_done
from tests.stages.slime import user_code
from tests.stages.stage_rig import make_config, make_context, make_group, make_sample, take, until

CODE = "tests.stages.slime.user_code"


@pytest.fixture(autouse=True)
def _sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one batch come without a gap here, so no call has to wait long for more of them."""
    monkeypatch.setattr("stages.generate.rollout_functions.LINGER_S", 0.2)


@asynccontextmanager
async def world_of(tmp_path: Path, name: str, lives: tuple[int, ...] = (), **rollout: Any) -> AsyncIterator[World]:
    settings = {"custom_generate_function_path": f"{CODE}.{name}", "rollout_max_response_len": 20, **rollout}
    async with started(tmp_path, engine=simulated(length=8), rollout=settings, options={"lives": lives}) as world:
        yield world


async def made(world: World, group: PromptGroup) -> list[tuple[Sample, ...]]:
    """The rollouts of a group."""
    await world.ask(group)
    samples: list[Sample] = []
    while len({sample.index for sample in samples}) < group.n_samples:
        samples += (await world.answer()).samples
    return rollouts(samples)


async def test_observations_are_masked_and_versions_change_between_turns(tmp_path: Path) -> None:
    async with world_of(tmp_path, "with_tools") as world:
        [(sample,)] = await made(world, make_group(5, 1, label="x"))
        [(evaluated,)] = await made(world, make_group(6, 1, purpose="eval", pinned_version=0))
    assert evaluated.reward == 0.0, "a function that asks is told"
    assert sample.loss_mask.tolist() == [0] + [1] * 5 + [0, 0] + [1] * 5
    assert sample.token_ids[6:8].tolist() == [*b"ok"]
    assert [(run.version, run.n_tokens) for run in sample.version_runs] == [(-1, 1), (0, 5), (-1, 2), (0, 5)]
    assert (sample.reward, sample.response, sample.turns) == (0.25, "label x", 2)
    assert all(sample.log_probs[i] == 0.0 for i in (0, 6, 7))
    assert (sample.log_probs[1:6] < 0).all()


async def test_a_function_that_is_called_again_gets_the_answers_that_it_had(tmp_path: Path, log: Log) -> None:
    """As by another replica after the death of the first, by the files that the first left."""
    (tmp_path / EPISODES_DIR).mkdir()
    async with world_of(tmp_path, "with_tools", lives=(0,)) as world:
        group = make_group(5, 2, label="x")
        first = await made(world, group)
        assert len(log) == 4
        second: list[tuple[Sample, ...]] = []
        begun = [new_sample(group.prompt_ids.tolist(), index) for index in range(2)]
        await world.stage.functions.take(f"{CODE}.with_tools", group, begun, lambda *parts: second.append(parts))
        assert len(log) == 4, "no engine was asked"
        await made(world, make_group(6, 2, label="x"))
        assert len(log) == 8, "another group has answers of its own"
    for (before,), (after,) in zip(first, sorted(second, key=lambda parts: parts[0].index), strict=True):
        assert before.version_runs == after.version_runs
        for name in ("token_ids", "loss_mask", "log_probs"):
            assert getattr(before, name).tolist() == getattr(after, name).tolist()
    assert uncertain_in(tmp_path / EPISODES_DIR) == 2, "what else the two calls did is not known"


async def test_a_function_that_sends_texts_keeps_the_tokens_of_its_turns(tmp_path: Path) -> None:
    """Each turn gets the whole response length; a text that continues an answer keeps that answer's tokens."""
    async with world_of(tmp_path, "by_texts", rollout_max_response_len=8) as world:
        world.stage.functions._tokenizer = SimpleNamespace(encode=lambda text, most=None: list(text.encode()))  # type: ignore[assignment]
        [(sample,)] = await made(world, make_group(5, 1))
    assert (sample.status, sample.error, sample.turns) == ("completed", None, 3)
    assert sample.loss_mask.tolist() == [0] + [1] * 8 + [0] * 5 + [1] * 8 + [0] * 5 + [1] * 8
    assert (sample.log_probs[sample.loss_mask > 0] < 0).all()


def by(name: str) -> str:
    """The metadata of a row that names its own function."""
    return f'{{"generate_function_path": "{CODE}{name}"}}'


async def test_a_row_may_name_its_own_function(tmp_path: Path) -> None:
    async with world_of(tmp_path, "raising") as world:
        [(sample,)] = await made(world, make_group(1, 1, metadata=by(":single_turn")))
        assert sample.left == "", "the row's own metadata does not travel again with each sample"
        [(broken,)] = await made(world, make_group(2, 1))
        [(drifting,)] = await made(world, make_group(3, 1, metadata=by(":drifting")))
    assert [sample.status, broken.status, drifting.status] == ["completed", "failed", "failed"]
    words = rf"{CODE}\.raising raised ConnectionError: the sandbox is gone \(/.*/user_code\.py:\d+ in raising\)"
    assert re.fullmatch(f"--custom-generate-function-path {words}", broken.error or "")
    assert str(drifting.error).startswith(f"generate_function_path {CODE}:drifting: "), "not the run's, but the row's"
    assert "from token 7 on they are not what the engine was sent and answered" in str(drifting.error)
    assert "send input_ids=sample.tokens" in str(drifting.error)


async def test_a_row_names_a_function_in_a_run_that_has_none(tmp_path: Path) -> None:
    async with started(tmp_path, engine=simulated(length=8), rollout={"rollout_max_response_len": 20}) as world:
        [(sample,)] = await made(world, make_group(1, 1, metadata=by(".with_tools")))
        [(plain,)] = await made(world, make_group(2, 1))
        found = await made(world, make_group(3, 2, metadata=by(".segments")))
    assert sample.reward == 0.25
    assert (plain.reward, plain.prompt_length, plain.response_length) == (None, 3, 8)
    for parts in found:  # a list is the sequences of one rollout
        assert [(part.sequence, part.sequences) for part in parts] == [(0, 2), (1, 2)]
        assert rollout_fault(parts) is None
        assert parts[-1].token_ids[:7].tolist() == [*b"summary"]
        assert (parts[-1].reward, parts[-1].prompt_length) == (1.0, 7)


async def test_a_function_that_hangs_fails_at_its_deadline(tmp_path: Path) -> None:
    async with world_of(tmp_path, "waiting", custom_generate_deadline_secs=0.2) as world:
        [(sample,)] = await made(world, make_group(1, 1))
    words = f"--custom-generate-function-path {CODE}.waiting took longer than 0.2 s (--custom-generate-deadline-secs)"
    assert (sample.status, sample.error) == ("failed", words)


async def drained(world: World, calls: int) -> None:
    """End the run while this many calls of functions wait."""
    user_code.STARTED.clear()
    await world.ask(make_group(1, 2))
    await until(lambda: len(user_code.STARTED) == calls)
    world.rig.topic.publish("drain", b"enough")
    assert [sample.status for sample in await world.whole(2)] == ["aborted", "aborted"]


async def test_a_drain_ends_functions_that_wait(tmp_path: Path) -> None:
    async with world_of(tmp_path, "waiting") as world:
        await drained(world, 2)


async def test_a_function_that_blocks_its_loop_does_not_block_the_stage(tmp_path: Path) -> None:
    async with world_of(tmp_path, "blocking") as world:
        await world.ask(make_group(1, 3))
        await world.ask(make_group(2, 1, metadata=by(".single_turn")))
        samples = await world.whole(4)
    assert all(sample.status == "completed" for sample in samples)


@pytest.mark.parametrize(("name", "words"), [
    ("not_async", "is no async function; write async def generate"),
    ("too_few", "cannot be called as function"),
    ("missing", "has no 'missing'"),
    ("STARTED", "is no function"),
])  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused_at_the_start(name: str, words: str) -> None:
    for separator in (":", "."):
        with pytest.raises(ImportPathError, match=words):
            generate_function(f"{CODE}{separator}{name}")


def batch_world(tmp_path: Path, name: str, batch: int = 2, deadline_s: float = 60.0) -> Any:
    rollout = {"rollout_function_path": f"{CODE}.{name}", "custom_generate_deadline_secs": deadline_s}
    rollout |= {"rollout_max_response_len": 20, "rollout_batch_size": batch, "n_samples_per_prompt": 2}
    return generating(tmp_path, engine=simulated(length=8), rollout=rollout)


async def batch_of(world: World, *groups: int) -> dict[int, list[Sample]]:
    """The rollouts of groups of two, by the group's id, in their order."""
    await world.ready()
    for group_id in groups:
        await world.ask(make_group(group_id, 2))
    found: dict[int, list[Sample]] = {group_id: [] for group_id in groups}
    while any(len(samples) < 2 for samples in found.values()):
        slice_ = await world.answer()
        found[slice_.group.group_id] += slice_.samples
    return {group_id: sorted(samples, key=lambda s: s.index) for group_id, samples in found.items()}


async def test_a_batch_is_trained_with_what_the_engine_reported_for_each_rollout(tmp_path: Path, log: Log) -> None:
    async with batch_world(tmp_path, "whole_batch") as world:
        found = await batch_of(world, 4, 5)
    answers = {}
    for exchange in log:
        [output] = exchange.outputs
        answers[tuple(output.output_ids)] = [item[0] for item in output.meta_info.output_token_logprobs or ()]
    made = [sample for samples in found.values() for sample in samples]
    assert len(made) == len(log) == len(answers) == 4, "rollouts of one prompt draw from their own seeds"
    for sample in made:
        response = tuple(sample.token_ids[1:].tolist())
        assert sample.log_probs[1:].tolist() == pytest.approx(answers[response], abs=1e-6)
        assert sample.loss_mask.tolist() == [0] + [1] * 6
        assert (sample.status, sample.reward, sample.fault()) == ("truncated", 7.0, None)
        assert sample.metrics == {"rollout_function/batch": 2.0}, "the first of groups 4 and 5, in batches of two"


async def test_a_group_that_is_put_back_comes_again_and_one_left_out_fails(tmp_path: Path) -> None:
    async with batch_world(tmp_path, "drops_the_first", batch=4) as world:
        found = await batch_of(world, 0, 1, 2, 3)
    assert [found[2][0].status, found[3][1].status] == ["completed", "completed"]
    assert found[0][0].error == f"--rollout-function-path {CODE}.drops_the_first drew it, and did not return it"
    assert "raised ValueError" in str(found[1][0].error), "the second call drew it alone, and wants two"


@pytest.mark.parametrize(("name", "words"), [
    ("draws_nothing", "drew nothing from data_source.get_samples"),
    ("draws_too_much", "no group waits beside the 2 that this call has drawn"),
    ("hangs", "took longer than 0.4 s"),
])  # fmt: skip
async def test_what_goes_wrong_fails_the_groups_with_the_reason(tmp_path: Path, name: str, words: str) -> None:
    deadline_s = 0.4 if name == "hangs" else 60.0
    async with batch_world(tmp_path, name, deadline_s=deadline_s) as world:
        found = await batch_of(world, 0, 1)
    for sample in (one for samples in found.values() for one in samples):
        assert sample.status == "failed"
        assert words in str(sample.error)


async def test_a_drain_ends_a_call_that_hangs(tmp_path: Path) -> None:
    async with batch_world(tmp_path, "hangs") as world:
        await world.ready()
        await drained(world, 1)


# What a function returns, held against what engines were sent and answered.


FIRST = new_sample(NO_IDS, 3)
# Sent 1 2 3, answered 0 1 by version 4; sent 1 2 3 0 1 2, answered 3 by version 5.
RECORDED = make_sample(0, prompt=(1, 2, 3), runs=[(4, 2), (-1, 1), (5, 1)], mask=[1, 1, 0, 1],
                       log_probs=[-0.1, -0.2, 0.0, -0.4])  # fmt: skip
IDS = [1, 2, 3, 0, 1, 2, 3]


def answer_given(**changes: Any) -> Given:
    values: dict[str, Any] = {"response": "text", "loss_mask": [1, 1, 0, 1], "status": Given.Status.COMPLETED}
    return Given(**{"tokens": list(IDS), "response_length": 4, **values, **changes})


def returned(
    *samples: Given, recorded: tuple[Sample, ...] = (RECORDED,), reward_key: str | None = None, metadata: Any = None
) -> tuple[Sample, ...]:
    parts = returned_rollout(list(samples), recorded, FIRST, reward_key, metadata or {})
    assert rollout_fault(parts) is None
    return parts


def test_log_probs_and_versions_come_from_the_record() -> None:
    (sample,) = returned(answer_given(rollout_log_probs=[-9.0] * 4, reward=1))
    assert sample.log_probs.tolist() == pytest.approx([0, 0, 0, -0.1, -0.2, 0, -0.4])
    assert sample.versions.tolist() == [-1, -1, -1, 4, 4, -1, 5]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert (sample.index, sample.prompt_length, sample.turns, sample.reward) == (3, 3, 2, 1.0)


def test_segments_that_repeat_trained_tokens_train_them_once() -> None:
    short = answer_given(tokens=IDS[:5], response_length=2, loss_mask=[1, 1])
    parts = returned(short, answer_given(reward=0.5), recorded=(RECORDED,))
    assert [part.prefix for part in parts] == [None, Prefix(0, 5)]
    assert sum(int(mask.sum()) for mask in trained_masks(parts)) == 3, "two in the first, one in the second"
    assert parts[-1].reward == 0.5


def test_rewards() -> None:
    assert returned(answer_given())[0].reward is None, "a grader decides"
    (sample,) = returned(answer_given(reward={"score": 0.5, "format": 1}), reward_key="score")
    assert (sample.reward, sample.reward_parts) == (0.5, {"score": 0.5, "format": 1.0})
    first = answer_given(reward=2.0)
    assert returned(first, answer_given(tokens=IDS[:5], response_length=2, loss_mask=None))[-1].reward == 2.0


def test_a_function_may_give_up() -> None:
    for status in ("aborted", "failed"):
        answer = answer_given(status=Given.Status(status), tokens=[], metadata={"error": "no sandbox"})
        (sample,) = returned_rollout(answer, (), FIRST, None, {})
        assert (sample.status, sample.error) == (status, "no sandbox")


@pytest.mark.parametrize(("changes", "words"), [
    ({"status": Given.Status.PENDING}, "with the status pending; set sample.status to"),
    ({"tokens": []}, "response_length is 4 of 0 tokens"),
    ({"response_length": 7}, "must be the prompt's tokens and then the response's"),
    ({"tokens": ["a"]}, "is no list of ids or number"),
    ({"loss_mask": [1, 1]}, "loss_mask has 2 entries for 4 tokens"),
    ({"loss_mask": [1, 1, 2, 1]}, "give 0 or 1 for each"),
    ({"loss_mask": [1, 1, 1, 1]}, "is 1 for token 5, which no weights made"),
    ({"tokens": [*IDS[:4], 99, 2, 3]}, "from token 4 on they are not what the engine"),
    ({"tokens": [*IDS[:4], 99, 2, 3], "loss_mask": None}, "from token 4 on they are not what the engine"),
    ({"tokens": [8, *IDS[1:]]}, "from token 0 on they are not"),
    ({"reward": math.nan}, "sample.reward is nan; it must be a finite number"),
    ({"reward": "high"}, "it must be a finite number"),
    ({"reward": {"score": 1.0}}, "--reward-key is None; name the part"),
    ({"teacher_log_probs": [-1.0]}, "teacher_log_probs has 1 entries for 4"),
])  # fmt: skip
def test_what_is_no_rollout_says_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ReturnedError, match=words.replace("(", r"\(")):
        returned(answer_given(**changes))


def test_nothing_is_trained_that_no_request_asked_for() -> None:
    with pytest.raises(ReturnedError, match="from token 0 on"):
        returned(answer_given(), recorded=())
    for answer in (None, [], [None], "text"):
        with pytest.raises(ReturnedError, match="return the sample, or a list of samples"):
            returned_rollout(answer, (RECORDED,), FIRST, None, {})


def test_arguments_have_the_names_of_the_flags() -> None:
    args = slime_arguments(make_config(rollout={"rollout_temperature": 0.7, "n_samples_per_prompt": 4}))
    assert (args.rollout_temperature, args.n_samples_per_prompt, args.rollout_stop) == (0.7, 4, None)
    assert getattr(args, "no_such", "default") == "default"
    with pytest.raises(AttributeError, match=r"args has no 'no_such'.*custom_generate\.md"):
        _ = args.no_such
    one = args.with_router("http://127.0.0.1:4000", "key")
    assert f"http://{one.sglang_router_ip}:{one.sglang_router_port}/generate" == "http://key@127.0.0.1:4000/generate"
    assert args.sglang_router_ip is None, "every call has an address of its own"


def test_a_sample_survives_plain_values() -> None:
    sample = answer_given(metadata={"a": [1]}, reward=0.5)
    again = Given.from_dict({**sample.to_dict(), "unknown": 1})
    assert again == sample
    assert again.unknown == 1, "what a function has left on it stays"
    assert Given.from_dict(again.to_dict()).unknown == 1
    assert again.status is Given.Status.COMPLETED
    assert (again.effective_response_length, answer_given(loss_mask=None).effective_response_length) == (3, 4)


def test_tokens_are_appended_with_their_mask_log_probs_and_end() -> None:
    """Of the model, of a tool, as lists and arrays; a fault changes nothing."""
    sample = Given(tokens=[1, 2])
    ends = {"finish_reason": {"type": "length"}, "weight_version": "0.3"}
    sample.append_response_tokens(tokens=[5, 6], log_probs=np.array([[-0.5, -0.25]]), text="ab", meta_info=ends)
    sample.append_response_tokens(None, tokens=np.array([7]), trainable=False, text="t")
    stops = {"finish_reason": {"type": "stop"}}
    sample.append_response_tokens(tokens=[8], log_probs=[-1.0], meta_info=stops, update_terminal_info=False)
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 2, 5, 6, 7, 8], 4, "abt")
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0, 1], [-0.5, -0.25, 0.0, -1.0])
    assert (sample.status, sample.weight_versions) == (Given.Status.TRUNCATED, ["0.3"])
    before = sample.to_dict()
    for words, wrong in (
        ("2 tokens of the model came without log_probs", {"tokens": [1, 2]}),
        ("tokens with trainable=False have no log_probs", {"tokens": [1], "log_probs": [0.0], "trainable": False}),
        ("log_probs has 2 entries for 1 tokens", {"tokens": [1], "log_probs": [0.0, 0.0]}),
    ):
        with pytest.raises(ValueError, match=words):
            sample.append_response_tokens(**wrong)
    assert sample.to_dict() == before
    known = sample.loss_mask
    sample.append_response_tokens(tokens=[9], trainable=False)
    assert known == [1, 1, 0, 1, 0], "lists grow in place"
    del known[-1], sample.tokens[-1], (sample.rollout_log_probs or [])[-1]
    sample.response_length -= 1
    sample.loss_mask = [1]
    with pytest.raises(ValueError, match="loss_mask has 1 entries for the 4 tokens that are there"):
        sample.append_response_tokens(tokens=[1], trainable=False)


def test_what_a_function_leaves_on_a_sample_is_kept_as_far_as_json_holds_it() -> None:
    row = {"n": 1, "kept": "as it was"}
    given = answer_given(metadata=row | {"n": 2, "seen": ["x"], "lock": object()})
    given.calls, given.handle = 3, object()
    (sample,) = returned(given, metadata=row)
    assert json.loads(sample.left) == {"metadata": {"n": 2, "seen": ["x"]}, "attributes": {"calls": 3}}
    (untouched,) = returned(answer_given(metadata=dict(row)), metadata=row)
    assert untouched.left == ""


# Hooks and data sources with slime's signatures.


def group_of(*rewards: float) -> RolloutSlice:
    samples = tuple(msgspec.structs.replace(make_sample(i), reward=reward) for i, reward in enumerate(rewards))
    return RolloutSlice(make_group(7, len(rewards), label="x", metadata='{"n":1}'), samples)


LEFT = '{"metadata":{"seen":%d},"attributes":{"calls":%d}}'


def with_left(slice_: RolloutSlice) -> RolloutSlice:
    """Not graded yet; each rollout has its own: its index, and ten times that."""
    samples = [
        msgspec.structs.replace(one, left=LEFT % (one.index, 10 * one.index), reward=None) for one in slice_.samples
    ]
    return msgspec.structs.replace(slice_, samples=tuple(samples))


def test_filters_and_logs_see_what_a_function_has_left() -> None:
    samples = shown(with_left(group_of(0.0, 1.0)))
    assert [(one.metadata, one.calls) for one in samples] == [({"n": 1, "seen": 0}, 0), ({"n": 1, "seen": 1}, 10)]


@pytest.mark.parametrize("function", ["left_on_it", "left_on_them"])
async def test_graders_see_what_a_function_has_left_on_each_sample(function: str) -> None:
    """Alone and as a group; equal responses with other traces are graded apart."""
    reward = {"custom_rm_path": f"{CODE}:{function}", "group_rm": function == "left_on_them"}
    config = make_config(reward=reward, rollout={"n_samples_per_prompt": 3})
    grading = Grading(make_context(config), Activity())
    await grading.open()
    try:
        slice_ = with_left(group_of(0.0, 0.0, 0.0))
        graded = await grading.grade(slice_)
        other = [msgspec.structs.replace(one, left=LEFT % (5, 5)) for one in slice_.samples]
        again = await grading.grade(msgspec.structs.replace(slice_, samples=tuple(other)))
    finally:
        await grading.close()
    assert [sample.reward for sample in graded.samples] == [0.0, 11.0, 22.0]
    assert [sample.reward for sample in again.samples] == [10.0] * 3, "no grade of the same response is taken over"


@pytest.mark.parametrize(
    ("text", "label"),
    [('{"ground_truth":{"target":["4"]}}', {"ground_truth": {"target": ["4"]}}), ("{1, 2}", "{1, 2}"), ("4", "4")],
)
def test_labels_that_were_objects_are_objects_for_functions_of_slime(text: str, label: object) -> None:
    slice_ = group_of(1.0)
    slice_ = msgspec.structs.replace(slice_, group=msgspec.structs.replace(slice_.group, label=text))
    assert shown(slice_)[0].label == label
    assert given_sample(slice_.group, slice_.samples[0]).label == label
    found = custom_grader(f"{CODE}:label_is_object")(GradeRequest(grader="", response="x", label=text))
    assert found.score == float(isinstance(label, dict))
    assert (found.extracted, found.parts) == ("4", {"acc": 1.0}), "texts of a grader's dict are no parts"


def test_a_group_filter_of_slimes_signature_says_keep_and_why() -> None:
    filter_ = import_filter(f"{CODE}:differing_rewards", make_config())
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


def prompts_of(directory: Path, name: str = "Counting", limit: int | None = None) -> Any:
    return DrawnPrompts(config_of(name), directory, Preparer(False, encode, encode, None), encode, limit)


def config_of(name: str = "Counting") -> Config:
    rollout = {"n_samples_per_prompt": 2, "rollout_batch_size": 2}
    return make_config(data={"data_source_path": f"{CODE}.{name}"}, rollout=rollout)


@settings(max_examples=10, deadline=None)
@given(ends=st.lists(st.sampled_from(["trained", "filtered", "stale"]), min_size=2, max_size=10))
async def test_a_resumed_run_is_given_what_the_first_one_would_have_been_given(
    ends: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Open groups keep their prompts, those that were drawn ahead come next, none comes twice, none is left out."""
    place = tmp_path_factory.mktemp("source")
    first = prompts_of(place)
    shown: dict[int, str] = {}
    async with prompting(prompts=first, config=config_of(), eta=3) as desk:
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
    further = range(snapshot.cursor, snapshot.cursor + 9)
    assert [second.get(position).prompt for position in further] == [f"{n}+1=" for n in further]


async def test_groups_have_the_sources_prompts_labels_and_metadata(tmp_path: Path) -> None:
    """And prompts of groups that have ended are not kept."""
    async with prompting(prompts=prompts_of(tmp_path), config=config_of()) as desk:
        await desk.land(0)
        found = [await take(desk.groups) for _ in range(4)]
        said = [(group.prompt, group.label, group.metadata, group.prompt_index) for group in found]
        assert said == [(f"{n}+1=", str(n + 1), f'{{"n":{n}}}', n) for n in range(4)]
        assert found[0].prompt_ids.tolist() == encode("0+1=")
        await desk.report(Settled(0, "filtered"), Settled(1, "failed"), step_done(1, 2, 3))
        await desk.report(CheckpointReady(1, 1, "x"))
        await until(lambda: bool(desk.hooks.commits))
        [(_, snapshot)] = desk.hooks.commits
    assert min(snapshot.drawn) >= 4


@pytest.mark.parametrize(("name", "words"), [
    ("Empty", r"get_samples\(1\) gave no group"),
    ("Short", "a group of 1 samples, but --n-samples-per-prompt is 2"),
    ("Broken", "get_samples raised OSError: the disk is gone"),
    ("NamesCode", "generate_function_path is 'os.system', which no setting of this run names"),
    ("Counting", "a prompt of 4 tokens, above the limit of 3"),
])  # fmt: skip
async def test_what_is_wrong_with_a_source_is_one_sentence(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DataSourceError, match=words):
        await prompts_of(tmp_path, name, limit=3 if name == "Counting" else None).reach(1)


async def test_the_code_of_a_source_may_name_a_function(tmp_path: Path) -> None:
    """It is the user's own, unlike what its data say."""
    prompts = prompts_of(tmp_path, "ChoosesFunction")
    await prompts.reach(1)
    assert "too_few" in prompts.get(0).metadata
    with pytest.raises(DataSourceError, match="load raised FileNotFoundError"):
        prompts.resume({}, 0, 7)


@pytest.mark.parametrize(("name", "words"), [
    ("NoLoad", r"NoLoad has no load\(rollout_id\)"),
    ("ask", "is no class"),
    ("Odd", r"Odd\.get_samples cannot be called with \(self, n\)"),
])  # fmt: skip
def test_a_class_that_is_no_source_is_refused_at_the_start(name: str, words: str) -> None:
    with pytest.raises(ImportPathError, match=words):
        data_source(f"{CODE}.{name}")
    assert data_source(f"{CODE}.Counting").__name__ == "Counting"
