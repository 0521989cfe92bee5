"""Token identity on a real SGLang server: conversations over an update and the loss of the connection to an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.engines.client import EngineClient
from stages.messages import Sample
from tests.identity import check_identity, check_once, of_exchanges
from tests.sglang_server import ON_SGLANG, RealServer
from tests.stages.agents.test_token_identity import ask, talking
from tests.stages.engine_rig import Exchange, record_exchanges
from tests.stages.faults import FaultProxy
from tests.stages.stage_rig import until

pytestmark = [*ON_SGLANG, pytest.mark.full]

MEMBERS = 6


def in_stream(exchange: Exchange) -> bool:
    """Whether a part of its answer has come, and the rest has not."""
    partial = exchange.partial
    return partial is not None and partial.tokens > 0 and not (exchange.outputs or exchange.error or partial.complete)


async def test_turns_an_update_and_a_lost_engine(
    tmp_path: Path, sglang: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    exchanges = record_exchanges(monkeypatch)
    async with EngineClient(sglang.url) as client:
        await sglang.fresh(client)
    async with talking(
        tmp_path,
        [sglang.model, sglang.other],
        engines=2,
        start=0,
        streamed=True,
        pause_mode="retract",
        rollout={"rollout_max_response_len": 600, "rollout_stop_token_ids": tuple(range(3, 256, 11))},
        max_context=1000,
    ) as (world, _):
        for index in range(2):  # one server behind two proxies; one after the other, for two updates at once end it
            world.proxies.append(await world.stack.enter_async_context(FaultProxy(sglang.url)))
            world.rig.engine_at(world.proxies[-1].url, engine=index)
            await world.weights.landed(0, engine=index)

        def arrived() -> int:
            return sum(exchange.partial.tokens for exchange in exchanges if exchange.partial is not None)

        await ask(world, 1, MEMBERS, [["1+1"], [""], [], ["2", "3-1"], ["4"]] * 4)
        await until(lambda: arrived() > 150)
        world.weights.publish(1)
        for index in range(2):
            await world.weights.landed(1, engine=index)
        now = arrived()
        await until(lambda: arrived() > now + 50 and any(in_stream(exchange) for exchange in exchanges))
        lost = [proxy.url for proxy in world.proxies].index(next(filter(in_stream, exchanges)).url)
        world.proxies[lost].kill()
        world.lose(lost)
        samples: list[Sample] = []
        while len(samples) < MEMBERS:
            samples += (await world.answer()).samples
    made, published = of_exchanges(exchanges), {0: sglang.model, 1: sglang.other}
    looks = [check_identity((sample,), made, published) for sample in samples]
    check_once([answer for look in looks for answer in look.answers], made)
    assert {version for sample in samples for version in sample.model_versions} == {0, 1}
    assert sum(sample.reused_tokens for sample in samples) > 0, "what the lost engine had sent was continued"
    assert max(sample.turns for sample in samples) > 3
