"""A generate stage that begins what another process had begun: it asks for the rest, and for nothing that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from models.engines.noise import sample_seed
from stages.records.once import EPISODES_DIR, groups_in
from tests.stages.engine_rig import (
    LENGTH,
    SLOW_MS,
    Exchange,
    core_of,
    freeze,
    generating,
    record_exchanges,
    simulated,
    token_versions,
)
from tests.stages.stage_rig import make_group, response_ids, until

GROUP = make_group(0, 3)
EVERY = 8
ROLLOUT = {"rollout_max_response_len": LENGTH}
KEEPS: dict[str, Any] = {"checkpoint": {"save_interval": 1, "response_journal_tokens": EVERY}, "rollout": ROLLOUT}


def resumed(home: Path, life: int = 1) -> Path:
    """The directory of the next start of the run, with what is left of the rollouts."""
    after = home / f"life-{life}"
    after.mkdir()
    before = home if life == 1 else home / f"life-{life - 1}"
    (before / EPISODES_DIR).rename(after / EPISODES_DIR)
    return after


async def begun(tmp_path: Path, log: list[Exchange], *, streamed: bool) -> Exchange:
    """All members have more than one record; the stage is gone."""
    (tmp_path / EPISODES_DIR).mkdir()
    lives = {"options": {"lives": (0,)}}
    async with generating(tmp_path, engine=simulated(2 * SLOW_MS), streamed=streamed, **lives, **KEEPS) as world:
        await world.ready()
        await world.ask(GROUP)
        await until(lambda: log and log[0].partial is not None and log[0].partial.tokens >= 3 * (2 * EVERY + 1))
        await freeze(world.engines[0], tokens=3)
        await world.stage.journal.flush()
        core = core_of(world.engines[0])
        first = log[0]
        assert core.schedule.running
        for task in world.tasks:
            task.cancel()
        await until(lambda: first.error is not None)
    return first


@pytest.mark.parametrize("streamed", [False, True], ids=["every so many tokens", "sglang"])
async def test_a_resumed_run_asks_for_the_rest(streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = record_exchanges(monkeypatch)
    first = await begun(tmp_path, log, streamed=streamed)
    assert first.params.stream_interval == (None if streamed else EVERY)
    log.clear()
    lives = {"options": {"lives": (0, 0)}}
    async with generating(resumed(tmp_path), streamed=streamed, **lives, **KEEPS) as world:
        await world.ready()
        await world.ask(GROUP)
        samples = await world.whole(3)
        assert world.stage.journal.restored_tokens == sum(sample.reused_tokens for sample in samples)
        await world.stage.journal.flush()
        log.clear()
    assert len(groups_in(tmp_path / "life-1" / EPISODES_DIR)) == 1
    for sample in samples:
        kept = first.outputs[sample.index].output_ids[: sample.reused_tokens]
        assert len(kept) >= 2 * EVERY
        assert response_ids(sample)[: len(kept)] == kept
        assert (len(response_ids(sample)), sample.resumed, sample.status) == (LENGTH, 1, "truncated")
        assert token_versions(sample) == [0] * LENGTH
        assert sample.fault() is None
    async with generating(resumed(tmp_path, 2), streamed=streamed, options={"lives": (0, 0, 0)}, **KEEPS) as world:
        await world.ready()
        await world.ask(GROUP)
        again = await world.whole(3)
    assert [response_ids(sample) for sample in again] == [response_ids(sample) for sample in samples]
    assert log == [], "they had ended, and no engine was asked"


async def test_each_goes_on_with_its_own_seed_and_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = record_exchanges(monkeypatch)
    first = await begun(tmp_path, log, streamed=False)
    log.clear()
    async with generating(resumed(tmp_path), options={"lives": (0, 0)}, **KEEPS) as world:
        await world.ready()
        await world.ask(GROUP)
        samples = await world.whole(3)
    for sample in samples:
        prompt = [1, 2, 3, *response_ids(sample)[: sample.reused_tokens]]
        [asked] = [exchange for exchange in log if exchange.request.prompts[0] == prompt]
        assert asked.params.sampling_seed == sample_seed(first.params.sampling_seed or 0, sample.index)
        assert asked.params.max_new_tokens == LENGTH - sample.reused_tokens


@pytest.mark.parametrize(
    ("version", "bound", "reused"),
    [(2, 2, True), (3, 2, False), (1, 0, False)],
    ids=["fresh enough", "too old", "synchronous"],
)
async def test_what_is_too_old_to_be_trained_is_made_anew(
    version: int, bound: int, reused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(tmp_path, record_exchanges(monkeypatch), streamed=False)
    asynchrony = {"max_staleness": bound}
    async with generating(resumed(tmp_path), options={"lives": (0, version)}, asynchrony=asynchrony, **KEEPS) as world:
        world.weights.publish(version)
        await world.weights.landed(version)
        await until(lambda: world.stage.sampler.directory.published == version)
        await world.ask(GROUP)
        samples = await world.whole(3)
    assert [sample.reused_tokens > 0 for sample in samples] == [reused] * 3
    assert {min(token_versions(sample)) for sample in samples} == {0 if reused else version}


async def test_without_partial_rollouts_a_response_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await begun(tmp_path, record_exchanges(monkeypatch), streamed=False)
    never = {**KEEPS, "rollout": {**ROLLOUT, "partial_rollout": False}}
    async with generating(resumed(tmp_path), options={"lives": (0, 0)}, **never) as world:
        await world.ready()
        await world.ask(replace(GROUP, seed=GROUP.seed))
        assert {sample.reused_tokens for sample in await world.whole(3)} == {0}
