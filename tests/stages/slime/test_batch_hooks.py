"""slime's functions for whole groups and whole evaluations: buffer filter, all samples, train data, evaluation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stages.slime
from models.import_path import ImportPathError, import_path
from models.slime_arguments import slime_arguments
from stages.errors import BufferOrderError, UntrainableGroup
from stages.messages import RolloutSlice
from stages.rollouts import as_rollout, rollout_return
from stages.slime import RolloutFnEvalOutput
from stages.slime.convert import ReturnedError, returned_evaluation
from stages.train.batch import for_trainer
from stages.train.held_groups import GroupBuffer
from tests.stages.engine_rig import simulated, started
from tests.stages.slime import user_code
from tests.stages.stage_rig import (
    Held,
    make_config,
    make_graded,
    make_group,
    make_sample,
    make_slice,
    open_desk,
    settled,
    take,
    until,
)
from tests.stages.train_rig import open_training

CODE = "tests.stages.slime.user_code"
ROOT = Path(__file__).parents[3]


def trained(function: str, slice_: RolloutSlice) -> Any:
    reward = {"custom_convert_samples_to_train_data_path": f"{CODE}:{function}"}
    return for_trainer(make_config(reward=reward), slice_)


def test_train_data_chooses_sequences_masks_and_advantages() -> None:
    """Of three rollouts the function keeps two, cuts the last token of each, and gives 10 times the reward."""
    samples = (make_sample(0, reward=1.0), make_sample(1, reward=2.0, mask=[1, 0, 1, 1]), make_sample(2, reward=3.0))
    kept, sequences = trained("cut_and_scaled", make_slice(4, *samples))
    assert [sequence.loss_mask.tolist() for sequence in sequences] == [
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 0, 1, 0],
        [0] * 7,
    ]
    assert [sequence.advantages.tolist() for sequence in sequences] == [
        [0, 0, 0, 10, 10, 10, 0],
        [0, 0, 0, 20, 0, 20, 0],
        [0] * 7,
    ]
    assert [sequence.reward for sequence in sequences] == [10.0, 20.0, 0.0]
    assert [sample.loss_mask.tolist() for sample in kept.samples] == [s.loss_mask.tolist() for s in sequences]
    assert [rollout_return([sample]) for sample in kept.samples] == [1.0, 2.0, 3.0], "rewards in logs are the grader's"


def test_each_sequence_of_a_rollout_shows_the_return_of_the_whole() -> None:
    parts = as_rollout(make_sample(0, n=2), make_sample(0, n=3, reward=2.0))
    _, sequences = trained("cut_and_scaled", make_slice(0, *parts, make_sample(1, reward=1.0)))
    assert [sequence.reward for sequence in sequences] == [20.0, 20.0, 10.0]


def test_equal_responses_of_a_group_have_an_entry_each() -> None:
    same = make_sample(0, reward=1.0)
    slice_ = make_slice(0, same, msgspec.structs.replace(same, index=1, reward=5.0))
    _, sequences = trained("cut_and_scaled_backwards", slice_)
    assert [sequence.reward for sequence in sequences] == [10.0, 50.0], "sample_indices say whose an entry is"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("other_tokens", "7 tokens with response_lengths 4 are no sequence of the group without an entry"),
        ("twice", "7 tokens with response_lengths 4 are no sequence of the group without an entry"),
        ("masks_what_no_policy_made", "loss_masks is 1 for token 4, which may not be trained"),
        ("mask_too_short", "an entry has 3 loss_masks for 4 tokens, and the reward 1.0; give 0 or 1 for each"),
        ("no_number", "and the reward nan; give 0 or 1 for each"),
        ("no_masks", "KeyError: 'loss_masks'"),
        ("unequal_lists", "zip() argument"),
    ],
)
def test_train_data_that_is_none_ends_the_group_with_the_reason(function: str, words: str) -> None:
    rule = rf"--custom-convert-samples-to-train-data-path {CODE}:{function} raised .*{re.escape(words)}"
    with pytest.raises(UntrainableGroup, match=rule):
        trained(function, make_slice(0, make_sample(0, reward=1.0, mask=[1, 0, 1, 1]), make_sample(1, reward=0.0)))


def buffer_of(function: str, *groups: RolloutSlice) -> GroupBuffer:
    buffer = GroupBuffer(make_config(asynchrony={"buffer_order": f"{CODE}:{function}", "max_staleness": 4}))
    for group in groups:
        buffer.push(Held(group))
    return buffer


def test_a_buffer_filter_chooses_the_groups_of_a_batch_and_drops_others() -> None:
    groups = [make_graded(i, reward, 0.0) for i, reward in enumerate((0.2, 0.9, 0.5, -1.0))]
    buffer = buffer_of("best_first_and_no_bad_ones", *groups)
    taken = [buffer.pop(0, missing) for missing in (2, 1)]
    assert [lease.message.group.group_id for lease in taken if lease is not None] == [1, 2]
    assert user_code.ASKED == [(0, [0, 1, 2, 3], 2)], "asked once for the batch"
    assert [lease.message.group.group_id for lease in buffer.take_dropped()] == [3]
    assert buffer.take_dropped() == []
    assert len(buffer) == 1
    buffer.push(Held(make_graded(7, 1.0, 0.0)))
    again = buffer.pop(1, 2)
    assert again is not None
    assert again.message.group.group_id == 7, "asked anew for the next batch, with what has come"


def test_a_buffer_filter_that_returns_nothing_takes_nothing_and_one_that_makes_groups_up_is_named() -> None:
    buffer = buffer_of("nothing_yet", make_graded(0, 1.0, 0.0))
    assert buffer.pop(0, 1) is None
    assert len(buffer) == 1
    with pytest.raises(BufferOrderError, match=r"returned \[99\], which are not in the buffer"):
        buffer_of("made_up_groups", make_graded(0, 1.0, 0.0)).pop(0, 1)
    with pytest.raises(BufferOrderError, match=r"raised TypeError: .*user_code\.py:\d+ in not_a_list"):
        buffer_of("not_a_list", make_graded(0, 1.0, 0.0)).pop(0, 1)


async def test_what_a_buffer_filter_drops_ends_as_filtered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"buffer_order": f"{CODE}:best_first_and_no_bad_ones"}
    async with open_training(tmp_path, monkeypatch, batch=2, total=1, asynchrony=order) as desk:
        await desk.send(make_graded(0, -1.0, 0.0), make_graded(1, 1.0, 0.0), make_graded(2, 0.5, 0.0))
        ended = [await take(desk.reports) for _ in range(3)]
        outcomes = {report.group_id: (report.outcome, report.detail) for report in ended if hasattr(report, "group_id")}
        assert outcomes[0] == ("filtered", "buffer_filter")


async def test_all_complete_groups_are_shown_also_filtered_ones() -> None:
    user_code.SEEN.clear()
    filters = {"dynamic_sampling_filter": ("nonzero_std",), "rollout_all_samples_process_path": f"{CODE}:see_all"}
    async with open_desk(make_config(filter=filters)) as desk:
        await desk.send(make_graded(0, 1.0, 1.0), make_graded(1, 1.0, 0.0))
        assert (await settled(desk)).group_id == 0
        assert (await take(desk.out)).group.group_id == 1
        await until(lambda: len(user_code.SEEN) == 2)
    assert sorted(user_code.SEEN) == [[0, [1.0, 1.0]], [1, [1.0, 0.0]]]


async def test_an_evaluation_function_asks_the_engines_and_its_numbers_travel(tmp_path: Path) -> None:
    settings = {"rollout_max_response_len": 20}
    evaluation = {"eval_function_path": f"{CODE}:evaluated", "eval_prompt_data": ("held=x.jsonl",)}
    async with started(tmp_path, engine=simulated(length=8), rollout=settings, eval=evaluation) as world:
        await world.ask(make_group(9, 1, purpose="eval", pinned_version=0))
        [sample] = (await world.answer()).samples
        await world.ask(make_group(2, 1))
        [plain] = (await world.answer()).samples
    assert plain.response_length == 8, "prompts for training are not its business"
    found = json.loads(sample.left)
    assert found["data"] == {"held": {"rewards": [1.0, 0.0], "truncated": [0.0, 1.0]}}
    assert found["metrics"] == {"answered": 8.0, "rollout_id": 0.0}
    assert found["versions"] == [0], "the weights that made the tokens of its requests"


async def test_an_evaluation_function_that_raises_is_named(tmp_path: Path) -> None:
    evaluation = {"eval_function_path": f"{CODE}:evaluation_breaks", "eval_prompt_data": ("held=x.jsonl",)}
    async with started(tmp_path, engine=simulated(length=8), eval=evaluation) as world:
        await world.ask(make_group(9, 1, purpose="eval", pinned_version=0))
        [sample] = (await world.answer()).samples
    words = rf"--eval-function-path {CODE}:evaluation_breaks raised OSError: no data \(/.*/user_code\.py:\d+ in .*\)"
    assert sample.status == "failed"
    assert re.fullmatch(words, sample.error or "")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "it returned NoneType; return RolloutFnEvalOutput"),
        ({}, "it returned dict; return RolloutFnEvalOutput"),
        ({"held": [1.0]}, "its data set 'held' has no list of numbers"),
        ({"held": {"rewards": ["good"]}}, "its data set 'held' has no list of numbers"),
        ({"held": {"rewards": []}}, "its data set 'held' needs rewards, all of them finite"),
        (RolloutFnEvalOutput(data={"held": {"rewards": [float("nan")]}}), "needs rewards, all of them finite"),
    ],
)
def test_an_evaluation_without_numbers_is_named(returned: object, words: str) -> None:
    with pytest.raises(ReturnedError, match=re.escape(words)):
        returned_evaluation(returned)


def test_functions_find_the_held_out_sets_in_args() -> None:
    sets = {"a": {"n_samples": 3, "top_p": 0.5, "rm_type": "gpqa"}}
    config = make_config(eval={"eval_prompt_data": ("a=a.jsonl@[0:3]", "d/b.jsonl"), "eval_sets": sets})
    first, second = slime_arguments(config).eval_datasets
    assert (first.name, first.path, first.n_samples_per_eval_prompt, first.top_p, first.rm_type) == (
        "a", "a.jsonl@[0:3]", 3, 0.5, "gpqa",
    )  # fmt: skip
    assert (second.name, second.path, second.n_samples_per_eval_prompt) == ("b", "d/b.jsonl", 1)
    assert (second.input_key, second.rm_type) == (config.data.input_key, config.reward.rm_type)


def test_the_names_of_the_page_are_there() -> None:
    table = (ROOT / "docs" / "slime.md").read_text().partition("| name | module there |")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(names) == stages.slime.__all__
    assert stages.slime.load_function(f"{CODE}.see_all") is user_code.see_all


def test_a_function_may_be_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "my-rewards.py").write_text("class Counter:\n    n = 0\n")
    monkeypatch.chdir(tmp_path)
    found = import_path("own/my-rewards.py:Counter")
    found.n = 5
    assert import_path(f"{tmp_path}/own/my-rewards.py:Counter").n == 5, "the file is imported once"
    with pytest.raises(ImportPathError, match=r"importing 'own/none\.py' failed \(FileNotFoundError"):
        import_path("own/none.py:score")
    (tmp_path / "own" / "broken.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(ImportPathError, match="ZeroDivisionError"):
            import_path("own/broken.py:score")
