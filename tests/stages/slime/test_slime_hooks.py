"""Filters, post-processing and graders with slime's signatures, where the run calls them."""

from __future__ import annotations

import logging

import msgspec
import pytest

from configs.schema import FilterConfig
from stages.graders.custom import custom_grader
from stages.graders.grade import GradeRequest, UnknownGraderError
from stages.group.filters import FilterDecision, resolve_filter
from stages.messages import RolloutSlice
from stages.slime.hooks import eval_data, logged, removed, rollout_log, sample_filter, shown
from stages.train.batch import slice_sequences
from tests.stages.stage_rig import make_config, make_group, make_sample

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
