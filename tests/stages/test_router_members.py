"""The router's list of workers: the engines that carry published weights are in it, and nobody else stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from models.engines.client import EngineClient
from models.engines.errors import EngineUnreachable
from models.engines.router_api import Role, RouterClient
from stages.base import Activity
from stages.engines.engine_link import EngineLink
from stages.engines.router_workers import STRANGE_LOOKS, UNDER_WAY_S, RouterMembers
from stages.messages import Applied, EngineAddress, RouterAddress
from stages.sampling.engine_directory import Engine, EngineDirectory
from tests.stages.faults import FakeRouter
from tests.stages.stage_rig import SpanLog, idle, until

OWN, OTHER = "http://127.0.0.1:1", "http://127.0.0.1:2"


@dataclass
class Post:
    """A replica that owns `engine-0`, beside the owner of `engine-1`."""

    directory: EngineDirectory
    members: RouterMembers
    link: EngineLink
    router: FakeRouter
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def looks(self, count: int = 2) -> None:
        for _ in range(count):
            await self.members.look()

    def engine(self, index: int, url: str, *, version: int | None = 0, incarnation: int = 0) -> None:
        applied = None if version is None else Applied(f"engine-{index}", 0, version)
        address = EngineAddress(f"engine-{index}", url, incarnation)
        self.directory.engines[f"engine-{index}"] = Engine(f"engine-{index}", address, applied)

    def attach(self, url: str = OWN, *, ready: bool = True) -> None:
        """What the link does when its engine is announced and has its weights."""
        self.engine(0, url)
        self.link.client = EngineClient(url)
        if ready:
            self.link.ready.set()

    def route(self, incarnation: int = 0, url: str = "") -> None:
        self.directory.router = RouterAddress("sglang", url or self.router.url, incarnation)


@asynccontextmanager
async def posted(*, owner: bool = True, kind: str = "sglang") -> AsyncIterator[Post]:
    changed = asyncio.Event()
    directory = EngineDirectory(timeout_s=5.0, changed=changed)
    activity = Activity()
    link = EngineLink(
        "engine-0",
        owner=owner,
        pause_mode="in_place",
        timeout_s=5.0,
        activity=activity,
        spans=SpanLog(),
        changed=changed,
    )
    async with asyncio.timeout(30), FakeRouter(kind=kind) as router:
        post = Post(directory, RouterMembers([link], directory, activity, changed), link, router, changed)
        yield post
        await post.members.close()


async def test_an_engine_is_added_once_it_carries_weights() -> None:
    async with posted() as post:
        post.route()
        post.attach(ready=False)
        await post.members.look()
        assert (post.router.posts, post.members.up) == ([], False)
        post.link.ready.set()
        await post.members.look()
        assert post.router.posts == [OWN]
        await post.members.look()
        assert post.members.up
        assert post.changed.is_set(), "who waits for the router is told"
        assert post.members.activity.extra["router_workers"] == 1
        for _ in range(3):
            await post.members.look()
        assert post.router.posts == [OWN]


async def test_an_addition_under_way_is_not_asked_again_until_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("stages.engines.router_workers.time.monotonic", lambda: now)
    async with posted() as post:
        post.route()
        post.attach()
        post.router.adds = False
        for _ in range(4):
            await post.members.look()
        assert post.router.posts == [OWN]
        now += UNDER_WAY_S + 1.0
        await post.members.look()
        assert post.router.posts == [OWN, OWN]


async def test_a_worker_that_the_router_has_not_forgotten_is_added_at_a_later_look() -> None:
    async with posted() as post:
        post.route()
        post.attach()
        post.router.conflict.add(OWN)
        await post.members.look()
        post.router.conflict.clear()
        await post.members.look()
        assert post.router.workers == {OWN: True}


async def test_an_engine_whose_weights_may_not_be_served_is_taken_out_and_comes_back() -> None:
    async with posted() as post:
        post.route()
        post.attach()
        for _ in range(2):
            await post.members.look()
        post.link.ready.clear()
        await post.members.look()
        assert post.router.workers == {}
        await post.members.look()
        assert not post.members.up
        post.link.ready.set()
        for _ in range(2):
            await post.members.look()
        assert post.members.up
        assert post.router.deletes == [OWN]


async def test_a_worker_that_lingers_is_removed_once_and_added_after_it_has_gone() -> None:
    async with posted() as post:
        post.route()
        post.attach()
        for _ in range(2):
            await post.members.look()
        post.router.lingering.add(OWN)
        post.link.ready.clear()
        for _ in range(3):
            await post.members.look()
        assert post.router.deletes == [OWN]
        post.link.ready.set()
        await post.members.look()
        assert (post.router.posts, post.members.up) == ([OWN], False), "it is listed still, and gets nothing"
        post.router.workers.clear()
        for _ in range(2):
            await post.members.look()
        assert (post.router.posts, post.members.up) == ([OWN, OWN], True)


async def test_a_lost_engine_is_taken_out_at_once() -> None:
    """Its owner knows the address that it gave the router, also when no key of the topic does."""
    async with posted() as post:
        post.route()
        post.attach()
        for _ in range(2):
            await post.members.look()
        post.directory.engines.clear()
        post.link.client = None
        post.link.ready.clear()
        await post.members.look()
        assert post.router.deletes == [OWN]
        post.attach("http://127.0.0.1:3")
        for _ in range(2):
            await post.members.look()
        assert post.router.workers == {"http://127.0.0.1:3": True}


async def test_engines_of_other_replicas_are_left_alone() -> None:
    async with posted() as post:
        post.route()
        post.attach()
        post.engine(1, OTHER)
        post.router.workers[OTHER] = True
        for _ in range(STRANGE_LOOKS + 2):
            await post.members.look()
        post.directory.engines["engine-1"].applied = None  # being started anew, by the same address
        for _ in range(STRANGE_LOOKS + 2):
            await post.members.look()
        assert post.router.workers == {OWN: True, OTHER: True}
        assert post.router.deletes == []


@pytest.mark.parametrize("owner", [True, False])
async def test_a_worker_that_nobody_knows_is_removed_by_an_owner_after_a_second_look(owner: bool) -> None:
    async with posted(owner=owner) as post:
        post.route()
        post.attach()
        post.router.workers["http://stranger:80"] = True
        await post.members.look()
        assert post.router.deletes == [], "its key may be on the way"
        await post.members.look()
        assert post.router.deletes == (["http://stranger:80"] if owner else [])


async def test_strangers_do_not_make_the_router_count_as_up() -> None:
    async with posted() as post:
        post.route()
        post.router.workers["http://stranger:80"] = True
        await post.members.look()
        assert not post.members.up


async def test_a_new_router_gets_everything_again() -> None:
    async with posted() as post, FakeRouter() as again:
        post.route()
        post.attach()
        for _ in range(2):
            await post.members.look()
        first = post.members.client
        post.route(1, again.url)
        await post.members.look()
        assert not post.members.up
        await post.members.look()
        assert again.workers == {OWN: True}
        assert post.members.up
        assert post.members.client is not first
        post.directory.router = None
        await post.members.look()
        assert (post.members.up, post.members.client) == (False, None)


async def test_a_broken_router_is_told_once_and_looked_at_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.engines.router_workers.LOOK_INTERVAL_S", 0.005)
    monkeypatch.setattr("stages.engines.router_workers.LONGEST_PAUSE_S", 0.01)
    looks = 0
    original = RouterClient.workers

    async def workers(client: RouterClient) -> object:
        nonlocal looks
        looks += 1
        return await original(client)

    monkeypatch.setattr(RouterClient, "workers", workers)
    async with posted() as post, asyncio.TaskGroup() as tasks:
        post.route()
        post.attach()
        post.router.broken = True
        running = tasks.create_task(post.members.run())
        await until(lambda: looks >= 4)
        assert not post.members.up
        assert len([r for r in caplog.records if "the router's list of workers" in r.message]) == 1
        post.router.broken = False
        await until(lambda: post.members.up)
        running.cancel()


async def test_a_lost_request_makes_the_router_prove_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.engines.router_workers.LOOK_INTERVAL_S", 1000.0)
    async with posted() as post, asyncio.TaskGroup() as tasks:
        post.route()
        post.attach()
        for _ in range(2):
            await post.members.look()
        running = tasks.create_task(post.members.run())
        await until(lambda: post.members.up)
        await idle()
        post.members.suspect()
        assert not post.members.up
        await until(lambda: post.members.up)  # without waiting for the clock
        running.cancel()


async def test_errors_of_a_look_are_the_callers() -> None:
    async with posted() as post:
        post.route()
        post.router.broken = True
        with pytest.raises(EngineUnreachable, match="answered 500"):
            await post.members.look()


PREFILL = {"worker_type": "prefill", "bootstrap_port": 8998}
DECODE = {"worker_type": "decode"}


async def test_a_worker_that_was_taken_out_comes_back_in_its_role() -> None:
    async with posted() as post:
        post.route()
        post.router.workers |= {OWN: True, OTHER: True}
        post.router.roles |= {OWN: PREFILL, OTHER: DECODE}
        post.attach(ready=False)
        post.engine(1, OTHER)
        await post.looks()
        assert post.router.workers == {OTHER: True}, "its weights are nobody's yet"
        post.link.ready.set()
        await post.looks()
        assert post.router.roles[OWN] == PREFILL
        assert post.router.workers == {OWN: True, OTHER: True}


async def test_a_router_whose_prefill_and_decode_are_apart_is_up_with_both_only() -> None:
    async with posted() as post:
        post.route()
        post.router.workers |= {OWN: True, OTHER: True}
        post.router.roles |= {OWN: PREFILL, OTHER: DECODE}
        post.attach()
        post.engine(1, OTHER)
        await post.looks()
        assert (post.members.up, post.members.split) == (True, True)
        post.router.workers[OTHER] = False
        await post.looks()
        assert (post.members.up, post.members.split) == (False, True), "half of the pair serves nothing"


async def test_strangers_with_a_role_are_left_alone() -> None:
    async with posted() as post:
        post.route()
        post.attach()
        post.router.workers |= {"http://p:1": True, "http://d:1": True, "http://stranger:1": True}
        post.router.roles |= {"http://p:1": PREFILL, "http://d:1": DECODE}
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
async def test_an_engine_that_no_router_has_listed_says_its_role(info: dict[str, object], role: Role) -> None:
    """Its owner took over after the worker was taken out."""
    app = web.Application()
    app.router.add_get("/server_info", lambda request: web.json_response(info))
    async with posted() as post, TestServer(app) as engine:
        url = str(engine.make_url("")).rstrip("/")
        post.route()
        post.attach(url)
        await post.looks()
        assert msgspec.convert(post.router.roles[url], Role) == role
        post.route(1)
        post.router.workers.clear()
        await post.looks()
        assert post.router.posts == [url, url]


async def test_smg_that_has_not_forgotten_a_worker_gets_it_again_when_it_has() -> None:
    """smg lists a removed worker for a second, unhealthy, and answers 409 to its addition until it has gone."""
    async with posted(kind="smg") as post:
        post.route()
        post.attach()
        await post.looks()
        assert post.members.up
        post.router.lingering.add(OWN)
        post.link.ready.clear()
        await post.looks()
        assert post.router.workers == {OWN: False}
        assert not post.members.up
        post.link.ready.set()
        await post.looks(3)
        assert (post.router.posts, post.members.up) == ([OWN], False), "listed: nothing to ask for"
        original = post.members._api
        assert original is not None
        assert not await original.add(OWN), "and it would be refused"
        post.router.workers.clear()
        await post.looks()
        assert (post.router.posts[-1], post.members.up) == (OWN, True)
        assert post.router.deletes == [OWN]
