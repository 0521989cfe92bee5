"""A stream of chunks: tokens as they come, of which none is ever taken back, and the result last."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from models.engines.protocol import SamplingParams
from stages.sampling.requests import Chunk, SampleRequest, SampleResult
from tests.stages.engine_rig import (
    FAST_MS,
    LENGTH,
    SLOW_MS,
    World,
    core_of,
    freeze,
    generating,
    record_exchanges,
    simulated,
)
from tests.stages.stage_rig import until

SLOW: dict[str, Any] = {"proxied": True, "engine": simulated(SLOW_MS)}


class Heard:
    """What came of each member: the tokens of its chunks, and its result."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.log_probs: list[list[float]] = [[] for _ in range(n)]
        self.results: list[SampleResult | None] = [None] * n
        self.chunks = 0

    async def listen(self, world: World, request: SampleRequest) -> None:
        async with world.stage.sampler.chunks(request) as members:
            async for index, item in members:
                assert self.results[index] is None, "the result comes last"
                if isinstance(item, Chunk):
                    self.chunks += 1
                    self.tokens[index] += item.token_ids
                    self.log_probs[index] += item.log_probs
                else:
                    self.results[index] = item

    def check(self) -> None:
        for tokens, log_probs, result in zip(self.tokens, self.log_probs, self.results, strict=True):
            assert result is not None
            assert result.finish in ("stop", "length")
            assert tokens == list(result.token_ids[: len(tokens)])
            assert log_probs == list(result.log_probs[: len(tokens)])


def asked(n: int, **fields: Any) -> SampleRequest:
    params = SamplingParams(n=n, max_new_tokens=LENGTH, sampling_seed=5, stream_interval=fields.pop("interval", None))
    return SampleRequest(params, **{"token_ids": [1, 2, 3], **fields})


@pytest.mark.parametrize("streamed", [False, True], ids=["cumulative", "sglang"])
@pytest.mark.parametrize(("n", "interval"), [(1, None), (3, 4)])
async def test_tokens_come_before_the_result(n: int, interval: int | None, streamed: bool, tmp_path: Path) -> None:
    heard = Heard(n)
    async with generating(tmp_path, streamed=streamed, engine=simulated(SLOW_MS)) as world:
        await world.ready()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(heard.listen(world, asked(n, interval=interval)))
            await until(lambda: all(heard.tokens))
            assert not any(heard.results)
            core_of(world.engines[0]).schedule.config = simulated(FAST_MS).simulated
    heard.check()
    assert [len(tokens) for tokens in heard.tokens] == [len(result.token_ids) for result in heard.results if result]
    assert heard.chunks >= 2 * n, "the first token at once, and the others behind it"


@pytest.mark.parametrize("streamed", [False, True], ids=["cumulative", "sglang"])
@pytest.mark.parametrize("n", [1, 3])
async def test_what_was_told_survives_its_engine_although_partial_rollout_is_off(
    n: int, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    heard = Heard(n)
    async with generating(tmp_path, engines=2, streamed=streamed, rollout={"partial_rollout": False}, **SLOW) as world:
        await world.ready()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(heard.listen(world, asked(n)))
            await until(lambda: min(len(tokens) for tokens in heard.tokens) >= 2)
            lost = next(i for i, engine in enumerate(world.engines) if log[0].url == world.proxies[i].url)
            core_of(world.engines[1 - lost]).schedule.config = simulated(FAST_MS).simulated
            told = [list(tokens) for tokens in heard.tokens]
            world.proxies[lost].kill()
    heard.check()
    assert len(log) == 1 + n, "each member goes on alone"
    for index, result in enumerate(heard.results):
        assert result is not None
        assert heard.tokens[index][: len(told[index])] == told[index]
        assert result.reused_tokens >= len(told[index]) >= 2


async def test_what_was_told_survives_an_update_that_aborts(tmp_path: Path) -> None:

    heard = Heard(2)
    async with generating(
        tmp_path, engine=simulated(5 * SLOW_MS), pause_mode="abort", rollout={"partial_rollout": False}
    ) as world:
        await world.ready()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(heard.listen(world, asked(2)))
            await until(lambda: min(len(tokens) for tokens in heard.tokens) >= 2)
            await freeze(world.engines[0], tokens=4)
            world.weights.publish(1)
    heard.check()
    assert [result.resumed for result in heard.results if result] == [1, 1]
    assert [[run.version for run in result.runs] for result in heard.results if result] == [[0, 1]] * 2


async def test_chunks_of_a_text_are_refused(tmp_path: Path) -> None:
    async with generating(tmp_path) as world:
        with pytest.raises(ValueError, match="cannot be continued at another engine; give its token ids"):
            await Heard(1).listen(world, asked(1, text="hello", token_ids=[]))
