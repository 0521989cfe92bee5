"""The router's list of workers: the engines that carry published weights are in it, and nobody else stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from models.engines.access_token import Token
from models.engines.http_client import Role, RouterClient, urls
from models.engines.noise import sample_seed
from stages.base import Activity
from stages.engines.router_workers import STRANGE_LOOKS, RouterWorkers
from stages.messages import RolloutSlice, Sample
from stages.ports import Topic
from stages.topic_values import RouterAddress, RouterState
from tests.models.engines.real_router import router_process
from tests.stages.engine_rig import SLOW_MS, Exchange, Log, check_continued, core_of, generating, simulated, written
from tests.stages.faults import FakeRouter
from tests.stages.stage_rig import Rig, before_calls, idle, make_group, open_rig, response_ids, time_limit, until

OWN, OTHER = "http://127.0.0.1:1", "http://127.0.0.1:2"


@dataclass
class Post:
    """The topic with two engines, and the router's list of workers."""

    rig: Rig
    topic: Topic
    members: RouterWorkers
    router: FakeRouter

    @property
    def up(self) -> bool:
        value = self.rig.topic.get("router_state")
        return value is not None and msgspec.msgpack.decode(value, type=RouterState).up

    async def look(self) -> None:
        await idle()  # what was published is seen
        await self.members.look(self.topic)

    async def looks(self, count: int = 2) -> None:
        for _ in range(count):
            await self.look()

    def engine(self, index: int, url: str, *, version: int = 0, **fields: Any) -> None:
        self.rig.engine_at(url, engine=index)
        self.rig.applied(version, engine=index, **fields)

    def attach(self, url: str = OWN, *, ready: bool = True) -> None:
        """What the supervisor and the control of `engine-0` tell when it is up and has its weights."""
        self.engine(0, url, version=0 if ready else -1, state="serving" if ready else "loading")

    def route(self, incarnation: int = 0, url: str = "") -> None:
        address = RouterAddress("sglang", url or self.router.url, incarnation)
        self.rig.topic.publish("router", msgspec.msgpack.encode(address))


@asynccontextmanager
async def posted(*, kind: str = "sglang") -> AsyncIterator[Post]:
    async with open_rig() as rig, FakeRouter(kind=kind) as router:
        topic = await rig.node.topic(rig.topic.address, replica="engines-0")
        post = Post(rig, topic, RouterWorkers(Activity()), router)
        yield post
        if post.members._api is not None:
            await post.members._api.close()


@pytest.fixture
async def post() -> AsyncIterator[Post]:
    """The router is on the topic, no engine is."""
    with time_limit():
        async with posted() as post:
            post.route()
            yield post


async def test_an_engine_is_added_once_it_carries_weights(post: Post) -> None:
    """With its token. A router that has not forgotten it takes it at a later look."""
    post.attach(ready=False)
    await post.look()
    assert (post.router.posts, post.up) == ([], False)
    post.rig.engine_at(OWN, token=Token("of-this-engine"))
    post.rig.applied(0)
    post.router.conflict.add(OWN)
    await post.look()
    assert post.router.workers == {}
    post.router.conflict.clear()
    await post.look()
    assert (post.router.workers, post.router.posts) == ({OWN: True}, [OWN, OWN])
    assert post.router.roles[OWN]["api_key"] == "of-this-engine"
    await post.look()
    assert post.up
    assert post.members.activity.extra["router_workers"] == 1
    await post.looks(3)
    assert post.router.posts == [OWN, OWN]


async def test_a_lost_engine_is_taken_out_at_once(post: Post) -> None:
    """Its owner knows the address that it gave the router, also when no key of the topic does."""
    post.attach()
    await post.looks()
    post.rig.lose_engine(0)
    await post.look()
    assert post.router.deletes == [OWN]
    post.attach("http://127.0.0.1:3")
    await post.looks()
    assert post.router.workers == {"http://127.0.0.1:3": True}


async def test_an_engines_stage_that_was_started_anew_changes_nothing_at_the_router(post: Post) -> None:
    post.attach()
    post.engine(1, OTHER)
    await post.looks(3)
    before = list(post.router.posts)
    again = RouterWorkers(Activity())
    for _ in range(STRANGE_LOOKS + 2):
        await again.look(post.topic)
        assert post.up, "also for its clients it is what it was"
    assert post.router.workers == {OWN: True, OTHER: True}
    assert (post.router.posts, post.router.deletes) == (before, [])
    await again._api.close()


async def test_a_new_router_gets_everything_again(post: Post) -> None:
    async with FakeRouter() as again:
        post.attach()
        await post.looks()
        post.route(1, again.url)
        await post.look()
        assert not post.up
        await post.look()
        assert again.workers == {OWN: True}
        assert post.up
        for key in ("router", "router_state"):  # as the supervisor does
            post.rig.topic.drop(key)
        await post.look()
        assert (post.up, post.members.state) == (False, None)


async def test_a_broken_router_is_reported_once_and_looked_at_again(
    post: Post, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.engines.router_workers.LOOK_INTERVAL_S", 0.005)
    monkeypatch.setattr("stages.engines.router_workers.LONGEST_PAUSE_S", 0.01)
    looks: list[RouterClient] = []
    before_calls(monkeypatch, RouterClient, "workers", looks.append)
    async with asyncio.TaskGroup() as tasks:
        post.attach()
        post.router.broken = True
        running = tasks.create_task(post.members.run(post.topic))
        await until(lambda: len(looks) >= 4)
        assert not post.up
        assert len([r for r in caplog.records if "the router's list of workers" in r.message]) == 1
        post.router.broken = False
        await until(lambda: post.up)
        running.cancel()


PREFILL = {"worker_type": "prefill", "bootstrap_port": 8998}
DECODE = {"worker_type": "decode"}


async def test_a_worker_that_was_taken_out_comes_back_in_its_role(post: Post) -> None:
    post.router.workers |= {OWN: True, OTHER: True}
    post.router.roles |= {OWN: PREFILL, OTHER: DECODE}
    post.attach(ready=False)
    post.engine(1, OTHER)
    await post.looks()
    assert post.router.workers == {OTHER: True}, "its weights are nobody's yet"
    post.attach()
    await post.looks()
    assert post.router.roles[OWN] == PREFILL
    assert post.router.workers == {OWN: True, OTHER: True}


async def test_strangers_with_a_role_are_left_alone(post: Post) -> None:
    post.router.workers |= {"http://p:1": True, "http://d:1": True, "http://stranger:1": True}
    post.router.roles |= {"http://p:1": PREFILL, "http://d:1": DECODE}
    await post.look()
    assert not post.up, "strangers do not make the router count as up"
    post.attach()
    await post.looks(STRANGE_LOOKS + 1)
    assert post.router.deletes == ["http://stranger:1"]


@pytest.mark.parametrize(
    ("info", "role"),
    [
        ({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9000}, Role("prefill", 9000)),
        ({"disaggregation_mode": "decode", "disaggregation_bootstrap_port": 9000}, Role("decode")),
        ({"disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998}, Role()),
        ({}, Role()),
    ],
)
async def test_an_engine_that_no_router_has_listed_says_its_role(
    post: Post, info: dict[str, object], role: Role
) -> None:
    """Its owner took over after the worker was taken out."""
    app = web.Application()
    app.router.add_get("/server_info", lambda request: web.json_response(info))
    async with TestServer(app) as engine:
        url = str(engine.make_url("")).rstrip("/")
        post.attach(url)
        await post.looks()
        assert msgspec.convert(post.router.roles[url], Role) == role
        post.route(1)
        post.router.workers.clear()
        await post.looks()
        assert post.router.posts == [url, url]


@pytest.mark.parametrize("kind", ["sglang", "smg"])
async def test_a_worker_that_lingers_is_removed_once_and_added_after_it_has_gone(kind: str) -> None:
    """smg lists a removed worker for a second, unhealthy, and answers 409 to its addition until it has gone."""
    async with posted(kind=kind) as post:
        post.route()
        post.attach()
        await post.looks()
        assert post.up
        post.router.lingering.add(OWN)
        post.rig.applied(0, state="loading")  # its update has failed half-way
        await post.looks(3)
        assert (post.router.workers, post.router.deletes, post.up) == ({OWN: False}, [OWN], False)
        post.attach()
        await post.looks(3)
        assert (post.router.posts, post.up) == ([OWN], False), "it is listed still, and gets nothing"
        assert kind == "sglang" or not await post.members._api.add(OWN), "and it would be refused"
        post.router.posts.clear()
        post.router.workers.clear()
        await post.looks()
        assert (post.router.posts, post.router.deletes, post.up) == ([OWN], [OWN], True)


# The generate stage behind the real sglang-router: engines come, go and die; nothing is lost, nothing is doubled.


@pytest.fixture(scope="module")
def router_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with router_process(tmp_path_factory.mktemp("router")) as url:
        yield url


@pytest.mark.slow
async def test_an_engine_that_dies_behind_the_router_is_replaced_and_its_part_is_kept(
    router_url: str, tmp_path: Path, log: Log
) -> None:
    async with generating(
        tmp_path, streamed=True, proxied=True, engine=simulated(SLOW_MS), router={"router": "sglang"}
    ) as world:
        world.router_at(router_url)
        await world.ready()
        first = await world.in_mid_generation(log, make_group(0, 2))
        world.proxies[0].kill()
        world.lose(0)
        await world.start_engine(0, incarnation=1)
        world.hurry(-1)
        for sample in (await world.answer()).samples:
            check_continued(sample, first, log[1:])
        async with RouterClient(router_url) as router:
            await _listed(router, world.proxies[1].url)
        assert [s.status for s in await world.rollouts(make_group(1, 2))] == ["completed"] * 2
        assert log[-1].url == router_url, "the new engine serves through the router"


async def _listed(router: RouterClient, *wanted: str) -> None:
    """Waits until the router has these workers alone."""
    while urls(await router.workers()) != set(wanted):  # noqa: ASYNC110 - looks from outside
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_an_update_rolls_over_engines_behind_the_router(router_url: str, tmp_path: Path, log: Log) -> None:
    async with generating(
        tmp_path, engines=2, streamed=True, engine=simulated(SLOW_MS), router={"router": "sglang"}, pause_mode="abort"
    ) as world:
        world.router_at(router_url)
        await world.ready()
        await until(lambda: world.stage.sampler.routes.ready())
        async with RouterClient(router_url) as router:
            await _listed(router, *(server.url for server in world.engines))
        for group_id in range(4):
            await world.ask(make_group(group_id, 2, prompt=[group_id]))
        await until(lambda: sum(core_of(s).totals().generation_tokens for s in world.engines) > 30)
        world.weights.publish(1)
        slices = [await world.answer() for _ in range(4)]
        for engine in range(2):
            await world.weights.landed(1, engine=engine)
        assert all(core_of(server).totals().generation_tokens for server in world.engines), "both have had some"
    assert {e.url for e in log} == {router_url}
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
    ids: list[int] = first.token_ids[: first.prompt_length].tolist()
    return ids


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
