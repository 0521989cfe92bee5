"""The load of engines: their idle share, and the slots for samples in flight."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.engines.protocol import Load
from stages.engines.load_watch import CALM_USAGE, CUT, HIGH_USAGE, STEPS, IdleMeter, Limit, Reading
from stages.messages import PromptGroup
from stages.sampling.engine_choice import FIRST_COME, Slots
from stages.sampling.rollout_requests import Requests
from tests.stages.stage_rig import idle, make_config, make_group, make_sample


def test_an_engine_that_counts_its_seconds_is_believed() -> None:
    meter = IdleMeter(looks=3)
    assert meter.observe_idle(10.0, 1.0, 5) is None
    assert meter.observe_idle(12.0, 2.5, 0) == pytest.approx(0.25)
    assert meter.observe_idle(14.0, 2.5, 9) == pytest.approx(0.625)
    assert meter.observe_idle(16.0, 2.5, 9) == pytest.approx(1.0), "the first look is forgotten"


def test_of_one_that_does_not_each_look_counts_for_the_time_before_it() -> None:
    meter = IdleMeter()
    assert [meter.observe_idle(t, 0.0, n) for t, n in ((0.0, 3), (2.0, 1), (4.0, 0), (8.0, 0))] == [
        None,
        0.0,
        pytest.approx(0.5),
        pytest.approx(0.75),
    ]


def test_what_was_sampled_before_the_first_second_counted_does_not_mix_with_the_account() -> None:
    meter = IdleMeter()
    meter.observe_idle(0.0, 0.0, 0)
    meter.observe_idle(2.0, 0.0, 1)
    assert meter.observe_idle(4.0, 0.5, 1) is None
    assert meter.observe_idle(6.0, 1.5, 1) == pytest.approx(0.5)


def test_an_engine_that_was_started_anew_begins_anew() -> None:
    meter = IdleMeter()
    meter.observe_idle(0.0, 100.0, 1)
    meter.observe_idle(2.0, 102.0, 1)
    assert meter.observe_idle(4.0, 1.0, 1) is None
    assert meter.observe_idle(6.0, 3.0, 1) == 0.0
    meter.forget()
    assert meter.observe_idle(8.0, 3.0, 1) is None


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 20.0), st.integers(0, 3)), max_size=30))
def test_a_share_is_a_share(looks: list[tuple[float, float, int]]) -> None:
    meter, now = IdleMeter(), 0.0
    for step, busy, running in looks:
        now += step
        share = meter.observe_idle(now, busy, running)
        assert share is None or 0.0 <= share <= 1.0


READINGS = st.builds(Reading, usage=st.floats(0.0, 1.0), waiting=st.integers(0, 1000), retractions=st.integers(0, 3))
CALM = Reading(0.1, 0)
FULL = Reading(HIGH_USAGE, 0)


@settings(deadline=None)
@given(most=st.integers(1, 600), looks=st.lists(st.tuples(READINGS, st.integers(0, 2000)), max_size=60))
def test_the_limit_stays_within_its_bounds_and_takes_one_step_at_a_time(
    most: int, looks: list[tuple[Reading, int]]
) -> None:
    limit = Limit(most)
    for reading, in_flight in looks:
        before = limit.value
        after = limit.observe(reading, in_flight)
        assert 1 <= after <= most
        assert after <= before + max(1, most // STEPS)
        if after < before:
            assert in_flight <= before, "the cut before had its effect"
            assert after == max(1, int(CUT * max(in_flight, 1)))
            assert reading.usage >= HIGH_USAGE or reading.retractions or reading.waiting


@settings(deadline=None)
@given(most=st.integers(1, 600), looks=st.lists(st.tuples(READINGS, st.integers(0, 2000)), max_size=30))
def test_a_calm_engine_gets_all_its_samples_back(most: int, looks: list[tuple[Reading, int]]) -> None:
    limit = Limit(most)
    for reading, in_flight in looks:
        limit.observe(reading, in_flight)
    for _ in range(2 * STEPS):
        limit.observe(CALM, limit.value)
    assert limit.value == most


def test_a_full_cache_is_answered_once_until_the_samples_have_come_down() -> None:
    limit = Limit(100)
    assert limit.observe(FULL, 80) == 60
    assert limit.observe(FULL, 78) == 60, "what runs needs its time to end"
    assert limit.observe(FULL, 60) == 45
    assert limit.cuts == 2
    assert limit.observe(Reading((HIGH_USAGE + CALM_USAGE) / 2, 0), 45) == 45, "between the marks nothing changes"
    assert limit.observe(CALM, 45) == 48


def test_retractions_and_a_growing_queue_cut_and_a_long_queue_alone_does_not() -> None:
    limit = Limit(100)
    assert limit.observe(Reading(0.5, 0, retractions=1), 100) == 75
    limit = Limit(100)
    waiting = [40, 40, 39, 41]
    assert [limit.observe(Reading(0.5, n), 100) for n in waiting] == [100] * 4, "a burst that settles"
    assert limit.observe(Reading(0.5, 45), 100) == 75, "the second look in a row with a longer queue"


def test_an_engine_that_is_started_anew_has_the_whole_limit() -> None:
    limit = Limit(100)
    limit.observe(FULL, 100)
    limit.restart()
    assert limit.value == 100


def test_a_reading_takes_the_fullest_rank_and_all_queues() -> None:
    loads = [Load(token_usage=0.2, num_waiting_reqs=3), Load(token_usage=0.9, num_waiting_reqs=1)]
    assert Reading.of(loads, 2) == Reading(0.9, 4, 2)
    assert Reading.of([]) == Reading(0.0, 0, 0)


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


async def test_a_request_for_more_than_the_limit_is_granted_when_half_of_it_is_free() -> None:
    async with asyncio.TaskGroup() as tasks:
        crowd = Crowd(Slots(4), tasks)
        await crowd.ask("eight", 8)
        await crowd.ask("nine", 9)
        crowd.slots.release(5)
        await idle()
        assert (crowd.served, crowd.slots.taken) == (["eight"], 3)
        crowd.slots.release(1)
        await idle()
        assert crowd.served == ["eight", "nine"], "though two of the first are still at it"


async def test_who_gives_up_waiting_leaves_no_trace() -> None:
    async with asyncio.TaskGroup() as tasks:
        crowd = Crowd(Slots(2), tasks)
        await crowd.ask("one", 2)
        await crowd.ask("large", 2)
        await crowd.ask("small", 1)
        crowd.slots.release(1)
        crowd.waiting["large"].cancel()
        await idle()
        assert crowd.served == ["one", "small"]
        assert (crowd.slots.taken, crowd.slots.queued) == (2, 0)


async def test_a_grant_that_nobody_takes_any_more_is_given_back() -> None:
    async with asyncio.TaskGroup() as tasks:
        crowd = Crowd(Slots(1), tasks)
        await crowd.ask("one", 1)
        await crowd.ask("two", 1)
        crowd.slots.release(1)  # granted to "two", which is cancelled before it runs
        crowd.waiting["two"].cancel()
        await idle()
        assert (crowd.served, crowd.slots.taken) == (["one"], 0)


async def test_all_are_let_go_at_the_end() -> None:
    async with asyncio.TaskGroup() as tasks:
        crowd = Crowd(Slots(1), tasks)
        for name in "abc":
            await crowd.ask(name, 1, goes_on=name == "c")
        crowd.slots.wake_all()
        await idle()
        assert sorted(crowd.served) == ["a", "b", "c"]
        crowd.slots.release(3)
        assert crowd.slots.taken == 0


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
