"""An engine that leaves a run that goes on: it gets nothing new, and what it holds is made to its end elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.engines.noise import sample_seed
from stages.topic_values import LEAVE, carrying
from tests.stages.engine_rig import (
    FAST_MS,
    SLOW_MS,
    core_of,
    freeze,
    generating,
    record_exchanges,
    sent_to,
    simulated,
    written,
)
from tests.stages.stage_rig import make_group, response_ids, until

PROMPT = [1, 2, 3]


async def test_partial_output_goes_on_elsewhere_and_nothing_new_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = record_exchanges(monkeypatch)
    async with generating(tmp_path, engines=2, engine=simulated(SLOW_MS)) as world:
        await world.ready()
        core_of(world.engines[1]).schedule.config = simulated(FAST_MS).simulated
        await world.ask(make_group(0, 2, prompt=PROMPT))
        await freeze(world.engines[0], tokens=6)
        world.rig.topic.publish(f"{LEAVE}engine-0", b"")
        samples = await world.whole(2)
        await world.rig.topic_until(lambda: (entry := world.rig.entry()) is not None and entry.state == "left")
        assert sorted(carrying(world.rig.topic)) == ["engine-1"], "nobody waits for weights to land in it"
        assert core_of(world.engines[0]).schedule.running == 0
        await until(lambda: world.serving() == ["engine-1"])
        for group in range(1, 5):
            await world.ask(make_group(group, 1, prompt=PROMPT))
            await world.whole(1)
        world.weights.publish(1)
        await world.weights.landed(1, engine=1)
    [first] = sent_to(log, world.engines[0])
    rest = list(sent_to(log, world.engines[1]))
    for sample in samples:
        kept = first.outputs[sample.index].output_ids
        assert len(kept) >= 3
        [second] = [e for e in rest if e.request.prompts[0] == [*PROMPT, *kept]]
        assert second.params.sampling_seed == sample_seed(first.params.sampling_seed or 0, sample.index)
        assert response_ids(sample) == written([first, second], [sample.index, 0], sample)
        assert sample.status == "completed"


async def test_an_engine_that_leaves_takes_no_weights_that_are_published_meanwhile(tmp_path: Path) -> None:
    async with generating(tmp_path, engines=2) as world:
        await world.ready()
        world.rig.topic.publish(f"{LEAVE}engine-1", b"")
        world.weights.publish(1)
        await world.weights.landed(1)
        await world.rig.topic_until(lambda: (entry := world.rig.entry(1)) is not None and entry.state == "left")
        assert core_of(world.engines[1]).label in ("0.0", "0.1"), "in whichever order it heard of the two"
        world.weights.publish(2)
        await world.weights.landed(2)
        assert core_of(world.engines[1]).label != "0.2"
