"""Answers of engines: how pieces become one result, and which answers are refused."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import numpy as np
import pytest

from models.engines.answers import AnswerLimits
from models.engines.client import EngineClient
from models.engines.protocol import FinishReason, GenerateOutput, GenerateRequest, MetaInfo, SamplingParams, VersionSpan
from models.errors import EngineProtocolError
from stages.messages import Settled, VersionRun
from stages.ports import read_value
from stages.rollouts import new_sample
from stages.sampling.engine_choice import Slots
from stages.sampling.engine_directory import Target
from stages.sampling.requests import SampleRequest, SampleResult, Sent, extended, with_saved
from stages.sampling.rollout_requests import append_result
from stages.sampling.routes import REFUSED_LIMIT, RouteRequest, Routes, _misgiving
from stages.topic_values import Complaint, EngineEntry
from stages.train.batch_metrics import batch_metrics
from tests.stages.engine_rig import core_of, started
from tests.stages.stage_rig import make_config, make_group, make_sample, make_slice, response_ids, until
from tests.stages.train_rig import training


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


REQUEST = SampleRequest(SamplingParams(max_new_tokens=2), [1, 2])
WIRE = GenerateRequest(input_ids=[1, 2], sampling_params=SamplingParams(max_new_tokens=2), return_logprob=True)
SENT = Sent(AnswerLimits.of(WIRE, 50), met="7.3", generation="7", newest=5)
UNSETTLED = Sent(AnswerLimits.of(WIRE, 50), generation="7", oldest=2, newest=5)  # an update is under way


def labelled(ids: list[int], *labels: str) -> GenerateOutput:
    """One token of each label, the last label for the rest."""
    spans = [VersionSpan(label, at, at + 1) for at, label in enumerate(labels)]
    spans[-1] = VersionSpan(labels[-1], len(labels) - 1, len(ids))
    entries = [(-0.5, token, None) for token in ids]
    meta = MetaInfo(
        id="r", finish_reason=FinishReason("stop"), weight_versions=spans, output_token_logprobs=list(entries)
    )
    return GenerateOutput(meta_info=meta, output_ids=ids)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (labelled([4, 5], "6.9"), "weights '6.9' are of another run; those of this run are called 7.N"),
        (labelled([4, 5], "7.2"), "weights '7.2' are older than 7.3, which the engine had at the request"),
        (labelled([4, 5], "7.3", "7.1"), "weights '7.1' are older than 7.3"),
        (labelled([4, 5], "7.6"), "weights '7.6' are newer than any that were published (up to 5)"),
        (labelled([4, 5], "7.99999999999999"), "is not of the form generation.version"),
        (labelled([4, 5], "7.²"), "is not of the form generation.version"),
        (labelled([4, 5, 6], "7.3"), "has 3 new tokens, and 2 were allowed"),
        (labelled([4, 50], "7.3"), "holds token 50, outside the vocabulary of 50"),
    ],
)
def test_a_member_whose_answer_cannot_be_true_fails_and_keeps_nothing_of_it(output: GenerateOutput, words: str) -> None:
    result = extended(REQUEST, SampleResult(), output, 1.0, SENT)
    assert (result.finish, result.token_ids, result.log_probs, result.runs) == ("failed", (), (), ())
    assert words in str(result.error)
    kept = with_saved(REQUEST, SampleResult(), output, 1.0, SENT, lost=True)
    assert (kept.finish, kept.token_ids) == ("failed", ())
    good = extended(REQUEST, SampleResult(), labelled([4, 5], "7.3", "7.4"), 1.0, SENT)
    assert (good.finish, good.token_ids) == ("stop", (4, 5))


@pytest.mark.parametrize(
    ("label", "words"), [("7.1", "older than version 2, which it had at the request"), ("7.6", "newer than any")]
)
def test_during_an_update_versions_have_bounds_too(label: str, words: str) -> None:
    result = extended(REQUEST, SampleResult(), labelled([4, 5], label), 1.0, UNSETTLED)
    assert (result.finish, result.token_ids) == ("failed", ())
    assert words in str(result.error)
    for good in ("7.2", "7.3", "7.5"):
        assert extended(REQUEST, SampleResult(), labelled([4, 5], good), 1.0, UNSETTLED).finish == "stop"


async def test_an_engine_whose_answers_are_all_refused_is_reported_to_the_supervisor(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        await core_of(world.engines[0]).relabel("6.0")
        for group in range(REFUSED_LIMIT):
            assert read_value(world.rig.topic, "complaint/engine-0", Complaint) is None
            await world.ask(make_group(group, 2))
            samples = await world.whole(2)
            assert [sample.status for sample in samples] == ["failed", "failed"]
            assert "are of another run" in (samples[0].error or "")
        await until(lambda: read_value(world.rig.topic, "complaint/engine-0", Complaint) is not None)
        complaint = read_value(world.rig.topic, "complaint/engine-0", Complaint)
        assert complaint is not None
        assert complaint.incarnation == 0
        assert complaint.reason.startswith(f"{REFUSED_LIMIT} answers in a row were refused: weights '6.0'")
        assert world.extra("refused_answers") == REFUSED_LIMIT
        world.weights.publish(1)
        await world.weights.landed(1)
        await world.ask(make_group(99, 2))
        assert [sample.status for sample in await world.whole(2)] == ["completed", "completed"], "the run goes on"


async def test_an_engine_whose_answer_was_refused_is_asked_last_until_it_makes_sense() -> None:
    async with EngineClient("http://127.0.0.1:9") as client:
        target = Target("engine-0", 3, client, Slots(8), EngineEntry("engine-0", "http://127.0.0.1:9", 3))
        other = Target("engine-1", 0, client, Slots(8), EngineEntry("engine-1", "http://127.0.0.1:9", 0))
        routes, need = Routes.__new__(Routes), RouteRequest("k", b"p", 1)
        assert _misgiving(target, need) == _misgiving(other, need)
        complaints = [routes.answered(target, ValueError("nonsense")) for _ in range(2 * REFUSED_LIMIT)]
        assert [at for at, complaint in enumerate(complaints, 1) if complaint] == [REFUSED_LIMIT, 2 * REFUSED_LIMIT]
        assert _misgiving(target, need) > _misgiving(other, need)
        assert routes.answered(target, None) is None
        assert target.refused_in_a_row == 0


async def test_a_group_from_the_future_is_never_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer alone knows for certain which weights there are."""
    async with training(tmp_path, monkeypatch, batch=1, total=1) as one:
        await one.send(make_slice(1, make_sample(0, runs=[(0, 2), (1, 1)]), make_sample(1)))
        refused = await one.report(Settled)
        assert (refused.group_id, refused.outcome) == (1, "failed")
        assert "a token has version 1, but the newest weights are version 0" in refused.detail
        await one.send(make_slice(2))
