"""The generate stage with loop stages and deadlines: returned samples, broken answers, late samples."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from configs.schema import Config
from models.engines import text
from models.engines.client import EngineClient
from models.engines.core import Completion
from models.engines.protocol import GenerateOutput, GenerateRequest
from models.engines.simulated.engine import SimulatedEngine
from stages import base
from stages.base import Activity
from stages.errors import InfrastructureError
from stages.messages import RolloutSlice, Sample
from stages.ports import Ports
from stages.rollouts import append_untrained
from tests.stages.custom_parts import Failing, Forgetful, Shout
from tests.stages.engine_rig import LENGTH, ONCE, Log, core_of, simulated, started, written
from tests.stages.stage_rig import (
    Rig,
    ended_by,
    idle,
    make_context,
    make_group,
    make_sample,
    make_slice,
    response_ids,
    running,
    take,
    until,
)
from transport.spec import HubStats


async def test_max_turns_ends_the_loop(tmp_path: Path) -> None:
    async with started(tmp_path, rollout={"max_turns": 1}, **ONCE) as world:
        assert len(await world.rollouts(make_group(0, 3))) == 3
        assert world.rig.hubs["once"].stats().accepted == 0


async def test_a_sample_that_failed_in_its_loop_stays_failed(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, rollout={"max_turns": 3}, **ONCE) as world:
        ports = await world.rig.ports({"in": "once"}, {"out": "generate.return"}, replica="once-0")
        async with running(Failing(make_context()), ports):
            await world.ask(make_group(0, 2))
            for _ in range(2):
                (sample,) = (await world.answer()).samples
                assert (sample.status, sample.error) == ("failed", "Failing: ConnectionError: the environment is gone")
    assert len(log) == 1, "no engine is asked to continue it"


async def test_tokens_of_a_tool_count_towards_the_longest_response(tmp_path: Path) -> None:
    async with started(tmp_path, rollout={"max_turns": 3, "rollout_max_response_len": 64}, **ONCE) as world:
        await world.ask(make_group(0, 1))
        single = await take(await world.rig.inlet("once"))
        await world.come_back(single.group, append_untrained(single.samples[0], [7] * 100, "a long result"))
        (sample,) = (await world.answer()).samples
        assert sample.status == "truncated"
        assert sample.response_length <= 64
        assert sample.fault() is None
        await until(lambda: not world.rig.hubs["generate.return"].stats().leased)
        assert world.stage.activity.tokens == single.samples[0].response_length, "what was cut is not taken back"


async def test_continued_samples_of_a_group_never_share_their_noise(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, rollout={"max_turns": 3}, **ONCE) as world:
        members = (make_sample(0, n=20), make_sample(1, n=10))  # 1 * 20 == 2 * 10
        for member in members:
            await world.come_back(make_group(0, 2), member)
        await until(lambda: len(log) == 2)
        assert log[0].params.sampling_seed != log[1].params.sampling_seed


@pytest.mark.parametrize("fault", ["a log-prob is missing", "an answer is missing", "a log-prob of a stream"])
async def test_a_broken_answer_fails_its_samples_only(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines break it that do not stream, and one that does, for its first member."""
    generated, made = EngineClient.generate, text.output

    def without_log_probs(output: GenerateOutput) -> GenerateOutput:
        entries = [(None, token, None) for token in output.output_ids]  # NaN in JSON
        meta = msgspec.structs.replace(output.meta_info, output_token_logprobs=entries)
        return msgspec.structs.replace(output, meta_info=meta)

    async def generate(client: EngineClient, request: GenerateRequest, **options: Any) -> list[GenerateOutput]:
        if request.prompts[0] != [6, 6, 6]:
            return await generated(client, request, **options)
        first, *others = await generated(client, request)
        return others if fault == "an answer is missing" else [without_log_probs(first), *others]

    def output(completion: Completion, *args: Any) -> GenerateOutput:
        whole = made(completion, *args)
        broken = completion.prompt.tolist() == [6, 6, 6] and not completion.sample
        return without_log_probs(whole) if broken else whole

    streams = "stream" in fault
    monkeypatch.setattr(*((text, "output", output) if streams else (EngineClient, "generate", generate)))
    async with started(tmp_path) as world:
        statuses = [sample.status for sample in await world.rollouts(make_group(0, 2, prompt=[6, 6, 6]))]
        assert "failed" in statuses
        assert not streams or statuses == ["failed", "completed"]
        assert [s.status for s in await world.rollouts(make_group(1, 2))] == ["completed", "completed"]


async def test_the_feedback_edge_flows_while_prompts_fill_the_window(tmp_path: Path) -> None:
    """Prompts that wait for the engine take no place from samples that come back."""
    async with started(tmp_path, engine=simulated(), window_items=2, rollout={"max_turns": 3}, **ONCE) as world:
        core = core_of(world.engines[0])
        await core.pause("in_place")
        for group_id in range(4):
            await world.ask(make_group(group_id, 1))
        await until(lambda: core.schedule.waiting == 2)
        await world.come_back(make_group(9, 4), make_sample(1))
        await until(lambda: core.schedule.waiting == 3)
        await core.resume()
        assert (await world.answer()).group.group_id == 9
        wanted = await world.rig.inlet("once")
        assert {(await take(wanted)).group.group_id for _ in range(4)} == {0, 1, 2, 3}


STEP_MS = 20.0  # a response of this many steps never ends by itself
ENDLESS = simulated(STEP_MS, length=1_000_000)
LONG: dict[str, Any] = {"rollout_max_response_len": 100_000}


def ends_from(core: SimulatedEngine, number: int) -> None:
    """All responses from this one on have the usual length, and are made fast."""
    writer, begun = core.schedule._writer, itertools.count()
    original = writer.plan

    def plan(completion: Completion) -> tuple[int, bool]:
        if next(begun) == number:
            core.schedule.config = writer._config = simulated().simulated
        return original(completion)

    writer.plan = plan  # type: ignore[method-assign]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_late_rollout_is_kept_as_truncated(streamed: bool, tmp_path: Path, log: Log) -> None:
    """The only one of group 1, and those of group 3, which has three."""
    deadline = {**LONG, "sample_deadline_secs": 1.0}
    async with started(tmp_path, engine=ENDLESS, streamed=streamed, rollout=deadline) as world:
        for n in (1, 3):
            await world.ask(make_group(n, n))
        samples: list[tuple[int, Sample]] = []
        while len(samples) < 4:
            slice_ = await world.answer()
            samples += [(slice_.group.group_id, sample) for sample in slice_.samples]
        await until(lambda: core_of(world.engines[0]).schedule.running == 0)
        assert world.extra("deadline_truncated") == 4
        assert world.extra("reused_tokens") == 0, "nobody was lost"
    assert sorted((n, sample.index) for n, sample in samples) == [(1, 0), (3, 0), (3, 1), (3, 2)]
    assert len(log) == 2, "nothing is asked again"
    for n, sample in samples:
        [asked] = [exchange for exchange in log if exchange.params.n == n]
        assert (sample.status, sample.turns, sample.replaced, sample.reused_tokens) == ("truncated", 1, 0, 0)
        assert 0 < sample.response_length < 100_000
        assert response_ids(sample) == written([asked], [sample.index], sample)
        assert sample.fault() is None


async def test_a_hung_engine_cannot_keep_a_late_rollout(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.sampling.attempt.STOP_GRACE_S", 0.05)
    deadline = {**LONG, "sample_deadline_secs": 1.0}
    async with started(tmp_path, engine=ENDLESS, streamed=True, proxied=True, rollout=deadline) as world:
        await world.ask(make_group(0, 1))
        await until(lambda: bool(log) and log[0].partial is not None and log[0].partial.tokens > 0)
        world.proxies[0].stall()
        (sample,) = (await world.answer()).samples
    assert (sample.status, len(log)) == ("truncated", 1)
    assert response_ids(sample) == log[0].outputs[0].output_ids != []


async def test_the_clock_of_a_rollout_counts_all_its_turns(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, rollout={"sample_deadline_secs": 10.0, "max_turns": 3}, **ONCE) as world:
        await world.come_back(make_group(0, 2), make_sample(1, generate_s=10.5, status="completed"))
        (sample,) = (await world.answer()).samples
    assert (sample.status, sample.response_length, sample.turns) == ("truncated", 4, 2)
    assert log == []


async def test_unfinished_members_are_begun_anew_with_a_fresh_seed(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, engine=ENDLESS, rollout={**LONG, "group_deadline_secs": 1.0}) as world:
        ends_from(core_of(world.engines[0]), 3)
        samples = await world.rollouts(make_group(0, 3))
        assert world.extra("deadline_replaced") == 3
        assert world.extra("deadline_tokens_dropped") > 0
    first, *rest = log
    assert [e.request.prompts[0] for e in rest] == [[1, 2, 3]] * 3
    assert len({e.params.sampling_seed for e in log}) == 4, "each begins with a seed that nobody had"
    assert first.params.n == 3
    for sample in samples:
        [second] = [e for e in rest if e.outputs[0].output_ids == response_ids(sample)]
        assert response_ids(sample) == written([second], [0], sample)
        assert (sample.status, sample.replaced, sample.response_length) == ("completed", 1, LENGTH)


async def test_members_that_are_in_time_stay_and_the_rest_has_one_second_try(tmp_path: Path, log: Log) -> None:
    uneven = msgspec.structs.replace(simulated(STEP_MS).simulated, length_mean=1000.0, length_sigma=3.0)
    engine = msgspec.structs.replace(ENDLESS, simulated=msgspec.structs.replace(uneven, length_cap=1_000_000))
    async with started(tmp_path, engine=engine, rollout={**LONG, "group_deadline_secs": 0.6}) as world:
        await world.ask(make_group(0, 8))
        await until(lambda: core_of(world.engines[0]).schedule.running > 0)
        core_of(world.engines[0]).schedule._writer._config = ENDLESS.simulated
        samples = await world.whole(8)
        late = int(world.extra("deadline_replaced"))
        assert world.extra("deadline_truncated") == late
    assert 0 < late < 8
    assert len(log) == 1 + late, "a second deadline ends it"
    assert (
        sorted((s.status, s.replaced) for s in samples) == [("completed", 0)] * (8 - late) + [("truncated", 1)] * late
    )
    for sample in (s for s in samples if s.replaced == 0):
        assert response_ids(sample) == log[0].outputs[sample.index].output_ids


@pytest.mark.parametrize("case", ["evaluation", "second turn"])
async def test_what_is_never_begun_anew(case: str, tmp_path: Path, log: Log) -> None:
    """An evaluation must not favour short answers; what a tool did must not be done twice."""
    deadlines = {**LONG, "group_deadline_secs": 0.2, "sample_deadline_secs": 0.6, "max_turns": 2}
    async with started(tmp_path, engine=ENDLESS, rollout=deadlines, **ONCE) as world:
        if case == "evaluation":
            await world.ask(make_group(0, 1, purpose="eval", pinned_version=0))
            (sample,) = (await take(await world.rig.inlet("once"))).samples
        else:
            await world.come_back(make_group(0, 2), make_sample(1))
            (sample,) = (await world.answer()).samples
        assert world.extra("deadline_replaced") == 0
    assert (sample.status, sample.replaced, len(log)) == ("truncated", 0, 1)
    assert sample.generate_s >= (0.6 if case == "evaluation" else 0.2)


# What a custom stage gets for free: custody, failures as data, bounded concurrency, an account of its time.


async def join(rig: Rig) -> Ports:
    return await rig.join({"in": ("shout", RolloutSlice)}, {"out": ("reward", RolloutSlice)})


async def worked(rig: Rig, stage: Shout, *slices: RolloutSlice) -> HubStats:
    """The stage has worked on all slices; what became of its output."""
    ports, feed = await join(rig), await rig.outlet("shout")
    async with running(stage, ports) as task:
        for number, slice_ in enumerate(slices):
            await feed.send(slice_, str(number))
        rig.hubs["shout"].finish()
        await task
    return rig.hubs["reward"].stats()


def asked(group_id: int, label: str = "x") -> RolloutSlice:
    return make_slice(group_id, make_sample(0, response="hi"), make_sample(1, response="yo"), label=label)


def test_a_custom_stage_is_a_dozen_lines() -> None:
    assert len(inspect.getsource(Shout).splitlines()) <= 12


async def test_work_that_raises_cancelled_error_costs_no_place_for_messages(rig: Rig) -> None:
    class Cancelled(Shout):
        async def process(self, message: RolloutSlice) -> RolloutSlice | None:
            raise asyncio.CancelledError

    await worked(rig, Cancelled(make_context(concurrency=2)), *map(asked, range(5)))
    out = await rig.inlet("reward")
    reasons = [sample.error for _ in range(5) for sample in (await take(out)).samples]
    assert reasons == ["Cancelled: CancelledError: "] * 10
    assert rig.letters == []


async def test_a_message_waits_for_what_its_stage_needs_and_fails_where_that_stays_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    now = [0.0]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds
        await idle()

    monkeypatch.setattr(base, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    monkeypatch.setattr(base, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]}))

    class Asking(Shout):
        async def process(self, message: RolloutSlice) -> RolloutSlice | None:
            if message.group.group_id or len(slept) < 9:
                raise InfrastructureError("the service is away")
            return await super().process(message)

    await worked(rig, Asking(make_context(concurrency=1)), asked(0), asked(1))
    out = await rig.inlet("reward")
    assert [sample.response for sample in (await take(out)).samples] == ["HI", "YO"]
    assert slept[:9] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    reasons = [sample.error for sample in (await take(out)).samples]
    assert reasons == ["Asking: InfrastructureError: the service is away"] * 2
    assert base.OUTAGE_S < sum(slept[9:]) < base.OUTAGE_S + 31
    assert rig.letters == []


async def test_none_means_nothing_to_pass_on(rig: Rig) -> None:
    assert (await worked(rig, Shout(make_context()), asked(0, "skip"))).accepted == 0


async def test_a_replica_that_is_killed_between_output_and_release_doubles_nothing(rig: Rig) -> None:
    ports = await join(rig)
    feed = await rig.outlet("shout")
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
    stats = rig.hubs["reward"].stats()
    assert (rig.hubs["shout"].stats().redelivered, stats.accepted, stats.duplicates) == (1, 1, 1)


async def test_concurrency_bounds_what_is_processed_at_a_time(rig: Rig) -> None:
    class Counting(Shout):
        now = most = 0

        async def process(self, message: RolloutSlice) -> RolloutSlice | None:
            self.now += 1
            self.most = max(self.most, self.now)
            await idle()
            self.now -= 1
            return message

    stage = Counting(make_context(concurrency=3))
    stats = await worked(rig, stage, *map(asked, range(10)))
    assert (stage.most, stats.accepted) == (3, 10)


async def test_a_bug_of_the_stage_itself_ends_the_replica(rig: Rig) -> None:
    class Broken(Shout):
        async def _serve(self, *_: object) -> None:
            raise KeyError("nowhere")

    with ended_by(KeyError, "nowhere"):
        async with running(Broken(make_context()), await join(rig)):
            await idle()


def test_a_loop_stage_must_say_what_it_wants() -> None:
    with pytest.raises(TypeError, match=r"the loop stage Forgetful must define the class method wants"):
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
    with pytest.raises(ValueError, match="x"), activity.working(), activity.sending():
        raise ValueError("x")
    spend(32)
    assert activity.settle() == {"starved": 33.0, "busy": 10.0, "blocked": 4.0, "stalled": 16.0}
    assert activity.in_flight == 0


async def test_a_slice_above_the_limit_goes_on_failed_with_the_reason_and_the_replica_lives(rig: Rig) -> None:
    await rig.stream("reward", RolloutSlice, max_message_bytes=4_000)
    large = make_slice(0, make_sample(0, n=2_000), make_sample(1, n=2_000))
    await worked(rig, Shout(make_context()), large, asked(1))
    out = await rig.inlet("reward")
    found = {slice_.group.group_id: slice_.samples for slice_ in [await take(out), await take(out)]}
    assert [(s.index, s.status, s.length) for s in found[0]] == [(0, "failed", 0), (1, "failed", 0)]
    assert all("max_message_bytes" in (s.error or "") and s.fault() is None for s in found[0])
    assert [s.response for s in found[1]] == ["HI", "YO"]
    stats = rig.hubs["shout"].stats()
    assert (stats.settled, stats.redelivered, rig.letters) == (2, 0, [])
