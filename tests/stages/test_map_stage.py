"""What a custom stage gets for free: custody, failures as data, bounded concurrency, an account of its time."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from configs.schema import Config
from stages.base import Activity
from stages.messages import RolloutSlice
from stages.ports import Ports
from tests.stages.custom_parts import Forgetful, Shout
from tests.stages.stage_rig import Rig, idle, make_context, make_sample, make_slice, open_rig, running, take, take_all


async def join(rig: Rig) -> Ports:
    return await rig.join({"in": ("shout", RolloutSlice)}, {"out": ("reward", RolloutSlice)})


def asked(group_id: int, label: str = "x") -> RolloutSlice:
    return make_slice(group_id, make_sample(0, response="hi"), make_sample(1, response="yo"), label=label)


def test_a_custom_stage_is_a_dozen_lines() -> None:
    assert len(inspect.getsource(Shout).splitlines()) <= 12


async def test_each_message_is_processed_passed_on_and_released(rig: Rig) -> None:
    ports, stage = await join(rig), Shout(make_context())
    feed, out = await rig.outlet("shout"), await rig.inlet("reward")
    async with running(stage, ports) as task:
        for group_id in range(20):
            await feed.send(asked(group_id), str(group_id))
        rig.hubs["shout"].finish()
        await task
        rig.hubs["reward"].finish()
        found = {slice_.group.group_id: [s.response for s in slice_.samples] for slice_ in await take_all(out)}
    assert found == {group_id: ["HI", "YO"] for group_id in range(20)}
    assert rig.hubs["shout"].stats().settled == 20
    assert (stage.activity.items_in, stage.activity.items_out, stage.activity.failures) == (20, 20, 0)


async def test_what_raises_is_passed_on_with_failed_samples_and_the_reason(rig: Rig) -> None:
    ports, stage = await join(rig), Shout(make_context())
    feed, out = await rig.outlet("shout"), await rig.inlet("reward")
    async with running(stage, ports):
        await feed.send(asked(0, "raise"), "0")
        bad = await take(out)
        await feed.send(asked(1), "1")
        good = await take(out)
    assert [(s.status, s.error) for s in bad.samples] == [("failed", "Shout: ValueError: nothing to shout about")] * 2
    assert [s.response for s in bad.samples] == ["hi", "yo"], "the message is otherwise as it came"
    assert [s.status for s in good.samples] == ["completed", "completed"]
    assert stage.activity.failures == 1
    assert rig.letters == []


async def test_work_that_raises_cancelled_error_costs_no_place_for_messages(rig: Rig) -> None:
    class Cancelled(Shout):
        async def process(self, message: RolloutSlice) -> RolloutSlice | None:
            raise asyncio.CancelledError

    ports, stage = await join(rig), Cancelled(make_context(concurrency=2))
    feed, out = await rig.outlet("shout"), await rig.inlet("reward")
    async with running(stage, ports):
        for group_id in range(5):
            await feed.send(asked(group_id), str(group_id))
        reasons = [sample.error for _ in range(5) for sample in (await take(out)).samples]
    assert reasons == ["Cancelled: CancelledError: "] * 10
    assert rig.letters == []


async def test_none_means_nothing_to_pass_on(rig: Rig) -> None:
    ports = await join(rig)
    feed = await rig.outlet("shout")
    async with running(Shout(make_context()), ports):
        await feed.send(asked(0, "skip"), "0")
        await rig.hubs["shout"].wait_empty()
    assert rig.hubs["reward"].stats().accepted == 0


async def test_the_output_is_in_custody_before_the_input_is_released(rig: Rig) -> None:
    ports = await join(rig)
    feed = await rig.outlet("shout")
    sending, go = asyncio.Event(), asyncio.Event()

    class Slow:
        async def send(self, message: RolloutSlice, key: str) -> None:
            sending.set()
            await go.wait()
            await ports.outlets["out"].send(message, key)

    held = Ports(ports.replica, ports.inlets, {"out": Slow()}, ports.topic)
    async with running(Shout(make_context()), held):
        await feed.send(asked(0), "0")
        await sending.wait()
        await idle()
        assert (rig.hubs["shout"].stats().leased, rig.hubs["shout"].stats().settled) == (1, 0)
        go.set()
        await rig.hubs["shout"].wait_empty()
        assert rig.hubs["reward"].stats().accepted == 1


async def test_a_replica_that_is_killed_between_output_and_release_doubles_nothing(rig: Rig) -> None:
    ports = await join(rig)
    feed, out = await rig.outlet("shout"), await rig.inlet("reward")
    sent, never = asyncio.Event(), asyncio.Event()

    class Last:
        async def send(self, message: RolloutSlice, key: str) -> None:
            await ports.outlets["out"].send(message, key)
            sent.set()
            await never.wait()

    held = Ports(ports.replica, ports.inlets, {"out": Last()}, ports.topic)
    async with running(Shout(make_context()), held):
        await feed.send(asked(0), "0")
        await sent.wait()
    rig.hubs["shout"].peer_lost("stage-0")
    again = await rig.ports({"in": "shout"}, {"out": "reward"}, replica="stage-1")
    async with running(Shout(make_context()), again):
        await rig.hubs["shout"].wait_empty()
    rig.hubs["reward"].finish()
    assert [slice_.group.group_id for slice_ in await take_all(out)] == [0]
    assert rig.hubs["shout"].stats().redelivered == 1
    assert rig.hubs["reward"].stats().duplicates == 1


async def test_concurrency_bounds_what_is_processed_at_a_time(rig: Rig) -> None:
    class Counting(Shout):
        now = most = 0

        async def process(self, message: RolloutSlice) -> RolloutSlice | None:
            self.now += 1
            self.most = max(self.most, self.now)
            await idle()
            self.now -= 1
            return message

    ports, stage = await join(rig), Counting(make_context(concurrency=3))
    feed = await rig.outlet("shout")
    async with running(stage, ports) as task:
        for group_id in range(10):
            await feed.send(asked(group_id), str(group_id))
        rig.hubs["shout"].finish()
        await task
    assert stage.most == 3
    assert rig.hubs["reward"].stats().accepted == 10


async def test_a_bug_of_the_stage_itself_ends_the_replica() -> None:
    class Broken(Shout):
        outlet = "nowhere"

    with pytest.raises(ExceptionGroup) as caught:
        async with open_rig() as rig, running(Broken(make_context()), await join(rig)):
            await idle()
    assert caught.group_contains(KeyError, match="nowhere")


def test_a_loop_stage_must_say_what_it_wants() -> None:
    with pytest.raises(TypeError, match=r"Forgetful is used as a loop stage and must define the class method wants"):
        Forgetful.wants(Config(), {}, make_slice(0))


def test_activity_accounts_for_each_moment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("stages.base.time.monotonic", lambda: clock[0])
    activity = Activity()

    def spend(seconds: float) -> None:
        clock[0] += seconds

    spend(1)
    with activity.working():
        spend(2)
        with activity.sending():
            spend(4)
            with activity.working():
                spend(8)
        with activity.stalled():
            spend(16)
    spend(32)
    assert activity.settle() == {"starved": 33.0, "busy": 10.0, "blocked": 4.0, "stalled": 16.0}
    assert activity.in_flight == 0


def test_activity_survives_errors() -> None:
    activity = Activity()
    with pytest.raises(ValueError, match="x"), activity.working(), activity.sending():
        raise ValueError("x")
    assert activity.in_flight == 0
    assert activity._state() == "starved"


async def test_a_slice_above_the_limit_goes_on_failed_with_the_reason_and_the_replica_lives(rig: Rig) -> None:
    await rig.stream("reward", RolloutSlice, max_message_bytes=4_000)
    ports, stage = await join(rig), Shout(make_context())
    feed, out = await rig.outlet("shout"), await rig.inlet("reward")
    async with running(stage, ports) as task:
        await feed.send(make_slice(0, make_sample(0, n=2_000), make_sample(1, n=2_000)), "0")
        await feed.send(asked(1), "1")
        rig.hubs["shout"].finish()
        await task
        rig.hubs["reward"].finish()
        found = {slice_.group.group_id: slice_.samples for slice_ in await take_all(out)}
    assert [(s.index, s.status, s.length) for s in found[0]] == [(0, "failed", 0), (1, "failed", 0)]
    assert all("max_message_bytes" in (s.error or "") and s.fault() is None for s in found[0])
    assert [s.response for s in found[1]] == ["HI", "YO"]
    stats = rig.hubs["shout"].stats()
    assert (stats.settled, stats.redelivered, rig.letters) == (2, 0, [])
