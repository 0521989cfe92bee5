"""Deadlines: a rollout that is late is kept as truncated, one that holds its group up is begun anew, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages.messages import RolloutSlice
from tests.stages.engine_rig import (
    LENGTH,
    World,
    core_of,
    generating,
    record_exchanges,
    simulated,
    written,
)
from tests.stages.stage_rig import make_group, make_sample, response_ids, take, until

STEP_MS = 20.0  # a response of this many steps never ends by itself
ENDLESS = simulated(STEP_MS, length=1_000_000)
LONG: dict[str, Any] = {"rollout_max_response_len": 100_000}


def end_from_now_on(world: World) -> None:
    """What is asked from now on has the usual length and is made fast; what runs is as long as it was."""
    for server in world.engines:
        core_of(server).schedule._writer._config = simulated().simulated


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_late_rollout_is_kept_as_truncated(
    n: int, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    deadline = {**LONG, "sample_deadline_secs": 0.3}
    async with generating(tmp_path, engine=ENDLESS, streamed=streamed, rollout=deadline) as world:
        await world.ready()
        await world.ask(make_group(0, n))
        samples = (await world.answer()).samples
        await until(lambda: core_of(world.engines[0]).schedule.running == 0)
        assert world.extra("deadline_truncated") == n
        assert world.extra("reused_tokens") == 0, "nobody was lost"
    assert len(log) == 1, "nothing is asked again"
    for sample in samples:
        assert (sample.status, sample.turns, sample.replaced, sample.reused_tokens) == ("truncated", 1, 0, 0)
        assert 0 < sample.response_length < 100_000
        assert response_ids(sample) == written(log, [sample.index], sample)
        assert sample.fault() is None


async def test_a_hung_engine_cannot_keep_a_late_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.sampling.attempt.STOP_GRACE_S", 0.05)
    log = record_exchanges(monkeypatch)
    deadline = {**LONG, "sample_deadline_secs": 0.3}
    async with generating(tmp_path, engine=ENDLESS, streamed=True, proxied=True, rollout=deadline) as world:
        await world.ready()
        await world.ask(make_group(0, 1))
        await until(lambda: bool(log) and log[0].partial is not None and log[0].partial.tokens > 0)
        world.proxies[0].stall()
        (sample,) = (await world.answer()).samples
    assert (sample.status, len(log)) == ("truncated", 1)
    assert response_ids(sample) == log[0].outputs[0].output_ids != []


async def test_the_clock_of_a_rollout_counts_all_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(
        tmp_path,
        rollout={"sample_deadline_secs": 10.0, "max_turns": 3},
        inlets={"return": ("generate.return", RolloutSlice)},
        outlets={"loop.once": ("once", RolloutSlice)},
        loops=("once=tests.stages.custom_parts:Once",),
    ) as world:
        await world.ready()
        late = RolloutSlice(make_group(0, 2), (make_sample(1, generate_s=10.5, status="completed"),))
        await (await world.rig.outlet("generate.return")).send(late, late.key)
        (sample,) = (await world.answer()).samples
    assert (sample.status, sample.response_length, sample.turns) == ("truncated", 4, 2)
    assert log == []


async def test_unfinished_members_are_begun_anew_with_a_fresh_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(tmp_path, engine=ENDLESS, rollout={**LONG, "group_deadline_secs": 2.0}) as world:
        await world.ready()
        await world.ask(make_group(0, 3))
        await until(lambda: core_of(world.engines[0]).schedule.running == 3)
        end_from_now_on(world)
        samples = (await world.answer()).samples
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


async def test_members_that_are_in_time_stay_and_the_rest_has_one_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    uneven = msgspec.structs.replace(simulated(STEP_MS).simulated, length_mean=1000.0, length_sigma=3.0)
    engine = msgspec.structs.replace(ENDLESS, simulated=msgspec.structs.replace(uneven, length_cap=1_000_000))
    async with generating(tmp_path, engine=engine, rollout={**LONG, "group_deadline_secs": 0.6}) as world:
        await world.ready()
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
async def test_what_is_never_begun_anew(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation must not favour short answers; what a tool did must not be done twice."""
    log = record_exchanges(monkeypatch)
    deadlines = {**LONG, "group_deadline_secs": 0.3, "sample_deadline_secs": 1.0, "max_turns": 2}
    async with generating(
        tmp_path,
        engine=ENDLESS,
        rollout=deadlines,
        inlets={"return": ("generate.return", RolloutSlice)},
        outlets={"loop.once": ("once", RolloutSlice)},
        loops=("once=tests.stages.custom_parts:Once",),
    ) as world:
        await world.ready()
        if case == "evaluation":
            await world.ask(make_group(0, 1, purpose="eval", pinned_version=0))
            (sample,) = (await take(await world.rig.inlet("once"))).samples
        else:
            single = RolloutSlice(make_group(0, 2), (make_sample(1),))
            await (await world.rig.outlet("generate.return")).send(single, single.key)
            (sample,) = (await world.answer()).samples
        assert world.extra("deadline_replaced") == 0
    assert (sample.status, sample.replaced, len(log)) == ("truncated", 0, 1)
    assert sample.generate_s >= (1.0 if case == "evaluation" else 0.3)
