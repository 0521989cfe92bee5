"""What an answer adds to a sample beside its tokens: drafts, experts, reuse; and what a batch says of it."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest

from models.engines.errors import EngineProtocolError
from models.engines.protocol import FinishReason, GenerateOutput, MetaInfo, VersionSpan
from stages.messages import VersionRun
from stages.sampling.append_output import append_output, append_saved
from stages.sequences import new_sample
from stages.train.batch_metrics import batch_metrics
from tests.stages.stage_rig import make_config, make_sample, make_slice, numbers


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


def test_draft_tokens_are_summed_over_the_requests_of_a_rollout() -> None:
    drafts = {"spec_num_proposed_drafts": 10, "spec_num_correct_drafts": 6}
    sample = append_output(new_sample([], 0), answer([1, 2], "abort", **drafts), 1.0)
    sample = append_output(sample, answer([3], **drafts), 1.0)
    assert (sample.spec_proposed, sample.spec_accepted) == (20, 12)
    sample = append_output(sample, answer([3]), 1.0)  # an engine without drafts
    assert (sample.spec_proposed, sample.spec_accepted) == (20, 12)


def test_experts_of_a_continued_rollout_are_those_that_made_its_tokens() -> None:
    """Each answer tells the choices from the prompt on; of a repeated token the first choice counts."""
    prompt, first, second = 3, [1, 2], [3, 4]
    sample = append_output(new_sample([], 0), answer(first, "abort", routed_experts=experts(range(prompt + 1))), 1.0)
    again = experts(range(100, 100 + prompt + len(first) + len(second) - 1))
    sample = append_output(sample, answer(second, routed_experts=again), 1.0)
    rows = np.frombuffer(sample.routed_experts, "<i4").reshape(-1, 2, 2)[:, 0, 0]
    assert rows.tolist() == [0, 1, 2, 3, 104, 105]
    assert append_output(new_sample([], 0), answer(first), 1.0).routed_experts == b""


def test_experts_that_are_no_base64_are_told() -> None:
    with pytest.raises(EngineProtocolError, match="routed_experts is not base64"):
        append_output(new_sample([], 0), answer([1], routed_experts="%%"), 1.0)


def test_what_a_lost_engine_left_is_an_aborted_response() -> None:
    sample = append_saved(new_sample([], 0), answer([1, 2, 3], None), 2.0)
    assert (sample.status, sample.reused_tokens, sample.generate_s) == ("aborted", 3, 2.0)
    assert sample.version_runs == (VersionRun(1, 3),)
    sample = append_saved(sample, None, 1.0)
    assert (sample.status, sample.reused_tokens, sample.generate_s) == ("aborted", 3, 3.0)
    sample = append_saved(sample, answer([4], label="0.2"), 1.0)
    assert (sample.status, sample.reused_tokens) == ("completed", 3), "a finished one is no partial output"
    assert numbers(sample.response_ids) == [1, 2, 3, 4]
    assert sample.version_runs == (VersionRun(1, 3), VersionRun(2, 1))
    assert sample.fault() is None


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
