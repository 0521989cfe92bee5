"""Settings that change while the run goes on: from which batch on, for whom, and what a pause leaves alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from configs.schema import Config, FilterConfig
from stages.messages import Settled, StepDone
from stages.topic_values import MOST_KEPT, SETTINGS, Settings, newest_settings, settings_at, write_settings
from tests.stages.group_rig import open_desk
from tests.stages.prompt_rig import prompting, step_done
from tests.stages.stage_rig import make_sample, make_slice, open_rig, take, until
from tests.stages.train_rig import training


def change(from_step: int, *, bound: int = 1, lr_scale: float = 1.0, filters: tuple[str, ...] = ()) -> Settings:
    return Settings(from_step, bound, lr_scale, filters)


async def test_for_a_batch_the_newest_change_counts_whose_step_has_come() -> None:
    async with open_rig() as rig:
        assert settings_at(rig.topic, 100) is None
        history = tuple(change(step, bound=step) for step in range(1, 3 * MOST_KEPT))
        rig.topic.publish(SETTINGS, write_settings((*history, change(60, bound=7))))
        assert settings_at(rig.topic, 40) == change(40, bound=40)
        assert settings_at(rig.topic, 59) == history[-1]
        assert settings_at(rig.topic, 60) == newest_settings(rig.topic) == change(60, bound=7)


async def test_the_trainer_takes_a_change_with_the_batch_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch 3 (the weights are of version 2) takes a token of version 0 by the bound 2, and would not by 1."""
    scales: list[float] = []
    begin_batch = "tests.stages.train_rig.Recorder.begin_batch"

    def begin(backend: object, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        assert begun.wait(30)
        scales.append(lr_scale)

    begun = threading.Event()
    monkeypatch.setattr(begin_batch, begin)
    async with training(tmp_path, monkeypatch, batch=1, total=4, eta=1) as one:
        await one.rig.topic.wait(0, "weights")
        changes = (change(3, bound=2, lr_scale=0.5), change(4, bound=2))
        one.rig.topic.publish(SETTINGS, write_settings(changes))
        await one.rig.topic_until(lambda: settings_at(one.rig.topic, 4) is not None)
        begun.set()
        await one.send(*(make_slice(i, make_sample(0, reward=1.0), make_sample(1, reward=0.0)) for i in range(5)))
        assert [(await one.report(StepDone)).groups for _ in range(3)] == [(0,), (1,), (2,)]
        assert (await one.report(Settled)).outcome == "stale", "for batch 4 it would be three versions old"
        await until(lambda: scales == [1.0, 1.0, 0.5, 1.0])


async def test_admission_follows_the_bound_when_its_batch_has_come() -> None:
    async with prompting(batch=2, eta=0) as one:
        await one.land(0)
        assert await one.admitted() == [0, 1]
        one.stage.bound(2, 3)
        assert await one.admitted() == []
        await one.report(step_done(0), step_done(1, 0, 1))
        await one.land(1)
        assert await one.admitted() == [2, 3], "batch 2 is the last one under the old bound"
        await one.report(step_done(2, 2, 3))
        assert await one.admitted() == [4, 5, 6, 7], "version 1, two ahead and its own"
        one.stage.bound(0, 3)
        await one.land(2)
        assert await one.admitted() == [], "what is out is more than the lower bound would admit"


async def test_a_paused_stage_admits_nothing_and_settles_what_is_out() -> None:
    async with prompting(batch=2, eta=0) as one:
        await one.land(0)
        assert await one.admitted() == [0, 1]
        one.stage.pause(True)
        await one.report(Settled(0, "filtered", "", tokens=1))
        assert await one.admitted() == []
        assert one.stage.ledger.open == 1
        one.stage.pause(False)
        assert await one.admitted() == [2]
        one.stage.pause(True)
        one.stage.drain("enough")
        await one.report(Settled(1, "discarded"), Settled(2, "discarded"), step_done(0))
        await until(one.stage.completed.is_set)


async def test_groups_meet_the_thresholds_that_were_changed_last() -> None:
    config = Config(filter=FilterConfig(dynamic_sampling_filter=("reward:0.0_0.4",)))
    async with open_desk(config) as one:
        slices = [make_slice(i, make_sample(0, reward=0.6), make_sample(1, reward=0.4)) for i in range(2)]
        await one.send(slices[0])
        assert (await take(one.settled)).detail == "reward_high"
        one.rig.topic.publish(SETTINGS, write_settings((change(9, filters=("reward:0.0_0.5",)),)))
        await until(lambda: one.stage._names == ("reward:0.0_0.5",))
        await one.send(slices[1])
        assert (await take(one.out)).group.group_id == 1
