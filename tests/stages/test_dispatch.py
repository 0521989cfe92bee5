"""Where requests go: the policies as orderings, and the stage in front of engines, with and without a router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.engines.errors import RequestNotSent
from models.engines.launch.routing import Policy
from stages.base import Activity
from stages.messages import Applied, RolloutSlice
from stages.sampling.dispatch import Dispatcher, RouteRequest
from stages.sampling.requests import Requests
from stages.sampling.routing_policy import CROWDED, Choice, Ranking
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
    token_versions,
)
from tests.stages.faults import FakeRouter
from tests.stages.stage_rig import idle, make_config, make_group, make_sample, numbers, until

POLICIES: tuple[Policy, ...] = (
    "least_loaded",
    "round_robin",
    "random",
    "power_of_two",
    "session",
    "cache_aware",
)
LOADS = st.dictionaries(st.sampled_from([f"engine-{i}" for i in range(8)]), st.integers(0, 50), min_size=1)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the router's list of workers."""
    monkeypatch.setattr("stages.engines.router_workers.LOOK_INTERVAL_S", 0.05)


def choice(loads: dict[str, int], key: str = "k", prompt: bytes = b"p", n: int = 1) -> Choice:
    return Choice(key, prompt, n, loads)


@settings(max_examples=40, deadline=None)
@given(policy=st.sampled_from(POLICIES), loads=LOADS, key=st.text(max_size=5), seed=st.integers(0, 9))
def test_every_policy_ranks_each_engine_once(policy: Policy, loads: dict[str, int], key: str, seed: int) -> None:
    ranking = Ranking(policy, seed)
    for _ in range(3):
        assert sorted(ranking.rank(choice(loads, key))) == sorted(loads)


@settings(max_examples=40, deadline=None)
@given(loads=LOADS, key=st.text(max_size=8), other=st.integers(0, 50))
def test_a_session_stays_where_it_is_unless_its_own_engine_goes(loads: dict[str, int], key: str, other: int) -> None:
    ranking = Ranking("session", 0)
    first = ranking.rank(choice(loads, key))
    assert ranking.rank(choice(dict.fromkeys(loads, other), key)) == first, "whatever the loads"
    for gone in loads:
        left = {name: n for name, n in loads.items() if name != gone}
        if left:
            assert ranking.rank(choice(left, key)) == [name for name in first if name != gone]


def test_sessions_spread_and_a_new_engine_takes_its_share_only() -> None:
    ranking = Ranking("session", 0)
    three, four = ({f"engine-{i}": 0 for i in range(n)} for n in (3, 4))
    before = {k: ranking.rank(choice(three, str(k)))[0] for k in range(600)}
    after = {k: ranking.rank(choice(four, str(k)))[0] for k in range(600)}
    assert min(Counter(before.values()).values()) > 120
    assert {after[k] for k in after if after[k] != before[k]} == {"engine-3"}


@settings(max_examples=40, deadline=None)
@given(loads=LOADS, n=st.integers(1, 8), prompt=st.binary(max_size=8))
def test_cache_aware_never_prefers_a_crowded_engine(loads: dict[str, int], n: int, prompt: bytes) -> None:
    first = Ranking("cache_aware", 0).rank(choice(loads, prompt=prompt, n=n))[0]
    bound = CROWDED * (sum(loads.values()) + n) / len(loads)
    assert loads[first] == 0 or loads[first] + n <= bound or all(load + n > bound for load in loads.values())


def test_cache_aware_sends_a_prompt_to_one_engine_while_there_is_room() -> None:
    ranking = Ranking("cache_aware", 0)
    even = {f"engine-{i}": 40 for i in range(4)}
    homes = {prompt: ranking.rank(choice(even, prompt=bytes([prompt])))[0] for prompt in range(64)}
    assert len(set(homes.values())) == 4
    assert all(ranking.rank(choice(even, "another key", bytes([p])))[0] == home for p, home in homes.items())
    crowded = {**even, homes[0]: 90}
    assert ranking.rank(choice(crowded, prompt=b"\x00"))[0] != homes[0]


def test_power_of_two_takes_the_less_loaded_of_those_drawn() -> None:
    ranking = Ranking("power_of_two", 1)
    loads = {"engine-0": 0, "engine-1": 5, "engine-2": 9}
    firsts = Counter(ranking.rank(choice(loads))[0] for _ in range(300))
    assert firsts["engine-2"] == 0, "one of the two is always better"
    assert firsts["engine-0"] > firsts["engine-1"] > 0


def test_round_robin_takes_turns_and_replicas_begin_at_different_engines() -> None:
    loads = {f"engine-{i}": 0 for i in range(3)}
    first, second = Ranking("round_robin", 0), Ranking("round_robin", 1)
    assert [first.rank(choice(loads))[0] for _ in range(4)] == ["engine-0", "engine-1", "engine-2", "engine-0"]
    assert second.rank(choice(loads))[0] == "engine-1"


@pytest.mark.parametrize(("policy", "urls"), [("session", 1), ("round_robin", 2), ("cache_aware", 2)])
async def test_the_configured_policy_chooses_among_the_engines(
    policy: str, urls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six groups with one key after another: a session's come back to the engine that had them."""
    log = record_exchanges(monkeypatch)
    async with generating(
        tmp_path,
        engines=2,
        router={"router": "none", "router_policy": policy},
        rollout={"max_turns": 2},
        inlets={"return": ("generate.return", RolloutSlice)},
        outlets={"loop.once": ("once", RolloutSlice)},
        loops=("once=tests.stages.custom_parts:Once",),
    ) as world:
        await world.ready()
        await until(lambda: all(link.ready.is_set() for link in world.stage.links))
        back = await world.rig.outlet("generate.return")
        for index in range(6):
            single = RolloutSlice(make_group(7, 6), (make_sample(index, prompt=[index]),))
            await back.send(single, single.key)
            await world.answer()
    assert len({exchange.url for exchange in log}) == urls


async def test_an_engine_gets_no_more_samples_than_it_has_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(tmp_path, engines=2, rollout={"server_concurrency": 4}) as world:
        await world.ready()
        await until(lambda: all(link.ready.is_set() for link in world.stage.links))
        for server in world.engines:
            await core_of(server).pause("in_place")
        for group_id in range(5):
            await world.ask(make_group(group_id, 2))
        await until(lambda: len(log) == 4)
        await idle()
        assert [core_of(server).schedule.waiting for server in world.engines] == [4, 4]
        assert [link.in_flight for link in world.stage.links] == [4, 4]
        for server in world.engines:
            await core_of(server).resume()
        assert {(await world.answer()).group.group_id for _ in range(5)} == set(range(5))
        assert [link.in_flight for link in world.stage.links] == [0, 0]


async def test_a_full_cache_lowers_the_slots_and_the_statistics_say_so(tmp_path: Path) -> None:
    config = simulated(SLOW_MS)
    tight = msgspec.structs.replace(config, simulated=msgspec.structs.replace(config.simulated, kv_tokens=340))
    async with generating(
        tmp_path, engine=tight, rollout={"server_concurrency": 32, "rollout_max_response_len": 100}
    ) as world:
        await world.ready()
        await world.ask(make_group(0, 16, prompt=range(16)))
        watch = world.stage.dispatcher.watch
        core = core_of(world.engines[0])
        await until(lambda: core.load().token_usage > 0.95)
        await watch.look()
        assert 1 <= watch.limits["engine-0"].value < 16
        assert watch.of("engine-0").limit == watch.limits["engine-0"].value
        assert (world.extra("limit_cuts"), world.extra("in_flight_limit")) == (1, watch.limits["engine-0"].value)
        core.schedule.config = simulated(FAST_MS).simulated
        await world.answer()
        for _ in range(64):
            await watch.look()
        assert watch.of("engine-0").limit == 32


async def test_a_fixed_limit_stays(tmp_path: Path) -> None:
    async with generating(tmp_path, rollout={"server_concurrency": 32, "adaptive_concurrency": False}) as world:
        await world.ready()
        watch = world.stage.dispatcher.watch
        watch.note_retractions(5)
        monopoly = core_of(world.engines[0])
        monopoly.schedule._kv = 1_000_000  # full
        await watch.look()
        assert watch.of("engine-0").limit == 32


async def test_the_statistics_say_how_idle_each_engine_is(tmp_path: Path) -> None:
    async with generating(tmp_path, engines=2, start=1) as world:
        await world.ready()
        await world.stage.links[0].ready.wait()
        watch = world.stage.dispatcher.watch
        await watch.look()
        await watch.look()
        assert world.stage.activity.extra["engine-0/idle"] == 1.0
        assert "engine-1/idle" not in world.stage.activity.extra, "nobody can ask it"
        world.stage.links[0].ready.clear()
        await watch.look()
        assert "engine-0/idle" not in world.stage.activity.extra


# Behind a router


@asynccontextmanager
async def routed(tmp_path: Path, *, engines: int = 2, **options: Any) -> AsyncIterator[tuple[World, FakeRouter]]:
    """The stage with a router in front of its engines, which all carry version 0."""
    options.setdefault("router", {"router": "sglang"})
    async with FakeRouter() as router, generating(tmp_path, engines=engines, **options) as world:
        world.router_at(router.url)
        await world.ready()
        await until(lambda: len(router.workers) == engines)
        yield world, router


def engine_urls(world: World) -> set[str]:
    return {server.url for server in world.engines}


async def test_requests_go_through_the_router_and_share_a_prefix_while_all_engines_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with routed(tmp_path) as (world, router):
        for group_id in range(4):
            await world.ask(make_group(group_id, 2))
        slices = [await world.answer() for _ in range(4)]
        assert {exchange.url for exchange in log} == {router.url}
        assert {url for url, _, _ in router.requests} == engine_urls(world)
        assert {body["extra_key"] for _, body, _ in router.requests} == {"0.0"}
        assert {"X-SMG-Routing-Key" in headers for _, _, headers in router.requests} == {False}
        assert [s.status for slice_ in slices for s in slice_.samples] == ["completed"] * 8


async def test_nothing_is_sent_before_the_router_has_an_engine_with_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with FakeRouter() as router, generating(tmp_path, engines=1, router={"router": "sglang"}) as world:
        await world.ask(make_group(0))
        await world.ready()
        await idle()
        assert log == [], "there is no router yet"
        router.adds = False
        world.router_at(router.url)
        await until(lambda: router.posts == [world.engines[0].url])
        await idle()
        assert log == [], "the router has not taken the engine in"
        router.workers[world.engines[0].url] = True
        assert (await world.answer()).samples[0].status == "completed"


@pytest.mark.parametrize("difference", ["versions", "fetching"])
async def test_no_prefix_is_shared_while_the_engines_differ(
    difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with routed(tmp_path) as (world, _):
        report = Applied("engine-1", 0, 1) if difference == "versions" else Applied("engine-1", 0, 0, fetching=1)
        world.rig.topic.publish("applied/engine-1", msgspec.msgpack.encode(report))
        await until(lambda: world.stage.dispatcher.directory.settled() is None)
        for group_id in range(3):
            await world.ask(make_group(group_id, 2, prompt=[5]))
            await world.answer()
    keys = [exchange.request.extra_key for exchange in log]
    assert len({*keys}) == 3
    assert not {*keys} & {"0.0", "0.1"}


async def test_a_session_names_its_group_to_the_router(tmp_path: Path) -> None:
    async with routed(tmp_path, router={"router": "sglang", "router_policy": "session"}) as (world, router):
        for group_id in (4, 5):
            await world.ask(make_group(group_id, 2))
            await world.answer()
        assert [headers["X-SMG-Routing-Key"] for _, _, headers in router.requests] == ["4", "5"]


async def test_a_field_that_the_router_loses_makes_a_request_go_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Requests.params

    def params(self: Requests, *args: Any) -> Any:
        return msgspec.structs.replace(original(self, *args), spaces_between_special_tokens=False)

    monkeypatch.setattr(Requests, "params", params)
    log = record_exchanges(monkeypatch)
    async with routed(tmp_path) as (world, router):
        for group_id in range(4):
            await world.ask(make_group(group_id, 2))
            await world.answer()
        assert router.requests == []
        assert Counter(exchange.url for exchange in log) == dict.fromkeys(engine_urls(world), 2), "round robin here too"


async def test_every_replica_sends_to_all_engines_and_owns_its_share(tmp_path: Path) -> None:
    """The second replica's own engine is down; it works on with the first one's, and keeps its hands off that one."""
    async with (
        FakeRouter() as router,
        generating(
            tmp_path, engines=2, start=1, replica=1, replicas=2, router={"router": "sglang"}, rollout={"max_retries": 0}
        ) as world,
    ):
        router.workers[world.engines[0].url] = True  # by its owner
        world.router_at(router.url)
        assert [link.name for link in world.stage.links] == ["engine-1"]
        await core_of(world.engines[0]).relabel("0.3")
        world.rig.applied(3)
        await world.ask(make_group(0, 2))
        slice_ = await world.answer()
        assert [token_versions(s) for s in slice_.samples] == [[3] * LENGTH] * 2
        assert (router.posts, router.deletes) == ([], [])


async def test_a_worker_that_dies_behind_the_router_leaves_its_part_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with routed(tmp_path, streamed=True, proxied=True, engine=simulated(SLOW_MS)) as (world, router):
        core_of(world.engines[1]).schedule.config = simulated(FAST_MS).simulated
        router.workers = dict.fromkeys([world.proxies[0].url], True) | dict.fromkeys([world.proxies[1].url], True)
        await world.ask(make_group(0, 2))
        await freeze(world.engines[0], tokens=6)
        partial = log[0].partial
        assert partial is not None
        await until(lambda: partial.tokens == core_of(world.engines[0]).totals().generated_tokens)
        world.proxies[0].kill()
        slice_ = await world.answer()
    first, *rest = log
    assert first.url == router.url
    assert [e.url for e in rest] == [world.proxies[1].url] * 2, "the router cannot be told whom to avoid"
    for sample in slice_.samples:
        kept = first.outputs[sample.index].output_ids
        assert (sample.status, sample.reused_tokens) == ("completed", len(kept))
        assert numbers(sample.response_ids)[: len(kept)] == kept
        assert kept


async def test_the_routers_death_only_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = record_exchanges(monkeypatch)
    async with routed(tmp_path, rollout={"max_retries": 1}) as (world, router):
        router.broken = True
        await until(lambda: not world.stage.dispatcher.ready())
        await world.ask(make_group(0, 2))
        await idle()
        assert log == []
        async with FakeRouter() as again:
            world.router_at(again.url, incarnation=1)
            slice_ = await world.answer()
            assert len(again.requests) == 1
            assert set(again.workers) == engine_urls(world), "a new router is told of all engines"
    assert [s.status for s in slice_.samples] == ["completed"] * 2


async def test_a_deadline_reaches_the_engine_behind_the_router(tmp_path: Path) -> None:
    engine = simulated(SLOW_MS, length=1_000_000)
    deadline = {"sample_deadline_secs": 0.3, "rollout_max_response_len": 100_000}
    async with routed(tmp_path, engine=engine, rollout=deadline) as (world, _):
        await world.ask(make_group(0, 1))
        (sample,) = (await world.answer()).samples
        assert sample.status == "truncated"
        assert sample.response_length > 0, "its engine was asked to end it"


async def test_a_drain_ends_the_wait_for_a_router(tmp_path: Path) -> None:
    async with generating(tmp_path, router={"router": "sglang"}) as world:
        await world.ask(make_group(0, 2))
        world.rig.topic.publish("drain", b"interrupted")
        assert [s.response_length for s in (await world.answer()).samples] == [0, 0]
        world.rig.hubs["generate"].finish()
        assert world.task is not None
        await world.task


def test_where_prefill_and_decode_are_apart_the_router_serves_also_what_was_lost() -> None:
    config = make_config(router={"router": "sglang"}, engine={"engine": "sglang"})
    dispatcher = Dispatcher(config, [], Activity(), asyncio.Event(), index=0, replicas=1, engines=2)
    assert dispatcher.members is not None
    lost, direct = RouteRequest("k", b"p", 1, again=True), RouteRequest("k", b"p", 1, direct=True)
    assert dispatcher._alone(lost)
    assert dispatcher._alone(direct)
    assert not dispatcher._alone(RouteRequest("k", b"p", 1))
    dispatcher.members.split = True
    assert not dispatcher._alone(lost)
    with pytest.raises(RequestNotSent, match=r"the router drops a field of it, .* use --router smg"):
        dispatcher._alone(direct)
