"""Weights by every route into a real SGLang server: the same tensors as from disk, and what happens when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from configs.schema.rollout import UpdateConfig
from models.engines.client import EngineClient, WeightsUpdated
from models.engines.protocol import GenerateRequest, SamplingParams
from models.errors import EngineRefused, GroupError
from models.weights.transfer import WeightGroup
from stages.engines.stage import FetcherStage
from stages.engines.weight_routes import DiskRoute, TensorRoute, WeightRoute
from stages.engines.weight_transfer import Preparation
from stages.ports import Ports
from tests.sglang_server import ON_SGLANG, RealServer
from tests.stages.fleet_rig import Fleet, TensorPublisher, open_fleet
from tests.stages.stage_rig import make_config, make_context, running, until

pytestmark = ON_SGLANG

ROUTES = ["disk", "tensor", "distributed", "delta"]
PROMPT = [5, 80, 33, 7, 120, 64]
BUCKET_BYTES = 200_000  # about a tenth of the model


@asynccontextmanager
async def serving(
    server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, **update: object
) -> AsyncIterator[tuple[Fleet, TensorPublisher, EngineClient]]:
    settings = {"update_weight_transport": route, "update_weight_buffer_size": BUCKET_BYTES, **update}
    async with EngineClient(server.url) as client:
        await server.fresh(client)
        config = msgspec.convert(settings, UpdateConfig)
        async with open_fleet(tmp_path, monkeypatch, source=server.model, update=config) as one:
            publisher = one.publisher(server.model)
            one.rig.engine_at(server.url)
            yield one, publisher, client
            await client.resume()


Served = Callable[..., AbstractAsyncContextManager[tuple[Fleet, TensorPublisher, EngineClient]]]


@pytest.fixture
def served(sglang: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Opens one link that owns the server, and a publisher of a route."""
    return partial(serving, sglang, tmp_path, monkeypatch)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(path / "model.safetensors")
    return loaded


@pytest.fixture
async def wanted(sglang: RealServer) -> str:
    """The checksum of the server's other checkpoint, loaded from disk."""
    async with EngineClient(sglang.url) as client:
        await client.update_weights_from_disk(str(sglang.other), "reference")
        return await client.checksum()


async def greedy(client: EngineClient, n: int = 24) -> tuple[list[int], list[float]]:
    params = SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True)
    [output] = await client.generate(
        GenerateRequest(input_ids=[*PROMPT], sampling_params=params, return_logprob=True, extra_key="greedy")
    )
    return output.output_ids, output.output_log_probs


def forward(path: Path, ids: list[int]) -> tuple[list[int], list[float]]:
    """Greedy choice and log-prob at each place of a response, by Hugging Face."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    log_probs = logits.log_softmax(-1)
    return logits.argmax(-1).tolist(), log_probs[torch.arange(len(ids)), torch.tensor(ids)].tolist()


@pytest.mark.parametrize("route", ROUTES)
async def test_after_an_update_the_engine_is_the_published_model(
    route: str, served: Served, sglang: RealServer, wanted: str
) -> None:
    async with served(route, check_weight_update_equal=True) as (one, publisher, client):
        first, other = tensors(sglang.model), tensors(sglang.other)
        between = {name: tensor * 0.999 for name, tensor in first.items()}
        for version, values in enumerate((first, between, other)):
            publisher.publish(version, values)
            await one.landed(version)
            assert (await client.model_info()).weight_version == f"0.{version}"
        report = one.entry()
        assert report.checksum == wanted
        assert report.url == sglang.url
        ids, log_probs = await greedy(client)
        expected_ids, expected = forward(sglang.other, ids)
        assert ids == expected_ids
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)

        # The engine is started anew: it carries other weights again, and catches up before it is ready.
        await client.update_weights_from_disk(str(sglang.model), "from its checkpoint")
        one.rig.engine_at(sglang.url, incarnation=1)
        await until(lambda: not one.served())
        await one.landed(1)
        assert await client.checksum() == wanted
        assert one.failures() == 0


@pytest.mark.parametrize("route", ["tensor", "delta"])
async def test_a_fetcher_puts_the_weights_in_by_the_announced_route(
    route: str, served: Served, tmp_path: Path, sglang: RealServer, wanted: str
) -> None:
    async with served(route, check_weight_update_equal=True) as (one, publisher, client):
        there = FetcherStage(make_context(one.config, tmp_path, replica="fetcher-0"))
        topic = await one.rig.node.topic("topic", replica="fetcher-0")
        async with running(there, Ports("fetcher-0", {}, {}, topic)):
            one.rig.engine_at(sglang.url, incarnation=1, fetcher="fetcher-0")
            for version, values in enumerate((tensors(sglang.model), tensors(sglang.other))):
                publisher.publish(version, values)
                await one.landed(version)
                assert (await client.model_info()).weight_version == f"0.{version}"
            assert one.entry().checksum == wanted
            assert (one.entry().fetcher, one.failures(), there.activity.failures) == ("fetcher-0", 0, 0)
            one.rig.topic.publish("end", b"")
            await until(lambda: one.running.done())


async def test_a_broken_group_leaves_the_engine_paused_and_is_made_again(
    served: Served, monkeypatch: pytest.MonkeyPatch, sglang: RealServer, wanted: str
) -> None:
    async with served("distributed") as (one, publisher, client):
        publisher.publish(0, tensors(sglang.model))
        await one.landed(0)
        sent, groups, broken = 0, set[str](), True
        original = WeightGroup.broadcast

        def broadcast(group: WeightGroup, tensor: torch.Tensor) -> None:
            nonlocal sent
            sent += 1
            groups.add(group.name)
            if broken and sent % 3 == 0:
                group.close()
                raise GroupError("this end of the group was killed")
            original(group, tensor)

        monkeypatch.setattr(WeightGroup, "broadcast", broadcast)
        publisher.publish(1, tensors(sglang.other))
        await until(lambda: one.failures() > 0)
        assert not one.served()
        assert not await client.ready(), "a mixture of weights must not generate"
        assert one.entry().version == 0
        broken = False
        await one.landed(1)
        assert len(groups) > 1, "a group that failed is of no use"
        assert await client.checksum() == wanted
        assert await client.ready()


@pytest.mark.parametrize("route", ["tensor", "distributed"])
async def test_a_slot_that_is_torn_between_two_buckets_is_never_served(
    route: str, served: Served, monkeypatch: pytest.MonkeyPatch, sglang: RealServer, wanted: str
) -> None:
    async with served(route) as (one, publisher, client):
        publisher.publish(0, tensors(sglang.model))
        await one.landed(0)
        name = "update_from_tensor" if route == "tensor" else "update_from_distributed"
        original = getattr(EngineClient, name)
        tear = True

        async def update(self: EngineClient, *args: object, **options: object) -> WeightsUpdated:
            nonlocal tear
            done: WeightsUpdated = await original(self, *args, **options)
            if tear:
                tear = False
                for version in (2, 3):  # the second of them into the slot of version 1
                    publisher.write_tensors(version, tensors(sglang.other))
            return done

        monkeypatch.setattr(EngineClient, name, update)
        publisher.publish(1, {name: tensor + 1 for name, tensor in tensors(sglang.model).items()})
        await until(lambda: one.failures() > 0)
        assert not one.served()
        assert not await client.ready()
        publisher.publish(4, tensors(sglang.other))
        await one.landed(4)
        assert await client.checksum() == wanted
        assert await client.ready()


async def test_an_engine_that_dies_in_an_update_is_reported_and_another_takes_its_place(
    served: Served, monkeypatch: pytest.MonkeyPatch, sglang: RealServer
) -> None:
    """Its ranks leave the group in the middle of a broadcast: both halves end, none hangs."""
    async with served("distributed") as (one, publisher, _):
        publisher.publish(0, tensors(sglang.model))
        await one.landed(0)
        original = EngineClient.update_from_distributed
        leave = True

        async def update(self: EngineClient, group: str, *args: object, **options: object) -> WeightsUpdated:
            if leave:
                await self.destroy_group(group)
            return await original(self, group, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(EngineClient, "update_from_distributed", update)
        publisher.publish(1, tensors(sglang.other))
        await until(lambda: one.failures() > 1)
        assert not one.served()
        leave = False
        await one.landed(1)


@pytest.mark.parametrize(
    ("route", "named"), [(DiskRoute(Preparation(asyncio.Lock())), "0.1"), (TensorRoute(BUCKET_BYTES), "0.0")]
)
async def test_updated_but_not_flushed_counts_as_updated(
    route: WeightRoute, named: str, sglang: RealServer, wanted: str, tmp_path: Path
) -> None:
    """SGLang 0.5.23: with requests running, an update in place that asks for a flush answers 400 and has changed the
    weights. /model_info then names the new ones by the disk route, the old ones by the others, until the same update
    comes without the flush."""
    async with EngineClient(sglang.url) as client:
        await sglang.fresh(client, "0.0")
        publisher = TensorPublisher(make_config(), tmp_path / "published", sglang.model, tmp_path)
        announcement = publisher.write_tensors(1, tensors(sglang.other))
        params = SamplingParams(max_new_tokens=900, ignore_eos=True)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.generate(GenerateRequest(input_ids=[*PROMPT], sampling_params=params)))
            while not (await client.loads())[0].num_running_reqs:  # noqa: ASYNC110 - another process runs it
                await asyncio.sleep(0.01)
            await client.pause("in_place")
            async with route.open(client, announcement) as transfer:
                done = await transfer(True)
                assert not done.cache_flushed
                assert await client.checksum() == wanted
                assert (await client.model_info()).weight_version == named
                await transfer(False)
                assert (await client.model_info()).weight_version == "0.1"
            await client.resume()
            [output] = await running
        assert [span.version for span in output.version_spans] == ["0.0", "0.1"]
        publisher.close()


async def test_memory_is_given_back_and_taken_again(sglang: RealServer) -> None:
    """SGLang 0.5.23 on a CPU: both calls are answered, and do nothing without --enable-memory-saver. After them the
    weights count as undefined, so an update follows before anything is generated."""
    async with EngineClient(sglang.url) as client:
        await sglang.fresh(client)
        before, checksum = await greedy(client), await client.checksum()
        await client.release_memory()
        await client.resume_memory()
        await client.update_weights_from_disk(str(sglang.model), "after")
        assert await client.checksum() == checksum
        assert await greedy(client) == before


async def test_a_bracket_that_was_left_open_is_closed(sglang: RealServer) -> None:
    async with EngineClient(sglang.url) as client:
        await sglang.fresh(client)
        await client.begin_update()
        await client.begin_update()
        await client.end_update()
        with pytest.raises(EngineRefused, match="no weight-update session is open"):
            await client.end_update()
        with pytest.raises(EngineRefused, match="must run between begin_weight_update"):
            await client.update_from_tensor(["eA=="], label=None, flush_cache=False)
