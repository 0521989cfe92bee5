"""Engines that are lost in the middle of a response: what has arrived is kept, once, and the rest made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.engines.client import EngineClient
from models.engines.noise import sample_seed
from models.engines.protocol import GenerateOutput
from models.errors import EngineTimeout
from stages.messages import Sample, VersionRun
from stages.ports import read_value
from stages.topic_values import SLOW as SLOW_KEY
from stages.topic_values import Complaint
from tests.stages.engine_rig import (
    FAST_MS,
    LENGTH,
    SLOW_MS,
    Exchange,
    Log,
    World,
    core_of,
    freeze,
    sent_to,
    simulated,
    started,
    written,
)
from tests.stages.stage_rig import idle, make_group, response_ids, until

PROMPT = [1, 2, 3]
SLOW: dict[str, Any] = {"streamed": True, "proxied": True, "engine": simulated(SLOW_MS)}


async def in_mid_generation(world: World, log: Log, n: int, *, engine: int = 0) -> Exchange:
    """A request for `n` samples whose engine stands still, after all that it made has arrived. Others are fast."""
    for index, server in enumerate(world.engines):
        if index != engine:
            core_of(server).schedule.config = simulated(FAST_MS).simulated
    await world.ask(make_group(0, n, prompt=PROMPT))
    core = core_of(world.engines[engine])
    await freeze(world.engines[engine], tokens=3 * n)
    first = log[0]
    assert first.partial is not None
    await until(lambda: first.partial.tokens == core.totals().generated_tokens)  # type: ignore[union-attr]
    return first


def check_continued(sample: Sample, first: Exchange, rest: list[Exchange]) -> None:
    """The sample is what the lost engine sent, and then what another made of it; no token twice, none left out."""
    kept = first.outputs[sample.index].output_ids
    [second] = [e for e in rest if e.request.prompts[0] == [*PROMPT, *kept]]
    assert len(kept) >= 3
    assert second.params.sampling_seed == sample_seed(first.params.sampling_seed or 0, sample.index), "its own noise"
    assert (second.params.n, second.params.max_new_tokens) == (1, (first.params.max_new_tokens or 0) - len(kept))
    assert response_ids(sample) == written([first, second], [sample.index, 0], sample)
    assert (sample.status, sample.reused_tokens, sample.resumed) == ("completed", len(kept), 1)
    assert sample.fault() is None


@pytest.mark.parametrize("fault", ["killed", "hung", "error in the stream"])
async def test_a_lost_engines_partial_output_is_continued_by_another(fault: str, tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, engines=2, **SLOW) as world:
        first = await in_mid_generation(world, log, 3)
        if fault == "killed":
            world.proxies[0].kill()
        elif fault == "hung":
            world.proxies[0].stall()
            await idle()
            assert len(log) == 1
            world.lose(0)
        else:
            world.proxies[0].break_with({"error": {"message": "the scheduler died", "code": 500}})
        samples = await world.whole(3)
        await world.rig.hubs["generate"].wait_empty()
        assert world.extra("reused_tokens") == sum(s.reused_tokens for s in samples) > 0
        assert world.extra("engine_retries") == 1
    assert [s.index for s in samples] == [0, 1, 2]
    rest = [e for e in log if e.url == world.proxies[1].url]
    assert len(rest) == 3
    for sample in samples:
        check_continued(sample, first, rest)
    assert len({e.request.rid for e in log}) == len(log), "no request id is used twice"
    assert len({len(e.request.rid or "") for e in log}) == 1, "so that none is the beginning of another"


async def test_members_that_had_finished_are_kept_whole(tmp_path: Path, log: Log) -> None:
    uneven = msgspec.structs.replace(simulated(SLOW_MS).simulated, length_sigma=1.0)
    engine = msgspec.structs.replace(simulated(SLOW_MS), simulated=uneven)
    async with started(tmp_path, engines=2, streamed=True, proxied=True, engine=engine) as world:
        core = core_of(world.engines[0])
        await world.ask(make_group(0, 6, prompt=PROMPT))
        await until(lambda: core.schedule.running == 6)
        await until(lambda: core.load().num_running_reqs < 6)
        await core.pause("in_place")
        ended = 6 - core.schedule.running
        assert 0 < ended < 6
        partial = log[0].partial
        assert partial is not None
        await until(lambda: [finished(output) for output in partial.certain()].count(True) == ended)
        await until(lambda: partial.tokens == core.totals().generated_tokens)
        core_of(world.engines[1]).schedule.config = simulated(FAST_MS).simulated
        world.proxies[0].kill()
        samples = await world.whole(6)
    first, *rest = log
    assert len(rest) == 6 - ended
    whole = [s for s in samples if finished(first.outputs[s.index])]
    assert len(whole) == ended
    for sample in whole:
        assert response_ids(sample) == first.outputs[sample.index].output_ids
        assert (sample.status, sample.resumed, sample.reused_tokens) == ("completed", 0, 0)
    for sample in (s for s in samples if s not in whole):
        kept = first.outputs[sample.index].output_ids
        assert response_ids(sample)[: len(kept)] == kept
        assert (sample.status, sample.resumed, sample.reused_tokens) == ("completed", 1, len(kept))


def finished(output: GenerateOutput | None) -> bool:
    return output is not None and output.meta_info.finish_reason is not None


async def test_without_partial_rollout_a_lost_turn_starts_again(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, engines=2, rollout={"partial_rollout": False}, **SLOW) as world:
        await in_mid_generation(world, log, 2)
        world.proxies[0].kill()
        samples = await world.whole(2)
        assert world.extra("reused_tokens") == 0
    assert {tuple(e.request.prompts[0]) for e in log} == {tuple(PROMPT)}
    assert log[1].params.n == 2, "nothing has come of the first request, so it is sent again as it was"
    for sample in samples:
        assert (sample.status, sample.response_length, sample.reused_tokens) == ("completed", LENGTH, 0)
        assert response_ids(sample) == written([log[1]], [sample.index], sample)


async def test_what_is_not_streamed_is_lost_and_asked_again_together(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, engines=2, health={"stream_interval": 0}, **SLOW) as world:
        core_of(world.engines[1]).schedule.config = simulated(FAST_MS).simulated
        await world.ask(make_group(0, 3))
        await freeze(world.engines[0], tokens=9)
        world.proxies[0].kill()
        samples = (await world.answer()).samples
    assert [e.params.n for e in log] == [3, 3]
    assert {e.partial for e in log} == {None}
    assert [(s.status, s.response_length, s.reused_tokens) for s in samples] == [("completed", LENGTH, 0)] * 3


async def test_an_engine_that_is_lost_twice_in_one_response_leaves_three_pieces(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, **SLOW) as world:
        core = core_of(world.engines[0])
        await in_mid_generation(world, log, 1)
        core.schedule.config = simulated(SLOW_MS).simulated
        world.proxies[0].cut()
        await until(lambda: core.schedule.running + core.schedule.waiting == 0)
        await core.resume()
        made = core.totals().generated_tokens
        await until(lambda: len(log) == 2)
        await freeze(world.engines[0], tokens=made + 3)
        second = log[1]
        assert second.partial is not None
        await until(lambda: second.partial.tokens == core.totals().generated_tokens - made)  # type: ignore[union-attr]
        world.proxies[0].cut()
        await until(lambda: core.schedule.running + core.schedule.waiting == 0)
        await core.resume()
        (sample,) = (await world.answer()).samples
    assert len(log) == 3
    assert (sample.status, sample.response_length, sample.resumed) == ("completed", LENGTH, 2)
    assert sample.reused_tokens == sum(len(e.outputs[0].output_ids) for e in log[:2])
    assert sample.version_runs[1:] == (VersionRun(0, LENGTH),)
    assert response_ids(sample) == written(log, [0, 0, 0], sample)


async def test_retries_of_a_turn_are_bounded_and_the_sample_fails_in_words(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.sampling.partial_rollouts.FIRST_PAUSE_S", 0.0)
    async with started(tmp_path, rollout={"max_retries": 2}, **SLOW) as world:
        world.proxies[0].answer_generate_with(503)
        await world.ask(make_group(0, 2))
        samples = (await world.answer()).samples
        assert world.stage.activity.failures == 2
    assert len(log) == 3
    for sample in samples:
        assert sample.status == "failed"
        assert "answered 503: out of order" in (sample.error or "")


async def test_a_token_that_would_end_a_server_is_never_sent(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, options={"vocab_size": 300}, **SLOW) as world:
        core = core_of(world.engines[0])
        await world.ask(make_group(0, 2, prompt=[1, 300]))
        samples = (await world.answer()).samples
        assert (core.schedule.running, core.schedule.totals.steps) == (0, 0)
    assert len(log) == 1, "and once refused, it is not tried elsewhere"
    for sample in samples:
        assert "input_ids contains 300, outside the vocabulary of 300 tokens" in (sample.error or "")


async def test_a_refusal_is_not_sent_again(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, **SLOW) as world:
        await world.ask(make_group(0, 2, prompt=[1, VOCABULARY_END]))
        samples = (await world.answer()).samples
    assert len(log) == 1
    assert ["outside the vocabulary" in (s.error or "") for s in samples] == [True, True]


VOCABULARY_END = 1 << 20


async def test_a_lost_request_waits_for_the_engine_to_come_back_and_wastes_no_retry(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, rollout={"max_retries": 1}, **SLOW) as world:
        first = await in_mid_generation(world, log, 2)
        world.proxies[0].kill()  # nobody has noticed yet: its link is ready still
        await until(lambda: world.extra("engine_retries") == 1)
        await idle()
        assert len(log) == 1, "an engine that does not answer is asked nothing"
        world.lose(0)
        await until(lambda: not world.serving())
        again = await world.start_engine(0, incarnation=1)
        core_of(again).schedule.config = simulated(FAST_MS).simulated
        samples = (await world.answer()).samples
    for sample in samples:
        check_continued(sample, first, log[1:])


async def test_a_replica_that_is_started_anew_repeats_no_request_id(tmp_path: Path, log: Log) -> None:
    """SGLang aborts the id of a stream again after its end, and would so end a request that has the id next."""
    for life in range(2):
        (tmp_path / str(life)).mkdir()
        async with started(tmp_path / str(life), streamed=True) as world:
            await world.ask(make_group(0, 1))
            await world.answer()
    assert len({e.request.rid for e in log}) == 2


async def test_many_lost_requests_look_at_an_engines_health_together(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    original = EngineClient.health

    async def health(client: EngineClient) -> bool:
        looks.append(client.base_url)
        return await original(client)

    monkeypatch.setattr(EngineClient, "health", health)
    async with started(tmp_path, engines=2, **SLOW) as world:
        for group_id in range(10):
            await world.ask(make_group(group_id, 4))
        await until(lambda: len(log) == 10)
        world.proxies[0].kill()
        for _ in range(10):
            assert {s.status for s in (await world.answer()).samples} == {"completed"}
    assert len(looks) <= 12, "of 20 requests that were lost"


async def test_a_request_that_takes_too_long_goes_on_from_what_it_has(tmp_path: Path, log: Log) -> None:
    """And does so more often than --max-retries allows, for each time it has got on."""
    async with started(
        tmp_path,
        streamed=True,
        engine=simulated(25.0, length=1000),
        rollout={"request_timeout_secs": 0.4, "max_retries": 1, "rollout_max_response_len": LENGTH},
    ) as world:
        await world.ask(make_group(0, 1))
        (sample,) = (await world.answer()).samples
    assert len(log) >= 3, "40 tokens of 25 ms do not fit into two times 400 ms"
    assert all(isinstance(e.error, EngineTimeout) for e in log[:-1])
    assert (sample.status, sample.response_length) == ("truncated", LENGTH)
    assert response_ids(sample) == written(log, [0] * len(log), sample)
    assert sample.reused_tokens == LENGTH - len(log[-1].outputs[0].output_ids)


async def test_an_answer_at_a_crawl_ends_by_the_bound_and_its_engine_is_named(tmp_path: Path, log: Log) -> None:
    bounds = {"request_timeout_secs": 0.4, "max_retries": 1, "min_tokens_per_sec": 1000.0}
    crawling = simulated(100.0, length=1000)
    async with started(tmp_path, streamed=True, engine=crawling, rollout={**bounds}) as world:
        await world.ask(make_group(0, 1))
        (sample,) = (await world.answer()).samples
        await until(lambda: read_value(world.rig.topic, f"{SLOW_KEY}engine-0", Complaint) is not None)
        slow = read_value(world.rig.topic, f"{SLOW_KEY}engine-0", Complaint)
    assert len(log) == 2, "the request and one retry, whatever tokens have come"
    assert sample.status == "failed"
    assert "gave no answer within timeout_s=0.4" in (sample.error or "")
    assert slow is not None
    assert slow.reason.endswith("new tokens came of a request in --request-timeout-secs 0.4")


async def test_an_update_before_the_loss_leaves_both_versions_named(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, engines=2, **SLOW) as world:
        first = await in_mid_generation(world, log, 1)
        core = core_of(world.engines[0])
        core.schedule.config = simulated(SLOW_MS).simulated
        world.weights.publish(1)
        await world.weights.landed(1, engine=1)
        made = core.totals().generated_tokens
        await freeze(world.engines[0], tokens=made + 2)
        await until(lambda: first.partial.tokens == core.totals().generated_tokens)  # type: ignore[union-attr]
        world.proxies[0].kill()
        (sample,) = (await world.answer()).samples
    assert sample.model_versions == (0, 1)
    assert response_ids(sample) == written(log, [0, 0], sample)
    assert list(sent_to(log, world.engines[1])) == []
    assert sample.reused_tokens == len(first.outputs[0].output_ids) > made - 1
