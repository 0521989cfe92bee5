"""The generate stage on a real SGLang server: what is saved of a broken stream, and what a deadline leaves, is exact.

Two engines of the run are one server behind two proxies, so that one can be lost while the other goes on.

Token identity on a real SGLang server: conversations over an update and the loss of the connection to an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from models.engines.client import EngineClient
from models.engines.protocol import SamplingParams
from stages.messages import Sample
from stages.sampling.requests import SampleRequest, SampleResult
from stages.sampling.rollout_requests import Requests
from tests.identity import check_identity, check_once, of_exchanges
from tests.models.engines.forward_reference import by_one
from tests.sglang_server import ON_SGLANG, RealServer
from tests.stages.agents.test_token_identity import ask, talking
from tests.stages.engine_rig import Exchange, Log, World, generating, tensors_of
from tests.stages.faults import FaultProxy
from tests.stages.stage_rig import make_group, response_ids, until

pytestmark = ON_SGLANG

PROMPT = [72, 101, 108, 108, 111]
LONG = 400  # tokens of every response: more than arrive before the fault
MOST = 1000  # as much as the context holds
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def of_one_length(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No response ends by itself. Returns what decides in its place otherwise."""
    original = Requests.params

    def params(self: Requests, *args: Any) -> SamplingParams:
        return msgspec.structs.replace(original(self, *args), ignore_eos=True)

    monkeypatch.setattr(Requests, "params", params)
    return original


ONE_SERVER = {"update_weight_rolling": 1}  # behind two proxies: two updates at once end it


@asynccontextmanager
async def on_sglang(
    tmp_path: Path, server: RealServer, *, bound: int | None = None, **rollout: Any
) -> AsyncIterator[World]:
    async with EngineClient(server.url) as client:
        await server.fresh(client)
    async with generating(
        tmp_path,
        engines=2,
        start=0,
        streamed=True,
        model=server.model,
        tensors=tensors_of([server.model, server.other]),
        pause_mode="retract",
        asynchrony={"max_staleness": bound},
        update=ONE_SERVER,
        rollout={"rollout_max_response_len": LONG, "rollout_stop_token_ids": (), **rollout},
    ) as world:
        world.weights.publish(0)
        for index in range(2):
            proxy = await world.stack.enter_async_context(FaultProxy(server.url))
            world.proxies.append(proxy)
            world.rig.engine_at(proxy.url, engine=index)
            await world.weights.landed(0, engine=index)
        yield world


def check_exact(sample: Sample, server: RealServer) -> None:
    """Every recorded log-prob is that of the weights that are named."""
    assert sample.fault() is None
    assert set(sample.model_versions) <= {0}
    expected = by_one(server.model, PROMPT, response_ids(sample)).numpy()
    assert np.abs(sample.log_probs[sample.prompt_length :] - expected).max() < TOLERANCE


async def running(log: Log, tokens: int) -> Exchange:
    """The first request, once so many tokens have arrived."""
    await until(lambda: bool(log) and log[0].partial is not None and log[0].partial.tokens >= tokens)
    return log[0]


@pytest.mark.parametrize("members", [1, 3])
async def test_a_response_that_no_later_batch_may_train_is_ended(
    members: int, sglang: RealServer, tmp_path: Path, log: Log
) -> None:
    """With the tokens that had arrived; the server works on nothing any more."""
    async with on_sglang(tmp_path, sglang, bound=0, rollout_max_response_len=MOST) as world:
        await world.ask(make_group(0, members, prompt=PROMPT))
        await running(log, 20 * members)
        world.weights.publish(1)
        samples = await world.whole(members)
        assert [(sample.status, sample.error) for sample in samples] == [("aborted", None)] * members
        assert len(log) == 1, "nothing is continued"
        for sample in samples:
            assert sample.fault() is None
            assert 0 < len(response_ids(sample)) < MOST
        async with EngineClient(sglang.url) as client:
            for index in range(2):
                await world.weights.landed(1, engine=index)
            for _ in range(100):
                if not sum(load.num_running_reqs for load in await client.loads()):
                    return
                await asyncio.sleep(0.1)
    pytest.fail("the server still works on them")


@pytest.mark.parametrize("fault", ["hung", "killed"])
async def test_a_lost_server_leaves_its_partial_output(
    fault: str, sglang: RealServer, tmp_path: Path, log: Log
) -> None:
    async with on_sglang(tmp_path, sglang) as world:
        await world.ask(make_group(0, 3, prompt=PROMPT))
        first = await running(log, 60)
        lost = next(index for index, proxy in enumerate(world.proxies) if proxy.url == first.url)
        if fault == "hung":
            world.proxies[lost].stall()
        else:
            world.proxies[lost].kill()
        world.lose(lost)
        samples = await world.whole(3)
        assert world.extra("reused_tokens") == sum(s.reused_tokens for s in samples)
    rest = log[1:]
    assert {e.url for e in rest} == {world.proxies[1 - lost].url}
    assert len(rest) == 3, [(e.request.rid, e.error, [len(o.output_ids) for o in e.outputs]) for e in log]
    for sample in samples:
        kept = first.outputs[sample.index].output_ids
        assert response_ids(sample)[: len(kept)] == kept != []
        assert (sample.status, sample.response_length, sample.reused_tokens) == ("truncated", LONG, len(kept))
        check_exact(sample, sglang)


async def test_tokens_are_reported_as_they_come_and_outlive_their_server(
    sglang: RealServer, tmp_path: Path, log: Log
) -> None:
    reported: list[int] = []
    result: SampleResult | None = None
    length = 900  # so many that the server is still at work when its proxy is killed, on a busy machine too
    params = SamplingParams(max_new_tokens=length, ignore_eos=True, stream_interval=4)
    request = SampleRequest(params, PROMPT)
    async with on_sglang(tmp_path, sglang) as world, world.stage.sampler.chunks(request) as members:
        async for _, item in members:
            if isinstance(item, SampleResult):
                result = item
                continue
            reported += item.token_ids
            if len(reported) >= 40 and len(log) == 1:
                lost = next(index for index, proxy in enumerate(world.proxies) if proxy.url == log[0].url)
                world.proxies[lost].kill()
                world.lose(lost)
    assert (len(result.token_ids), result.resumed) == (length, 1)
    assert reported == list(result.token_ids)
    assert np.abs(by_one(sglang.model, PROMPT, reported).numpy() - result.log_probs).max() < TOLERANCE


@pytest.mark.parametrize("n", [1, 3])
async def test_a_deadline_leaves_what_there_is(n: int, sglang: RealServer, tmp_path: Path, log: Log) -> None:
    """One request is ended by its id; of several samples, whose ids SGLang makes itself, the stream is closed."""
    async with on_sglang(tmp_path, sglang, sample_deadline_secs=0.5, rollout_max_response_len=MOST) as world:
        samples = await world.rollouts(make_group(0, n, prompt=PROMPT))
        async with EngineClient(sglang.url) as client:
            while (await client.loads())[0].num_running_reqs:  # noqa: ASYNC110 - looks from outside
                await asyncio.sleep(0.05)
    assert len(log) == 1
    for sample in samples:
        assert sample.status == "truncated"
        assert sample.response_length < MOST, "no response of this length is made in that time"
        if sample.response_length:
            check_exact(sample, sglang)


MEMBERS = 6


def in_stream(exchange: Exchange) -> bool:
    """Whether a part of its answer has come, and the rest has not."""
    partial = exchange.partial
    return partial is not None and partial.tokens > 0 and not (exchange.outputs or exchange.error or partial.complete)


@pytest.mark.full
async def test_turns_an_update_and_a_lost_engine(
    tmp_path: Path, sglang: RealServer, log: Log, monkeypatch: pytest.MonkeyPatch, of_one_length: Any
) -> None:
    monkeypatch.setattr(Requests, "params", of_one_length)  # turns end at their stop tokens
    torch.set_num_threads(1)
    async with EngineClient(sglang.url) as client:
        await sglang.fresh(client)
    async with talking(
        tmp_path,
        [sglang.model, sglang.other],
        engines=2,
        start=0,
        streamed=True,
        pause_mode="retract",
        update=ONE_SERVER,
        rollout={"rollout_max_response_len": 600, "rollout_stop_token_ids": tuple(range(3, 256, 11))},
        max_context=1000,
    ) as (world, _):
        for index in range(2):
            world.proxies.append(await world.stack.enter_async_context(FaultProxy(sglang.url)))
            world.rig.engine_at(world.proxies[-1].url, engine=index)
            await world.weights.landed(0, engine=index)

        def arrived() -> int:
            return sum(exchange.partial.tokens for exchange in log if exchange.partial is not None)

        await ask(world, 1, MEMBERS, [["1+1"], [""], [], ["2", "3-1"], ["4"]] * 4)
        await until(lambda: arrived() > 150)
        world.weights.publish(1)
        for index in range(2):
            await world.weights.landed(1, engine=index)
        now = arrived()
        await until(lambda: arrived() > now + 50 and any(in_stream(exchange) for exchange in log))
        lost = [proxy.url for proxy in world.proxies].index(next(filter(in_stream, log)).url)
        world.proxies[lost].kill()
        world.lose(lost)
        samples: list[Sample] = []
        while len(samples) < MEMBERS:
            samples += (await world.answer()).samples
    made, published = of_exchanges(log), {0: sglang.model, 1: sglang.other}
    looks = [check_identity((sample,), made, published) for sample in samples]
    check_once([answer for look in looks for answer in look.answers], made)
    assert {version for sample in samples for version in sample.model_versions} == {0, 1}
    assert sum(sample.reused_tokens for sample in samples) > 0, "what the lost engine had sent was continued"
    assert max(sample.turns for sample in samples) > 3
