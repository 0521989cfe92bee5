"""Where requests go: policies as orderings, slots of engines, the stage before engines, with a router and without."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Config, RouterConfig
from models.engines.http_client import HttpClient
from models.engines.launch.command import Policy, policy_of
from models.errors import RequestNotSent
from stages.generate.stage import GenerateStage
from stages.messages import PromptGroup
from stages.rollouts import append_untrained
from stages.sampling.engine_choice import CROWDED, FIRST_COME, Choice, Ranking, Slots
from stages.sampling.engine_directory import EngineDirectory
from stages.sampling.rollout_requests import Requests
from stages.sampling.routes import RetryState, RouteRequest, Routes
from stages.topic_values import RouterState
from tests.stages.engine_rig import ONCE, SLOW_MS, Log, World, check_continued, freeze, generating, simulated, started
from tests.stages.faults import FakeRouter
from tests.stages.stage_rig import idle, make_config, make_context, make_group, make_sample, running, until

POLICIES: tuple[Policy, ...] = get_args(Policy)
KEYS = st.text("aé日", max_size=8)
LOADS = st.dictionaries(st.sampled_from([f"engine-{i}" for i in range(8)]), st.integers(0, 50), min_size=1)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the router's list of workers."""
    monkeypatch.setattr("stages.engines.router_workers.LOOK_INTERVAL_S", 0.05)


def choice(loads: dict[str, int], key: str = "k", prompt: bytes = b"p", n: int = 1) -> Choice:
    return Choice(key, prompt, n, loads)


@settings(max_examples=40, deadline=None)
@given(policy=st.sampled_from(POLICIES), loads=LOADS, key=KEYS, seed=st.integers(0, 9))
def test_every_policy_ranks_each_engine_once(policy: Policy, loads: dict[str, int], key: str, seed: int) -> None:
    ranking = Ranking(policy, seed)
    for _ in range(3):
        assert sorted(ranking.rank(choice(loads, key))) == sorted(loads)


@settings(max_examples=40, deadline=None)
@given(loads=LOADS, key=KEYS, other=st.integers(0, 50))
def test_a_session_stays_where_it_is_unless_its_own_engine_goes(loads: dict[str, int], key: str, other: int) -> None:
    ranking = Ranking("session", 0)
    first = ranking.rank(choice(loads, key))
    assert ranking.rank(choice(dict.fromkeys(loads, other), key)) == first, "whatever the loads"
    for gone in loads:
        left = {name: n for name, n in loads.items() if name != gone}
        if left:
            assert ranking.rank(choice(left, key)) == [name for name in first if name != gone]


@settings(max_examples=40, deadline=None)
@given(loads=LOADS, n=st.integers(1, 8), prompt=st.binary(max_size=8))
def test_cache_aware_never_prefers_a_crowded_engine(loads: dict[str, int], n: int, prompt: bytes) -> None:
    first = Ranking("cache_aware", 0).rank(choice(loads, prompt=prompt, n=n))[0]
    bound = CROWDED * (sum(loads.values()) + n) / len(loads)
    assert loads[first] == 0 or loads[first] + n <= bound or all(load + n > bound for load in loads.values())


@settings(max_examples=60, deadline=None)
@given(loads=LOADS, key=KEYS, n=st.integers(1, 8))
def test_turns_stay_on_their_engine_until_it_has_more_than_its_share(loads: dict[str, int], key: str, n: int) -> None:
    own = Ranking("session", 0).rank(choice(loads, key))[0]
    first = Ranking("sticky", 0).rank(choice(loads, key, n=n))[0]
    if loads[own] <= CROWDED * (sum(loads.values()) + n) / len(loads):
        assert first == own
    else:
        assert loads[first] == min(loads.values())


SEVERAL_TURNS: dict[str, dict[str, Any]] = {
    "tools": {"tools": {"tools": ("calculator",)}},
    "environment or agent": {"environment": [{"name": "guess_number"}]},
    "loop": {"stage": [{"name": "critic", "path": "a:B", "loop": "generate"}]},
    "generate function": {"rollout": {"custom_generate_function_path": "a:b"}},
    "rollout function": {"rollout": {"rollout_function_path": "a:b"}},
}


@pytest.mark.parametrize("work", SEVERAL_TURNS)
def test_work_of_several_turns_is_sticky_by_default(work: str) -> None:
    config = msgspec.convert(SEVERAL_TURNS[work], Config)
    assert policy_of(config) == "sticky"
    assert policy_of(msgspec.structs.replace(config, router=RouterConfig(router="sglang"))) == "session"
    assert policy_of(msgspec.structs.replace(config, router=RouterConfig(router_policy="random"))) == "random"
    assert policy_of(Config()) == "least_loaded"


async def test_turns_of_an_environment_find_their_earlier_turns_cached(tmp_path: Path) -> None:
    """Eight rollouts at a time on two engines; the second turns come in another order."""
    asked = {"engines": 2, "engine": simulated(SLOW_MS, 4), "rollout": {"max_turns": 9}, **ONCE}
    async with started(tmp_path, environment=[{"name": "guess_number"}], **asked) as world:
        rollouts = {group: make_sample(prompt=[group % 16] * 200) for group in range(8)}
        for order in (range(8), [7, *range(7)]):
            for group in order:
                await world.come_back(make_group(group, 1), rollouts[group])
            for _ in order:
                came = await world.answer()
                rollouts[came.group.group_id] = append_untrained(came.samples[0], [1], "")
    assert sum(sample.cached_tokens >= 192 for sample in rollouts.values()) >= 6


def test_power_of_two_takes_the_less_loaded_of_those_drawn() -> None:
    ranking = Ranking("power_of_two", 1)
    loads = {"engine-0": 0, "engine-1": 5, "engine-2": 9}
    firsts = Counter(ranking.rank(choice(loads))[0] for _ in range(300))
    assert firsts["engine-2"] == 0, "one of the two is always better"
    assert firsts["engine-0"] > firsts["engine-1"] > 0


@pytest.mark.parametrize(("policy", "urls"), [("session", 1), ("round_robin", 2), ("cache_aware", 2)])
async def test_the_configured_policy_chooses_among_the_engines(
    policy: str, urls: int, tmp_path: Path, log: Log
) -> None:
    """Six groups with one key after another: a session's come back to the engine that had them."""
    async with started(
        tmp_path, engines=2, router={"router": "none", "router_policy": policy}, rollout={"max_turns": 2}, **ONCE
    ) as world:
        for index in range(6):
            await world.come_back(make_group(7, 6), make_sample(index, prompt=[index]))
            await world.answer()
    assert len({exchange.url for exchange in log}) == urls


def slots_of(world: World, name: str = "engine-0") -> Slots:
    return world.stage.sampler.directory.engines[name].slots


async def test_retractions_that_answers_tell_of_reach_the_owner_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.sampling.attempt.REPORT_INTERVAL_S", 0.01)
    async with started(tmp_path, engine=simulated(SLOW_MS), pause_mode="retract") as world:
        await world.ask(make_group(0, 3))
        await freeze(world.engines[0], tokens=6)
        world.weights.publish(1)
        assert [s.retractions for s in (await world.answer()).samples] == [1, 1, 1]
        await until(lambda: world.rig.topic.get("retracted/stage-0") == b"3")


# Several replicas


async def test_a_clients_slots_are_its_share_and_follow_the_number_of_replicas(tmp_path: Path) -> None:
    async with started(tmp_path, engines=2, replicas=3, rollout={"server_concurrency": 32}) as world:
        assert [slots_of(world, name).limit for name in world.serving()] == [11, 11], "a third, rounded up"
        world.rig.topic.publish("scale/generate", b"4")
        await until(lambda: slots_of(world).limit == 8)


async def test_a_replica_comes_and_goes_and_no_engine_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a replica ever asks of an engine is /generate."""
    monkeypatch.setattr("stages.engines.load_watch.LOADS_INTERVAL_S", 1000.0)
    calls: list[str] = []
    original = HttpClient._answer

    def answer(client: HttpClient, method: str, path: str, *args: Any) -> Any:
        calls.append(path)
        return original(client, method, path, *args)

    async with started(tmp_path, engines=2, replicas=2, window_items=1) as world:
        monkeypatch.setattr(HttpClient, "_answer", answer)
        world.tasks[1].cancel()
        await asyncio.wait([world.tasks[1]])
        world.rig.hubs["generate"].peer_lost("stage-1")
        again = GenerateStage(make_context(world.stage.config, tmp_path, index=1, replicas=2, replica="stage-1"))
        ports = await world.rig.ports({"in": "generate"}, {"out": "reward"}, replica="stage-1b", window_items=1)
        async with running(again, ports):
            for group_id in range(8):
                await world.ask(make_group(group_id, 2))
            slices = [await world.answer() for _ in range(8)]
        assert [s.status for slice_ in slices for s in slice_.samples] == ["completed"] * 16
        assert again.activity.items_out > 0
        assert set(calls) == {"/generate"}
        assert len(calls) == 8


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


async def test_nothing_is_sent_before_the_router_has_an_engine_with_weights(tmp_path: Path, log: Log) -> None:
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


async def test_a_session_names_its_group_to_the_router(tmp_path: Path) -> None:
    async with routed(tmp_path, router={"router": "sglang", "router_policy": "session"}) as (world, router):
        for group_id in (4, 5):
            await world.ask(make_group(group_id, 2))
            await world.answer()
        assert [headers["X-SMG-Routing-Key"] for _, _, headers in router.requests] == ["4", "5"]


async def test_a_worker_that_dies_behind_the_router_leaves_its_part_to_another(tmp_path: Path, log: Log) -> None:
    async with routed(tmp_path, streamed=True, proxied=True, engine=simulated(SLOW_MS)) as (world, router):
        router.workers = {proxy.url: True for proxy in world.proxies}  # in this order
        await world.in_mid_generation(log, make_group(0, 2))
        world.proxies[0].kill()
        slice_ = await world.answer()
    first, *rest = log
    assert first.url == router.url
    assert [e.url for e in rest] == [world.proxies[1].url] * 2, "the router cannot be told whom to avoid"
    for sample in slice_.samples:
        check_continued(sample, first, rest)


async def test_the_routers_death_only_delays(tmp_path: Path, log: Log) -> None:
    async with routed(tmp_path, rollout={"max_retries": 1}) as (world, router):
        router.broken = True
        await until(lambda: not world.stage.sampler.routes.ready())
        await world.ask(make_group(0, 2))
        await idle()
        assert log == []
        async with FakeRouter() as again:
            world.router_at(again.url, incarnation=1)
            slice_ = await world.answer()
            assert len(again.requests) == 1
            assert set(again.workers) == {server.url for server in world.engines}, "a new router is told of all engines"
    assert [s.status for s in slice_.samples] == ["completed"] * 2


async def test_a_deadline_reaches_the_engine_behind_the_router(tmp_path: Path) -> None:
    engine = simulated(SLOW_MS, length=1_000_000)
    deadline = {"sample_deadline_secs": 0.3, "rollout_max_response_len": 100_000}
    async with routed(tmp_path, engine=engine, rollout=deadline) as (world, _):
        (sample,) = await world.rollouts(make_group(0, 1))
        assert sample.status == "truncated"
        assert sample.response_length > 0, "its engine was asked to end it"


async def test_a_drain_ends_the_wait_for_a_router(tmp_path: Path) -> None:
    async with generating(tmp_path, router={"router": "sglang"}) as world:
        await world.ask(make_group(0, 2))
        world.rig.topic.publish("drain", b"interrupted")
        assert [s.response_length for s in (await world.answer()).samples] == [0, 0]
        world.rig.hubs["generate"].finish()
        await world.task


def test_where_prefill_and_decode_are_apart_the_router_serves_also_what_was_lost() -> None:
    config = make_config(router={"router": "sglang"}, engine={"engine": "sglang"})
    directory = EngineDirectory(make_config().rollout, 1, "", None)
    directory.state = RouterState("sglang", "http://router", 0, up=True)
    routes = Routes(config, directory, index=0)
    lost, direct = RouteRequest("k", b"p", 1, retries=RetryState(count=1)), RouteRequest("k", b"p", 1, direct=True)
    assert routes._alone(lost)
    assert routes._alone(direct)
    assert not routes._alone(RouteRequest("k", b"p", 1))
    directory.state = msgspec.structs.replace(directory.state, split=True)
    assert not routes._alone(lost)
    with pytest.raises(RequestNotSent, match=r"the router drops a field of it, .* use --router smg"):
        routes._alone(direct)
    assert routes._alone(RouteRequest("k", b"p", 1, policy="judge")), "a frozen model is behind no router"


# Slots of an engine for samples in flight.


class Crowd:
    """Takers of slots, and the order in which they were served."""

    def __init__(self, slots: Slots, tasks: asyncio.TaskGroup) -> None:
        self.slots, self.tasks = slots, tasks
        self.served: list[str] = []
        self.waiting: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, n: int, *, goes_on: bool = False, order: tuple[int, int] = FIRST_COME) -> None:
        self.waiting[name] = self.tasks.create_task(self._take(name, n, goes_on, order))
        await idle()

    async def _take(self, name: str, n: int, goes_on: bool, order: tuple[int, int]) -> None:
        await self.slots.take(n, goes_on=goes_on, order=order)
        self.served.append(name)


async def test_slots_are_granted_in_order_and_those_that_go_on_come_first() -> None:
    async with asyncio.TaskGroup() as tasks:
        crowd = Crowd(Slots(4), tasks)
        await crowd.ask("first", 4)
        await crowd.ask("large", 3)
        await crowd.ask("small", 1)
        await crowd.ask("back from a tool", 1, goes_on=True)
        assert (crowd.served, crowd.slots.queued) == (["first"], 5)
        crowd.slots.release(2)
        await idle()
        assert crowd.served == ["first", "back from a tool"], "the small one does not overtake the large one"
        crowd.slots.release(2)
        await idle()
        assert crowd.served == ["first", "back from a tool", "large"]
        crowd.slots.limit = 5
        await idle()
        assert crowd.served[-1] == "small"
        assert (crowd.slots.taken, crowd.slots.queued) == (5, 0)


async def test_the_oldest_group_goes_first_and_in_it_the_rollout_with_the_most_turns() -> None:
    config, evaluated = make_config(), make_group(10, purpose="eval")
    requests = Requests(config, 1 << 20)
    fifo = Requests(make_config(rollout={"rollout_priority": "fifo"}), 1 << 20)

    def order(group: PromptGroup, turns: int) -> tuple[int, int]:
        return requests.order(group, msgspec.structs.replace(make_sample(0), turns=turns))

    async with asyncio.TaskGroup() as tasks:
        crowd = Crowd(Slots(1), tasks)
        await crowd.ask("first", 1)
        await crowd.ask("of group 9", 1, goes_on=True, order=order(make_group(9), 3))
        await crowd.ask("of group 7", 1, goes_on=True, order=order(make_group(7), 1))
        await crowd.ask("of group 7, nearer its end", 1, goes_on=True, order=order(make_group(7), 2))
        await crowd.ask("fresh, of group 3", 1, order=order(make_group(3), 0))
        await crowd.ask("of group 7, the same", 1, goes_on=True, order=order(make_group(7), 2))
        await crowd.ask("of an evaluation", 1, goes_on=True, order=order(evaluated, 5))
        for _ in range(6):
            crowd.slots.release(1)
            await idle()
        assert crowd.served == [
            "first",
            "of an evaluation",
            "of group 7, nearer its end",
            "of group 7, the same",
            "of group 7",
            "of group 9",
            "fresh, of group 3",
        ]
        assert fifo.order(make_group(7), make_sample(0)) == FIRST_COME


async def test_a_grant_that_nobody_takes_any_more_is_given_back() -> None:
    async with asyncio.TaskGroup() as tasks:
        crowd = Crowd(Slots(1), tasks)
        await crowd.ask("one", 1)
        await crowd.ask("two", 1)
        crowd.slots.release(1)  # granted to "two", which is cancelled before it runs
        crowd.waiting["two"].cancel()
        await idle()
        assert (crowd.served, crowd.slots.taken) == (["one"], 0)


@settings(deadline=None)
@given(
    limit=st.integers(1, 8), steps=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 3)), max_size=30)
)
def test_no_more_is_in_flight_than_the_limit_unless_one_request_is_larger(
    limit: int, steps: list[tuple[int, bool, int]]
) -> None:
    async def play() -> None:
        slots = Slots(limit)
        held: list[int] = []

        async def take(n: int, goes_on: bool) -> None:
            await slots.take(n, goes_on=goes_on)
            held.append(n)

        async with asyncio.TaskGroup() as tasks:
            for n, goes_on, released in steps:
                tasks.create_task(take(n, goes_on))
                for _ in range(3):
                    await asyncio.sleep(0)
                assert slots.taken == sum(held)
                largest = max(held, default=0)
                assert slots.taken <= limit or (largest > limit and 2 * (slots.taken - largest) <= limit)
                for _ in range(min(released, len(held))):
                    slots.release(held.pop(0))
            while slots.queued or slots.taken:
                for _ in range(3):
                    await asyncio.sleep(0)
                assert held, "somebody waits, and nobody is served"
                slots.release(held.pop(0))
        assert slots.taken == 0

    asyncio.run(play())


async def test_all_who_wait_or_hold_slots_may_be_cancelled_at_once() -> None:
    """As at the end of a run: a slot is given back while those in the queue are cancelled, but have not run since."""
    slots = Slots(1)

    async def hold() -> None:
        await slots.take(1, goes_on=False)
        try:
            await asyncio.Event().wait()
        finally:
            slots.release(1)

    tasks = [asyncio.create_task(hold()) for _ in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (slots.taken, slots.queued) == (1, 3)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    assert (slots.taken, slots.queued) == (0, 0)


def test_the_pause_doubles_with_each_loss_up_to_a_limit() -> None:
    pauses = [RetryState(count=count).pause_s for count in range(8)]
    assert pauses == pytest.approx([0.2, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
