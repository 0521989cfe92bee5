"""Engines that answer what cannot be true: the samples fail with the reason, and the supervisor is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.engines.answers import AnswerLimits
from models.engines.client import EngineClient
from models.engines.protocol import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    MetaInfo,
    SamplingParams,
    VersionSpan,
)
from stages.messages import Settled
from stages.ports import read_value
from stages.sampling.engine_choice import Slots
from stages.sampling.engine_directory import Target
from stages.sampling.requests import SampleRequest, SampleResult, Sent, extended, with_saved
from stages.sampling.routes import REFUSED_LIMIT, RouteRequest, Routes, _misgiving
from stages.topic_values import Complaint, EngineEntry
from tests.stages.engine_rig import core_of, generating
from tests.stages.stage_rig import make_group, make_sample, make_slice, until
from tests.stages.train_rig import training

ASKED = SampleRequest(SamplingParams(max_new_tokens=2), [1, 2])
WIRE = GenerateRequest(input_ids=[1, 2], sampling_params=SamplingParams(max_new_tokens=2), return_logprob=True)
SENT = Sent(AnswerLimits.of(WIRE, 50), met="7.3", generation="7", newest=5)
UNSETTLED = Sent(AnswerLimits.of(WIRE, 50), generation="7", oldest=2, newest=5)  # an update is under way


def answer(ids: list[int], *labels: str) -> GenerateOutput:
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
        (answer([4, 5], "6.9"), "weights '6.9' are of another run; those of this run are called 7.N"),
        (answer([4, 5], "7.2"), "weights '7.2' are older than 7.3, which the engine had when asked"),
        (answer([4, 5], "7.3", "7.1"), "weights '7.1' are older than 7.3"),
        (answer([4, 5], "7.6"), "weights '7.6' are newer than any that were published (up to 5)"),
        (answer([4, 5], "7.99999999999999"), "is not of the form generation.version"),
        (answer([4, 5], "7.²"), "is not of the form generation.version"),
        (answer([4, 5, 6], "7.3"), "has 3 new tokens, and 2 were allowed"),
        (answer([4, 50], "7.3"), "holds token 50, outside the vocabulary of 50"),
    ],
)
def test_a_member_whose_answer_cannot_be_true_fails_and_keeps_nothing_of_it(output: GenerateOutput, words: str) -> None:
    result = extended(ASKED, SampleResult(), output, 1.0, SENT)
    assert (result.finish, result.token_ids, result.log_probs, result.runs) == ("failed", (), (), ())
    assert words in str(result.error)
    kept = with_saved(ASKED, SampleResult(), output, 1.0, SENT, lost=True)
    assert (kept.finish, kept.token_ids) == ("failed", ())
    good = extended(ASKED, SampleResult(), answer([4, 5], "7.3", "7.4"), 1.0, SENT)
    assert (good.finish, good.token_ids) == ("stop", (4, 5))


@pytest.mark.parametrize(
    ("label", "words"), [("7.1", "older than version 2, which it had when asked"), ("7.6", "newer than any")]
)
def test_during_an_update_versions_have_bounds_too(label: str, words: str) -> None:
    result = extended(ASKED, SampleResult(), answer([4, 5], label), 1.0, UNSETTLED)
    assert (result.finish, result.token_ids) == ("failed", ())
    assert words in str(result.error)
    for good in ("7.2", "7.3", "7.5"):
        assert extended(ASKED, SampleResult(), answer([4, 5], good), 1.0, UNSETTLED).finish == "stop"


async def test_an_engine_whose_answers_are_all_refused_is_reported_to_the_supervisor(tmp_path: Path) -> None:
    async with generating(tmp_path) as world:
        await world.ready()
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
