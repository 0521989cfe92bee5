"""Streams of every engine in both forms, through the client: the same responses, and what is left of a broken one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from models.engines.client import EngineClient
from models.engines.protocol import EXPECTED_SGLANG, GenerateOutput, VersionSpan
from models.engines.serve import EngineServer
from models.engines.streamed import PartialOutputs
from models.errors import EngineRefused
from tests.models.engines.conftest import REAL
from tests.models.engines.harness import EMBEDDED, SIMULATED, Capabilities, Target, ask, idle, post, until
from tests.sglang_server import CONTEXT, ON_SGLANG, RealServer

REAL_STREAMS = [
    pytest.param(name, marks=ON_SGLANG, id=f"{name}-{EXPECTED_SGLANG}") for name in ("sglang", "sglang_overlap")
]
STREAMS = [*itertools.product(("embedded", "simulated"), (False, True)), *REAL_STREAMS]
INTERVAL = 8


@pytest.fixture(params=STREAMS, ids=lambda p: p if isinstance(p, str) else f"{p[0]}-{'news' if p[1] else 'whole'}")
async def streaming(request: pytest.FixtureRequest, checkpoints: Callable[..., Path]) -> AsyncIterator[Target]:
    """An engine that streams every 8 tokens, all so far or what is new."""
    if isinstance(request.param, str):
        server: RealServer = request.getfixturevalue(request.param)
        async with EngineClient(server.url, timeout_s=60) as client:
            await server.fresh(client)
            yield Target(client, REAL, str(server.model), str(server.other), "first")
        return
    engine, incremental = request.param
    model, other = str(checkpoints()), str(checkpoints(seed=1))
    async with (
        EngineServer(
            EMBEDDED if engine == "embedded" else SIMULATED,
            model,
            max_context_len=CONTEXT,
            seed=3,
            weight_version="first",
            stream_interval=INTERVAL,
            incremental_streaming=incremental,
        ) as running,
        EngineClient(running.url, timeout_s=30) as client,
    ):
        yield Target(client, Capabilities(), model, other, "first")


async def test_chunks_grow_in_the_form_that_the_server_says(streaming: Target) -> None:
    info = await streaming.client.server_info()
    assert info.stream_interval == INTERVAL
    request = msgspec.structs.replace(ask([1, 2, 3], max_new_tokens=400), stream=True)
    status, raw = await post(streaming, "/generate", request)
    assert status == 200
    events = [line.removeprefix("data: ") for line in raw.decode().strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunks = [msgspec.json.decode(event, type=GenerateOutput) for event in events[:-1]]
    assert len(chunks) >= 3, "it does not come all at once"
    seen: list[int] = []
    for chunk in chunks:
        whole = [*seen, *chunk.output_ids] if info.incremental_streaming_output else chunk.output_ids
        assert whole[: len(seen)] == seen
        assert [token for _, token, _ in chunk.meta_info.output_token_logprobs or ()] == chunk.output_ids
        seen = whole
        assert chunk.meta_info.completion_tokens == len(seen)
        assert (chunk.meta_info.finish_reason is None) == (chunk is not chunks[-1])
        assert chunk.meta_info.weight_version == "first"
    assert len(seen) == 400


async def test_a_streamed_response_is_the_response(streaming: Target) -> None:
    partial = PartialOutputs()
    request = ask([[1, 2, 3], [4, 5]], n=2, max_new_tokens=30, temperature=0.0)
    streamed = await streaming.client.generate(request, partial=partial)
    plain = await streaming.client.generate(request)
    assert [output.meta_info.prompt_tokens for output in streamed] == [3, 3, 2, 2]
    assert [output.index for output in streamed] == [0, 1, 2, 3]
    for ours, theirs in zip(streamed, plain, strict=True):
        assert ours.version_spans == theirs.version_spans == [VersionSpan("first", 0, 30)]
        assert ours.meta_info.finish_reason == theirs.meta_info.finish_reason
        assert len(ours.output_ids) == len(ours.output_log_probs) == ours.meta_info.completion_tokens == 30
        if streaming.can.contents_stop:  # greedy: equal whoever is in the batch
            assert ours.output_log_probs == pytest.approx(theirs.output_log_probs, abs=1e-4)
    assert partial.complete
    assert (partial.tokens, partial.chunks >= 8) == (120, True)
    assert partial.certain() == streamed


async def test_an_abort_ends_a_stream_with_all_its_tokens(streaming: Target) -> None:
    partial = PartialOutputs()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(streaming.client.generate(ask([1, 2, 3], max_new_tokens=900), partial=partial))
        await until(lambda: _has(partial, 50))
        await streaming.client.abort()
    [output] = task.result()
    assert output.aborted
    assert 50 <= len(output.output_ids) == len(output.output_log_probs) == output.version_spans[-1].end < 900


async def test_spans_of_two_updates_in_one_stream(streaming: Target) -> None:
    client, partial = streaming.client, PartialOutputs(sent_label="first")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.generate(ask([1, 2, 3], n=2, max_new_tokens=900), partial=partial))
        for label, weights in (("second", streaming.other), ("third", streaming.model)):
            await until(lambda goal=partial.tokens + 80: _has(partial, goal))  # type: ignore[misc]
            await client.pause("retract")
            await client.update_weights_from_disk(weights, label)
            await client.resume()
        await until(lambda goal=partial.tokens + 80: _has(partial, goal))  # type: ignore[misc]
        left = partial.certain()
        await client.abort()
    for output in task.result():
        assert [span.version for span in output.version_spans] == ["first", "second", "third"]
        assert output.version_spans[-1].end == len(output.output_ids) == len(output.output_log_probs)
        assert output.meta_info.num_retractions == 2
    for prefix, output in zip(left, task.result(), strict=True):
        assert prefix is not None
        count = len(prefix.output_ids)
        assert prefix.output_ids == output.output_ids[:count]
        assert prefix.output_log_probs == output.output_log_probs[:count]
        assert prefix.meta_info.finish_reason is None
        true = [(s.version, s.start, min(s.end, count)) for s in output.version_spans if s.start < count]
        assert [(s.version, s.start, s.end) for s in prefix.version_spans] == true, "no version is guessed"
        assert count >= 20


async def test_a_caller_that_stops_waiting_keeps_what_came_and_ends_the_request(streaming: Target) -> None:
    partial = PartialOutputs()
    task = asyncio.ensure_future(streaming.client.generate(ask([7, 8], max_new_tokens=900), partial=partial))
    await until(lambda: _has(partial, 40))
    task.cancel()
    await until(lambda: idle(streaming), timeout_s=20.0)
    [prefix] = partial.certain()
    assert prefix is not None
    assert 40 <= len(prefix.output_ids) == len(prefix.output_log_probs) < 900
    assert prefix.version_spans == [VersionSpan("first", 0, len(prefix.output_ids))]
    rest = ask([7, 8, *prefix.output_ids], max_new_tokens=10)
    [resumed] = await streaming.client.generate(rest, partial=PartialOutputs())
    assert len(resumed.output_ids) == 10


async def test_a_refusal_in_a_stream_is_a_refusal(streaming: Target) -> None:
    with pytest.raises(EngineRefused, match="longer than the model's context"):
        await streaming.client.generate(ask([1] * (CONTEXT + 5)), partial=PartialOutputs())


async def _has(partial: PartialOutputs, tokens: int) -> bool:
    return partial.tokens >= tokens
