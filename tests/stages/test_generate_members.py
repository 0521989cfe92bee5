"""Members of a group leave when they end, and give their slots back; those that end together travel together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from configs.schema.rollout import EngineConfig
from models.engines.protocol import SamplingParams
from models.tiny import make_tiny_checkpoint
from stages.sampling.partial_rollouts import UnknownPolicy
from stages.sampling.requests import SHORT_RESPONSE, SampleRequest
from tests.stages.engine_rig import (
    FAST_MS,
    LENGTH,
    SLOW_MS,
    World,
    core_of,
    generating,
    record_exchanges,
    simulated,
    tensors_of,
    token_versions,
)
from tests.stages.stage_rig import idle, make_group, response_ids, until


def uneven() -> EngineConfig:
    """Responses of very different lengths."""
    slow = simulated(SLOW_MS)
    return msgspec.structs.replace(slow, simulated=msgspec.structs.replace(slow.simulated, length_sigma=1.0))


async def stop_while(world: World, some: Callable[[int], bool]) -> int:
    """Pause the engine when so many of its responses run; it is fast from then on."""
    core = core_of(world.engines[0])

    def running() -> int:
        core.load()  # brings the schedule up to now
        return core.schedule.running

    await until(lambda: some(running()))
    await core.pause("in_place")
    core.schedule.config = msgspec.structs.replace(core.schedule.config, a_ms=FAST_MS)
    assert core.schedule.running > 0
    return core.schedule.running


async def test_a_slow_member_keeps_its_own_slot_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(tmp_path, engine=uneven(), rollout={"server_concurrency": 4}) as world:
        await world.ready()
        core = core_of(world.engines[0])
        await world.ask(make_group(0, 6))
        await until(lambda: core.schedule.running == 6)
        await world.ask(make_group(1, 6))
        await idle()
        assert len(log) == 1, "all slots are taken"
        slow = await stop_while(world, lambda running: 0 < running <= 2)
        await until(lambda: len(log) == 2)
        here: list[int] = []
        while len(here) < 6 - slow:
            slice_ = await world.answer()
            assert slice_.group.group_id == 0
            here += [sample.index for sample in slice_.samples]
        assert world.rig.hubs["generate"].stats().settled == 0, "the slow ones still lease their group"
        await core.resume()
        late = [await world.answer()]
        while sum(len(slice_.samples) for slice_ in late) < slow + 6:
            late.append(await world.answer())
        here += [sample.index for slice_ in late if slice_.group.group_id == 0 for sample in slice_.samples]
        assert sorted(here) == list(range(6)), "each member once"
        await world.rig.hubs["generate"].wait_empty()


async def test_members_that_end_together_are_one_message_and_one_event_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(tmp_path) as world:
        await world.ready()
        for group_id in range(4):
            await world.ask(make_group(group_id, 8))
        slices = [await world.answer() for _ in range(4)]
        await world.rig.hubs["generate"].wait_empty()
        assert world.rig.hubs["reward"].stats().accepted == 4
    assert [[sample.index for sample in slice_.samples] for slice_ in slices] == [list(range(8))] * 4
    assert len(log) == 4, "one request for each group"
    assert [exchange.partial.chunks for exchange in log if exchange.partial is not None] == [8] * 4


async def test_a_real_engine_tells_of_each_member_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    model = make_tiny_checkpoint(tmp_path / "model", tokenizer="arithmetic", seed=0)
    config = EngineConfig(engine="embedded", engine_slots=16, engine_device="cpu")
    async with generating(
        tmp_path,
        engine=config,
        model=model,
        tensors=tensors_of([model]),
        rollout={"rollout_max_response_len": 40},
    ) as world:
        await world.ready()
        await world.ask(make_group(0, 8))
        samples = await world.whole(8)
    [exchange] = log
    assert exchange.partial is not None
    assert exchange.partial.chunks == 8
    for sample, output in zip(samples, exchange.outputs, strict=True):
        assert response_ids(sample) == output.output_ids
        assert token_versions(sample) == [0] * len(output.output_ids)
        assert sample.fault() is None


@pytest.mark.parametrize(("budget", "streamed"), [(SHORT_RESPONSE, False), (SHORT_RESPONSE + 1, True)])
async def test_short_answers_are_not_worth_a_stream(
    budget: int, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(tmp_path, rollout={"rollout_max_response_len": budget}) as world:
        await world.ready()
        await world.ask(make_group(0, 3))
        await world.whole(3)
    assert [exchange.partial is not None for exchange in log] == [streamed]


async def test_a_member_that_an_update_aborts_goes_on_while_others_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(tmp_path, engine=uneven(), pause_mode="abort") as world:
        await world.ready()
        await world.ask(make_group(0, 6))
        slow = await stop_while(world, lambda running: 0 < running < 6)
        world.weights.publish(1)
        samples = await world.whole(6)
    assert len(log) == 1 + slow
    assert [sample.index for sample in samples] == list(range(6))
    assert sorted(sample.resumed for sample in samples) == [0] * (6 - slow) + [1] * slow
    assert {version for s in samples if not s.resumed for version in s.model_versions} == {0}


# The sampler by itself


def asked(n: int, **fields: object) -> SampleRequest:
    values: dict[str, object] = {"token_ids": [1, 2, 3], **fields}
    return SampleRequest(SamplingParams(n=n, max_new_tokens=LENGTH, sampling_seed=5), **values)  # type: ignore[arg-type]


async def test_members_come_in_the_order_in_which_they_end_and_are_sorted_in_the_whole(tmp_path: Path) -> None:
    async with generating(tmp_path, engine=uneven()) as world:
        await world.ready()
        sampler = world.stage.sampler
        async with sampler.stream(asked(6)) as members:
            ended = [(index, len(result.token_ids)) async for index, result in members]
        whole = await sampler.sample(asked(6))
    assert [n for _, n in ended] == sorted(n for _, n in ended)
    assert sorted(index for index, _ in ended) == list(range(6))
    assert [len(result.token_ids) for result in whole] == [n for _, n in sorted(ended)]
    assert {result.finish for result in whole} <= {"stop", "length"}


async def test_who_leaves_a_stream_ends_its_request(tmp_path: Path) -> None:
    async with generating(tmp_path, engine=uneven()) as world:
        await world.ready()
        core = core_of(world.engines[0])
        async with world.stage.sampler.stream(asked(6)) as members:
            await anext(members)
            assert core.schedule.running > 0
        await until(lambda: core.schedule.running == 0)
        [target] = world.stage.sampler.directory.serving()
        assert (target.in_flight, target.slots.taken) == (0, 0)


async def test_a_policy_that_nobody_has_fails_every_member_in_words(tmp_path: Path) -> None:
    async with generating(tmp_path) as world:
        results = await world.stage.sampler.sample(asked(2, policy="judge"))
        assert [result.finish for result in results] == ["failed", "failed"]
        assert isinstance(results[0].error, UnknownPolicy)
        assert str(results[0].error) == "no engine is called 'judge' here; the known names are policy"


async def test_a_deadline_of_the_whole_call_counts_waiting(tmp_path: Path) -> None:
    async with generating(tmp_path, start=0) as world:
        (result,) = await world.stage.sampler.sample(asked(1, deadline_s=0.05))
        assert result.finish == "failed"
        assert "it was not up within 0.05 s; see logs/engine-*.log" in str(result.error)


async def test_a_pinned_request_prefers_engines_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(tmp_path, engines=2) as world:
        await world.ready()
        entry = world.rig.entry(0)
        assert entry is not None
        value = msgspec.msgpack.encode(msgspec.structs.replace(entry, version=1))
        world.rig.topic.publish("directory/engine-0", value)
        sampler = world.stage.sampler
        await until(lambda: [t.entry.version for t in sampler.directory.serving() if t.entry] == [1, 0])
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(sampler.sample(asked(1, pinned_version=0)))
    assert {exchange.url for exchange in log} == {world.engines[1].url}
