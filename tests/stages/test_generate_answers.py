"""What an answer adds to a sample beside its tokens: drafts, experts, reuse; and what a batch says of it."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest

from models.engines.protocol import FinishReason, GenerateOutput, MetaInfo, SamplingParams, VersionSpan
from models.errors import EngineProtocolError
from stages.messages import VersionRun
from stages.rollouts import new_sample
from stages.sampling.requests import SampleRequest, SampleResult, extended, with_saved
from stages.sampling.rollout_requests import append_result
from stages.train.batch_metrics import batch_metrics
from tests.stages.stage_rig import make_config, make_sample, make_slice, response_ids


def experts(rows: range) -> str:
    """Two layers of top-2, told apart by their row."""
    return base64.b64encode(np.array([[[r, r], [r, r]] for r in rows], dtype="<i4").tobytes()).decode()


def answer(ids: list[int], reason: str | None = "stop", *, label: str = "0.1", **meta: object) -> GenerateOutput:
    values: dict[str, object] = {
        "id": "r",
        "finish_reason": FinishReason(reason) if reason else None,
        "weight_versions": [VersionSpan(label, 0, len(ids))],
        "output_token_logprobs": [(-0.5, token, None) for token in ids],
        **meta,
    }
    return GenerateOutput(text="x" * len(ids), output_ids=ids, meta_info=msgspec.convert(values, MetaInfo))


ASKED = SampleRequest(SamplingParams(), [1])
NEW = SampleResult()


def test_draft_tokens_are_summed_over_the_requests_of_a_rollout() -> None:
    drafts = {"spec_num_proposed_drafts": 10, "spec_num_correct_drafts": 6}
    result = extended(ASKED, NEW, answer([1, 2], "abort", **drafts), 1.0)
    sample = append_result(new_sample([], 0), extended(ASKED, result, answer([3], **drafts), 1.0))
    assert (sample.spec_proposed, sample.spec_accepted) == (20, 12)
    sample = append_result(sample, extended(ASKED, NEW, answer([3]), 1.0))  # an engine without drafts
    assert (sample.spec_proposed, sample.spec_accepted) == (20, 12)


@pytest.mark.parametrize("turns", [1, 2])
def test_experts_of_a_continued_rollout_are_those_that_made_its_tokens(turns: int) -> None:
    """Each answer tells the choices from the prompt on; of a repeated token the first choice counts."""
    prompt, first, second = 3, [1, 2], [3, 4]
    result = extended(ASKED, NEW, answer(first, "abort", routed_experts=experts(range(prompt + 1))), 1.0)
    again = answer(second, routed_experts=experts(range(100, 100 + prompt + len(first) + len(second) - 1)))
    if turns == 1:
        sample = append_result(new_sample([], 0), extended(ASKED, result, again, 1.0))
    else:
        sample = append_result(append_result(new_sample([], 0), result), extended(ASKED, NEW, again, 1.0))
    rows = sample.extras["routed_experts"].reshape(-1, 2, 2)[:, 0, 0]
    assert rows.tolist() == [0, 1, 2, 3, 104, 105]
    assert sample.extras["routed_experts"].dtype == np.int32
    assert append_result(new_sample([], 0), extended(ASKED, NEW, answer(first), 1.0)).extras == {}


@pytest.mark.parametrize(("sent", "words"), [("%%", "is not base64"), ("AAAAAAA=", "has 5 bytes, which are no int32")])
def test_experts_that_are_no_base64_of_numbers_are_told(sent: str, words: str) -> None:
    result = extended(ASKED, NEW, answer([1], routed_experts=sent), 1.0)
    assert isinstance(result.error, EngineProtocolError)
    assert f"routed_experts {words}" in str(result.error)
    assert (result.finish, result.token_ids) == ("failed", ())


def test_pieces_are_joined_by_version_and_their_time_is_summed() -> None:
    result = extended(ASKED, extended(ASKED, NEW, answer([1, 2], "abort"), 1.0), answer([3], "abort"), 1.0)
    result = extended(ASKED, result, answer([4], label="0.2"), 1.0)
    assert result.runs == (VersionRun(1, 3), VersionRun(2, 1))
    assert result.spent_s == 3.0, "deadlines count the work on all pieces"


def test_what_a_lost_engine_left_is_an_aborted_response() -> None:
    result = with_saved(ASKED, NEW, answer([1, 2, 3], None), 2.0, lost=True)
    assert (result.finish, result.reused_tokens, result.spent_s) == ("aborted", 3, 2.0)
    assert result.runs == (VersionRun(1, 3),)
    assert with_saved(ASKED, NEW, answer([1, 2, 3], None), 2.0, lost=False).reused_tokens == 0, "it was given back"
    result = with_saved(ASKED, result, None, 1.0, lost=True)
    assert (result.finish, result.reused_tokens, result.spent_s) == ("aborted", 3, 3.0)
    result = extended(ASKED, result, answer([4], label="0.2"), 1.0)
    assert (result.finish, result.reused_tokens) == ("stop", 3), "a finished one is no partial output"
    sample = append_result(new_sample([], 0), result)
    assert response_ids(sample) == [1, 2, 3, 4]
    assert sample.version_runs == (VersionRun(1, 3), VersionRun(2, 1))
    assert sample.fault() is None


def test_labels_of_a_frozen_model_are_no_versions() -> None:
    frozen = SampleRequest(SamplingParams(), [1], policy="judge")
    assert extended(frozen, NEW, answer([1, 2], label="default"), 1.0).runs == (VersionRun(-1, 2),)


def test_a_batch_tells_of_reuse_replacement_and_drafts() -> None:
    members = (
        make_sample(0, reward=1.0, reused_tokens=7, spec_proposed=10, spec_accepted=4),
        make_sample(1, reward=0.0, replaced=1, spec_proposed=10, spec_accepted=9),
    )
    metrics = batch_metrics(make_config(), 1, [make_slice(0, *members)], {1: 8})
    assert metrics["rollout/reused_tokens"] == 7.0
    assert metrics["rollout/replaced_ratio"] == 0.5
    assert metrics["rollout/spec_accept_rate"] == 13 / 20
    plain = batch_metrics(make_config(), 1, [make_slice(1)], {1: 8})
    assert "rollout/spec_accept_rate" not in plain, "without drafts there is no rate"
