"""What a function returns, held against what engines were sent and answered."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stages.messages import NO_IDS, Prefix, Sample
from stages.rollouts import new_sample, rollout_fault, trained_masks
from stages.slime import Sample as Given
from stages.slime.convert import ReturnedError, returned_rollout
from stages.slime.types import slime_arguments
from tests.stages.stage_rig import make_config, make_sample

FIRST = new_sample(NO_IDS, 3)
# Sent 1 2 3, answered 0 1 by version 4; sent 1 2 3 0 1 2, answered 3 by version 5.
RECORDED = make_sample(0, prompt=(1, 2, 3), runs=[(4, 2), (-1, 1), (5, 1)], mask=[1, 1, 0, 1],
                       log_probs=[-0.1, -0.2, 0.0, -0.4])  # fmt: skip
IDS = [1, 2, 3, 0, 1, 2, 3]


def given(**changes: Any) -> Given:
    values: dict[str, Any] = {
        "tokens": list(IDS), "response_length": 4, "response": "text", "loss_mask": [1, 1, 0, 1],
        "status": Given.Status.COMPLETED, **changes,
    }  # fmt: skip
    return Given(**values)


def returned(*samples: Given, recorded: tuple[Sample, ...] = (RECORDED,), **options: Any) -> tuple[Sample, ...]:
    parts = returned_rollout(list(samples), recorded, FIRST, **options)
    assert rollout_fault(parts) is None
    return parts


def test_log_probs_and_versions_come_from_the_record() -> None:
    (sample,) = returned(given(rollout_log_probs=[-9.0] * 4, reward=1))
    assert sample.log_probs.tolist() == pytest.approx([0, 0, 0, -0.1, -0.2, 0, -0.4])
    assert sample.versions.tolist() == [-1, -1, -1, 4, 4, -1, 5]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert (sample.index, sample.prompt_length, sample.turns, sample.reward) == (3, 3, 2, 1.0)


def test_without_a_mask_all_that_the_model_made_is_trained_and_nothing_else() -> None:
    (sample,) = returned(given(loss_mask=None))
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]


def test_a_function_may_train_less_end_earlier_and_add_an_observation() -> None:
    (sample,) = returned(given(tokens=[*IDS[:5], 77, 78], loss_mask=[0, 1, 0, 0]))
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert sample.versions.tolist() == [-1, -1, -1, 4, 4, -1, -1]


def test_what_the_policy_did_not_draw_as_in_training_is_not_trained() -> None:
    """The record says so of a turn that was asked for with another temperature."""
    colder = make_sample(0, runs=[(4, 2), (-1, 1), (5, 1)], mask=[0, 0, 0, 1], log_probs=[-0.1, -0.2, 0.0, -0.4])
    (sample,) = returned(given(), recorded=(colder,))
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_the_sequence_with_the_longest_common_beginning_is_the_one() -> None:
    other = make_sample(0, prompt=(1, 2), runs=[(9, 4)])
    (sample,) = returned(given(), recorded=(other, RECORDED))
    assert sample.versions.tolist() == [-1, -1, -1, 4, 4, -1, 5]


def test_segments_that_repeat_trained_tokens_train_them_once() -> None:
    short = given(tokens=IDS[:5], response_length=2, loss_mask=[1, 1])
    parts = returned(short, given(reward=0.5), recorded=(RECORDED,))
    assert [part.prefix for part in parts] == [None, Prefix(0, 5)]
    assert sum(int(mask.sum()) for mask in trained_masks(parts)) == 3, "two in the first, one in the second"
    assert parts[-1].reward == 0.5


def test_segments_that_mask_what_went_before_share_nothing() -> None:
    parts = returned(given(tokens=IDS[:5], response_length=2, loss_mask=[1, 1]), given(loss_mask=[0, 0, 0, 1]))
    assert [part.prefix for part in parts] == [None, None]
    assert sum(int(mask.sum()) for mask in trained_masks(parts)) == 3


def test_rewards() -> None:
    assert returned(given())[0].reward is None, "a grader decides"
    (sample,) = returned(given(reward={"score": 0.5, "format": 1}), reward_key="score")
    assert (sample.reward, sample.reward_parts) == (0.5, {"score": 0.5, "format": 1.0})
    assert returned(given(reward=2.0), given(tokens=IDS[:5], response_length=2, loss_mask=None))[-1].reward == 2.0


@pytest.mark.parametrize("status", ["aborted", "failed"])
def test_a_function_may_give_up(status: str) -> None:
    (sample,) = returned_rollout(
        given(status=Given.Status(status), tokens=[], metadata={"error": "no sandbox"}), (), FIRST
    )
    assert (sample.status, sample.error) == (status, "no sandbox")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
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
    ],
)
def test_what_is_no_rollout_says_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ReturnedError, match=words.replace("(", r"\(")):
        returned(given(**changes))


@pytest.mark.parametrize("answer", [None, [], [None], "text"])
def test_what_is_no_sample_is_named(answer: object) -> None:
    with pytest.raises(ReturnedError, match="return the sample, or a list of samples"):
        returned_rollout(answer, (RECORDED,), FIRST)


def test_nothing_is_trained_that_nobody_asked_the_engines_for() -> None:
    with pytest.raises(ReturnedError, match="from token 0 on"):
        returned(given(), recorded=())


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
    sample = given(metadata={"a": [1]}, reward=0.5)
    again = Given.from_dict({**sample.to_dict(), "unknown": 1})
    assert again == sample
    assert again.status is Given.Status.COMPLETED
    assert (again.effective_response_length, given(loss_mask=None).effective_response_length) == (3, 4)
