"""The generate stage behind the real sglang-router: engines come, go and die; nothing is lost, nothing is doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.engines.http_client import RouterClient, urls
from models.engines.noise import sample_seed
from stages.messages import RolloutSlice, Sample
from tests.models.engines.real_router import router_process
from tests.stages.engine_rig import (
    FAST_MS,
    LENGTH,
    SLOW_MS,
    Exchange,
    Log,
    core_of,
    freeze,
    generating,
    simulated,
    written,
)
from tests.stages.stage_rig import make_group, numbers, response_ids, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with router_process(tmp_path_factory.mktemp("router")) as url:
        yield url


async def test_rollouts_through_the_router_are_the_engines_own(router_url: str, tmp_path: Path, log: Log) -> None:
    async with generating(tmp_path, engines=2, router={"router": "sglang"}) as world:
        world.router_at(router_url)
        await world.ready()
        for group_id in range(6):
            await world.ask(make_group(group_id, 3, prompt=[group_id, 9]))
        slices = [await world.answer() for _ in range(6)]
        async with RouterClient(router_url) as router:
            assert urls(await router.workers()) == {server.url for server in world.engines}
        made = [core_of(server).totals().generated_tokens for server in world.engines]
    assert sum(made) == 6 * 3 * LENGTH
    assert all(made), "both engines have had some"
    assert {e.url for e in log} == {router_url}
    for slice_ in slices:
        [exchange] = [e for e in log if e.request.prompts[0] == prompt_of(slice_)]
        for sample in slice_.samples:
            assert response_ids(sample) == written([exchange], [sample.index], sample)
            assert (sample.status, sample.turns) == ("completed", 1)


async def test_an_engine_that_dies_behind_the_router_is_replaced_and_its_part_is_kept(
    router_url: str, tmp_path: Path, log: Log
) -> None:
    async with generating(
        tmp_path, streamed=True, proxied=True, engine=simulated(SLOW_MS), router={"router": "sglang"}
    ) as world:
        world.router_at(router_url)
        await world.ready()
        await world.ask(make_group(0, 2))
        await freeze(world.engines[0], tokens=6)
        partial = log[0].partial
        assert partial is not None
        await until(lambda: partial.tokens == core_of(world.engines[0]).totals().generated_tokens)
        world.proxies[0].kill()
        world.lose(0)
        again = await world.start_engine(0, incarnation=1)
        core_of(again).schedule.config = simulated(FAST_MS).simulated
        slice_ = await world.answer()
        for sample in slice_.samples:
            kept = log[0].outputs[sample.index].output_ids
            assert (sample.status, sample.reused_tokens) == ("completed", len(kept))
            assert response_ids(sample)[: len(kept)] == kept != []
        async with RouterClient(router_url) as router:
            await _listed(router, world.proxies[1].url)
        await world.ask(make_group(1, 2))
        assert [s.status for s in (await world.answer()).samples] == ["completed"] * 2
        assert log[-1].url == router_url, "the new engine serves through the router"


async def _listed(router: RouterClient, url: str) -> None:
    """Waits until the router has this worker alone."""
    while urls(await router.workers()) != {url}:  # noqa: ASYNC110 - looks from outside
        await asyncio.sleep(0.05)


async def test_an_update_rolls_over_engines_behind_the_router(router_url: str, tmp_path: Path, log: Log) -> None:
    async with generating(
        tmp_path, engines=2, streamed=True, engine=simulated(SLOW_MS), router={"router": "sglang"}, pause_mode="abort"
    ) as world:
        world.router_at(router_url)
        await world.ready()
        for group_id in range(4):
            await world.ask(make_group(group_id, 2, prompt=[group_id]))
        await until(lambda: sum(core_of(s).totals().generated_tokens for s in world.engines) > 30)
        world.weights.publish(1)
        slices = [await world.answer() for _ in range(4)]
        for engine in range(2):
            await world.weights.landed(1, engine=engine)
    assert "0.0" in {e.request.extra_key for e in log}
    for slice_ in slices:
        for sample in slice_.samples:
            chain = requests_of(log, slice_, sample)
            assert response_ids(sample) == written(chain, [sample.index] + [0] * (len(chain) - 1), sample)
            assert (sample.status, sample.resumed, sample.fault()) == ("completed", len(chain) - 1, None)
            assert sample.model_versions in ((0,), (0, 1))
    assert any(s.model_versions == (0, 1) for slice_ in slices for s in slice_.samples)


def prompt_of(slice_: RolloutSlice) -> list[int]:
    first = slice_.samples[0]
    return numbers(first.token_ids[: first.prompt_length])


def requests_of(log: Log, slice_: RolloutSlice, sample: Sample) -> Log:
    """The requests that made a sample: the joint one, then each that goes on where the last one ended."""
    chain: list[Exchange] = []
    tokens = prompt_of(slice_)
    for exchange in log:
        joint = exchange.params.n > 1
        own = exchange.params.sampling_seed == sample_seed(slice_.group.seed, sample.index)
        if exchange.request.prompts[0] == tokens and (joint or (chain and own)):
            chain.append(exchange)  # one that was ended before its first token has no output, and is asked again
            tokens = [*tokens, *exchange.outputs[sample.index if joint else 0].output_ids]
    return chain
