"""The generate stage against real engine servers: whose tokens, which version, and nothing lost on the way."""

from __future__ import annotations

import asyncio
import base64
import functools
from pathlib import Path

import msgspec
import numpy as np
import pytest

from models.engines.answers import AnswerLimits
from models.engines.client import EngineClient
from models.engines.protocol import FinishReason, GenerateOutput, GenerateRequest, MetaInfo, SamplingParams, VersionSpan
from models.engines.simulated.responses import simulated_log_prob
from models.errors import EngineProtocolError
from stages.messages import VersionRun
from stages.rollouts import new_sample, oldest_version
from stages.sampling.engine_choice import Slots
from stages.sampling.engine_directory import Target
from stages.sampling.requests import UNCHECKED, SampleRequest, SampleResult, Sent, extended, with_saved
from stages.sampling.rollout_requests import append_result
from stages.sampling.routes import REFUSED_LIMIT, RouteRequest, Routes, _misgiving
from stages.topic_values import EngineEntry, length_place
from stages.train.batch_metrics import batch_metrics
from tests.stages.engine_rig import LENGTH, SLOW_MS, Log, core_of, freeze, generating, simulated, started, written
from tests.stages.stage_rig import idle, make_config, make_group, make_sample, make_slice, response_ids, until
from transport import StreamSpec


async def test_no_request_goes_before_weights_are_named(tmp_path: Path, log: Log) -> None:
    async with generating(tmp_path) as world:
        await world.ask(make_group(0))
        await idle()
        assert log == []
        world.weights.publish(4)
        assert (await world.answer()).samples[0].model_versions == (4,)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_an_update_during_generation_loses_no_token_and_names_each_ones_version(
    mode: str, tmp_path: Path, log: Log
) -> None:
    async with started(tmp_path, engine=simulated(SLOW_MS), pause_mode=mode) as world:
        await world.ask(make_group(0, 3, prompt=[9, 8]))
        await freeze(world.engines[0], tokens=9)
        made = core_of(world.engines[0]).totals().generation_tokens // 3
        world.weights.publish(1)
        slice_ = await world.answer()
        await until(lambda: world.extra(f"length/{length_place(LENGTH)}") == 3)
        recomputed = world.extra("recomputed_tokens")
    first, *again = log
    cached = sum(one.outputs[0].meta_info.cached_tokens or 0 for one in again)
    assert recomputed == (3 * (2 + made) - cached if mode == "abort" else 0), "prompt and response, but for the cache"
    assert first.params.n == 3
    assert len(again) == (3 if mode == "abort" else 0)
    for sample in slice_.samples:
        assert sample.version_runs[1:] == (VersionRun(0, made), VersionRun(1, LENGTH - made))
        assert sample.status == "completed"
        assert sample.resumed == (1 if mode == "abort" else 0)
        assert sample.retractions == (1 if mode == "retract" else 0)
        drawn_alike = simulated_log_prob(simulated().simulated.vocab_size)
        assert np.allclose(sample.log_probs[sample.prompt_length :], drawn_alike)
        if mode == "abort":
            kept = first.outputs[sample.index].output_ids
            [rest] = [e for e in again if e.request.prompts[0] == [9, 8, *kept]]
            assert len(kept) == made
            assert rest.params.max_new_tokens == (first.params.max_new_tokens or 0) - made
            assert response_ids(sample) == written([first, rest], [sample.index, 0], sample)
        else:
            assert response_ids(sample) == written([first], [sample.index], sample)


async def test_without_partial_rollout_an_aborted_response_starts_again(tmp_path: Path, log: Log) -> None:
    async with started(
        tmp_path, engine=simulated(SLOW_MS), pause_mode="abort", rollout={"partial_rollout": False}
    ) as world:
        await world.ask(make_group(0, 2))
        await freeze(world.engines[0], tokens=6)
        world.weights.publish(1)
        samples = (await world.answer()).samples
    assert [s.status for s in samples] == ["completed", "completed"]
    assert [s.model_versions for s in samples] == [(1,), (1,)], "nothing of the old weights is kept"
    assert [s.resumed for s in samples] == [1, 1]
    assert len(log) == 3


@pytest.mark.parametrize(
    ("purpose", "max_context", "tokens"), [("train", 1000, 16), ("train", 12, 4), ("train", 8, 0), ("eval", 1000, 6)]
)
async def test_budgets_cut_responses(purpose: str, max_context: int, tokens: int, tmp_path: Path, log: Log) -> None:
    async with started(
        tmp_path,
        options={"max_context": max_context},
        rollout={"rollout_max_response_len": 16},
        eval={"eval_max_response_len": 6, "eval_temperature": 0.0},
    ) as world:
        samples = await world.rollouts(make_group(0, 2, prompt=range(8), purpose=purpose))
    assert [(s.status, s.response_length, s.fault()) for s in samples] == [("truncated", tokens, None)] * 2
    assert [e.params.temperature for e in log] == [0.0 if purpose == "eval" else 1.0] * (tokens > 0)


async def test_a_stage_that_is_killed_gives_its_prompts_back_and_aborts_its_requests(tmp_path: Path) -> None:
    async with started(tmp_path, engine=simulated(SLOW_MS)) as world:
        await world.ask(make_group(0, 2))
        core = core_of(world.engines[0])
        await until(lambda: core.schedule.running == 2)
        world.task.cancel()
        await asyncio.wait([world.task])
        await until(lambda: core.schedule.running == 0)
        world.rig.hubs["generate"].peer_lost("stage-0")
        await idle()
        stats = world.rig.hubs["generate"].stats()
        assert (stats.settled, stats.queued + stats.leased) == (0, 1)
        assert world.rig.hubs["reward"].stats().accepted == 0


ASKED = SampleRequest(SamplingParams(), [1])
NEW = SampleResult()


def test_version_runs_are_the_engines_spans_and_neighbours_are_joined() -> None:
    first = extended(ASKED, NEW, engine_answer([0, 1, 2, 3], *["0.3"] * 3, "0.4", reason="abort"), 1.0)
    sample = append_result(new_sample([4, 5], 0), first)
    assert sample.version_runs[1:] == (VersionRun(3, 3), VersionRun(4, 1))
    assert (sample.status, oldest_version([sample])) == ("aborted", 3)
    again = engine_answer([0, 1, 2, 3], "0.4", "0.4", "0.6", reason="length")
    one_turn = append_result(new_sample([4, 5], 0), extended(ASKED, first, again, 0.5))
    two_turns = append_result(sample, extended(ASKED, NEW, again, 0.5))
    for sample in (one_turn, two_turns):
        assert sample.version_runs[1:] == (VersionRun(3, 3), VersionRun(4, 3), VersionRun(6, 2))
        assert (sample.status, sample.length, sample.response_length, sample.generate_s) == ("truncated", 10, 8, 1.5)
        assert sample.fault() is None


@pytest.mark.parametrize(("reason", "words"), [("weird", "engine finished with weird"), (None, "no reason")])
def test_an_unknown_end_fails_the_sample(reason: str | None, words: str) -> None:
    sample = append_result(new_sample([4, 5], 0), extended(ASKED, NEW, engine_answer([0], reason=reason), 1.0))
    assert sample.status == "failed"
    assert words in (sample.error or "")


async def test_what_is_above_the_limit_of_a_message_fails_in_words_and_the_replica_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.stages.stage_rig.StreamSpec", functools.partial(StreamSpec, max_message_bytes=2_000))
    async with started(tmp_path) as world:
        large = await world.rollouts(make_group(0, 8))
        small = await world.rollouts(make_group(1, 1))
        await world.rig.hubs["generate"].wait_empty()
        stats = world.rig.hubs["generate"].stats()
    assert {(s.status, s.length) for s in large} == {("failed", 0)}
    assert all("max_message_bytes of stream 'reward' is 2000" in (s.error or "") for s in large)
    assert [s.status for s in small] == ["completed"]
    assert (stats.settled, stats.redelivered, world.rig.letters) == (2, 0, [])


# Answers of engines: how pieces become one result, and which answers are refused.


def experts(rows: range) -> str:
    """Two layers of top-2, told apart by their row."""
    return base64.b64encode(np.array([[[r, r], [r, r]] for r in rows], dtype="<i4").tobytes()).decode()


def engine_answer(ids: list[int], *labels: str, reason: str | None = "stop", **meta: object) -> GenerateOutput:
    """One token of each label, the last label for the rest."""
    spans = [VersionSpan(label, at, at + 1) for at, label in enumerate(labels or ("0.1",))]
    spans[-1] = msgspec.structs.replace(spans[-1], end=len(ids))
    values: dict[str, object] = {
        "id": "r",
        "finish_reason": FinishReason(reason) if reason else None,
        "weight_versions": spans,
        "output_token_logprobs": [(-0.5, token, None) for token in ids],
        **meta,
    }
    return GenerateOutput(text="x" * len(ids), output_ids=ids, meta_info=msgspec.convert(values, MetaInfo))


@pytest.mark.parametrize("turns", [1, 2])
def test_experts_of_a_continued_rollout_are_those_that_made_its_tokens(turns: int) -> None:
    """Each answer tells the choices from the prompt on; of a repeated token the first choice counts."""
    prompt, first, second = 3, [1, 2], [3, 4]
    result = extended(ASKED, NEW, engine_answer(first, reason="abort", routed_experts=experts(range(prompt + 1))), 1.0)
    again = engine_answer(second, routed_experts=experts(range(100, 100 + prompt + len(first) + len(second) - 1)))
    if turns == 1:
        sample = append_result(new_sample([], 0), extended(ASKED, result, again, 1.0))
    else:
        sample = append_result(append_result(new_sample([], 0), result), extended(ASKED, NEW, again, 1.0))
    rows = sample.extras["routed_experts"].reshape(-1, 2, 2)[:, 0, 0]
    assert rows.tolist() == [0, 1, 2, 3, 104, 105]
    assert sample.extras["routed_experts"].dtype == np.int32
    assert append_result(new_sample([], 0), extended(ASKED, NEW, engine_answer(first), 1.0)).extras == {}


@pytest.mark.parametrize(("sent", "words"), [("%%", "is not base64"), ("AAAAAAA=", "has 5 bytes, which are no int32")])
def test_experts_that_are_no_base64_of_numbers_are_reported(sent: str, words: str) -> None:
    result = extended(ASKED, NEW, engine_answer([1], routed_experts=sent), 1.0)
    assert isinstance(result.error, EngineProtocolError)
    assert f"routed_experts {words}" in str(result.error)
    assert (result.finish, result.token_ids) == ("failed", ())


def test_what_a_lost_engine_left_is_an_aborted_response() -> None:
    begun = engine_answer([1, 2, 3], reason=None)
    result = with_saved(ASKED, NEW, begun, 2.0, UNCHECKED, lost=True)
    assert (result.finish, result.reused_tokens, result.spent_s) == ("aborted", 3, 2.0)
    assert result.runs == (VersionRun(1, 3),)
    assert with_saved(ASKED, NEW, begun, 2.0, UNCHECKED, lost=False).reused_tokens == 0, "it was given back"
    result = with_saved(ASKED, result, None, 1.0, UNCHECKED, lost=True)
    assert (result.finish, result.reused_tokens, result.spent_s) == ("aborted", 3, 3.0)
    result = extended(ASKED, result, engine_answer([4], "0.2"), 1.0)
    assert (result.finish, result.reused_tokens) == ("stop", 3), "a finished one is no partial output"
    sample = append_result(new_sample([], 0), result)
    assert response_ids(sample) == [1, 2, 3, 4]
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


REQUEST = SampleRequest(SamplingParams(max_new_tokens=2), [1, 2])
WIRE = GenerateRequest(input_ids=[1, 2], sampling_params=SamplingParams(max_new_tokens=2), return_logprob=True)
SENT = Sent(AnswerLimits.of(WIRE, 50), met="7.3", generation="7", newest=5)
NO_VERSIONS = ["default", "3", "", "1.x", "1.", "1.-2", "1.1234567890", "7.99999999999999", "7.²"]
UNSETTLED = Sent(AnswerLimits.of(WIRE, 50), generation="7", oldest=2, newest=5)  # an update is under way


@pytest.mark.parametrize(
    ("sent", "ids", "labels", "words"),
    [
        (SENT, [4, 5], ["6.9"], "weights '6.9' are of another run; this run's are called 7.N"),
        (SENT, [4, 5], ["7.2"], "weights '7.2' are older than 7.3, which the engine had at the request"),
        (SENT, [4, 5], ["7.3", "7.1"], "weights '7.1' are older than 7.3"),
        (SENT, [4, 5], ["7.6"], "weights '7.6' are newer than any that were published (up to 5)"),
        *((SENT, [4, 5], [label], "is not of the form generation.version") for label in NO_VERSIONS),
        (SENT, [4, 5, 6], ["7.3"], "has 3 new tokens, and 2 were allowed"),
        (SENT, [4, 50], ["7.3"], "holds token 50, outside the vocabulary of 50"),
        (UNSETTLED, [4, 5], ["7.1"], "older than 2, which it had at the request"),
        (UNSETTLED, [4, 5], ["7.6"], "newer than any"),
    ],
)
def test_a_member_whose_answer_cannot_be_true_fails_and_keeps_nothing_of_it(
    sent: Sent, ids: list[int], labels: list[str], words: str
) -> None:
    output = engine_answer(ids, *labels)
    result = extended(REQUEST, NEW, output, 1.0, sent)
    assert (result.finish, result.token_ids, result.log_probs, result.runs) == ("failed", (), (), ())
    assert words in str(result.error)
    kept = with_saved(REQUEST, NEW, output, 1.0, sent, lost=True)
    assert (kept.finish, kept.token_ids) == ("failed", ())
    good = extended(REQUEST, NEW, engine_answer([4, 5], "7.2" if sent is UNSETTLED else "7.3", "7.5"), 1.0, sent)
    assert (good.finish, good.token_ids) == ("stop", (4, 5))


async def test_an_engine_whose_answers_are_all_refused_is_reported_to_the_supervisor(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        await core_of(world.engines[0]).relabel("6.0")
        for group in range(REFUSED_LIMIT):
            assert world.rig.topic.get("complaint/engine-0") is None
            samples = await world.rollouts(make_group(group, 2))
            assert [sample.status for sample in samples] == ["failed", "failed"]
            assert "are of another run" in (samples[0].error or "")
        complaint = await world.rig.complaint()
        assert complaint.incarnation == 0
        assert complaint.reason.startswith(f"{REFUSED_LIMIT} answers in a row were refused: weights '6.0'")
        assert world.extra("refused_answers") == REFUSED_LIMIT
        world.weights.publish(1)
        await world.weights.landed(1)
        samples = await world.rollouts(make_group(99, 2))
        assert [sample.status for sample in samples] == ["completed", "completed"], "the run goes on"


async def test_an_engine_whose_answer_was_refused_is_queried_last_until_it_makes_sense() -> None:
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
