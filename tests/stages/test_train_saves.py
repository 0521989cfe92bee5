"""Saves that are written while the next batch trains, and a backend that has to be told of the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.stage_rig import make_slice, take
from tests.stages.train_rig import Recorder, training


async def test_a_save_in_the_background_is_reported_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "finish_save", lambda self: self.log.append("finish"), raising=False)
    saving = {"save_interval": 2, "async_save": True}
    async with training(tmp_path, monkeypatch, batch=1, total=5, eta=9, checkpoint=saving) as one:
        await one.send(*(make_slice(group_id) for group_id in range(5)))
        found = [await take(one.reports) for _ in range(8)]
        assert [(type(report).__name__, report.step) for report in found] == [
            ("StepDone", 1),
            ("StepDone", 2),
            ("CheckpointReady", 2),
            ("StepDone", 3),
            ("StepDone", 4),
            ("CheckpointReady", 4),
            ("StepDone", 5),
            ("CheckpointReady", 5),
        ]
        order = [entry for entry in one.backend.log if entry in ("step", "save", "finish")]
        assert order == ["step", "step", "save", "step", "finish", "step", "save", "step", "finish", "save", "finish"]


async def test_a_drain_waits_for_the_save_that_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "finish_save", lambda self: self.log.append("finish"), raising=False)
    saving = {"save_interval": 1, "async_save": True}
    async with training(tmp_path, monkeypatch, batch=1, total=5, checkpoint=saving) as one:
        await one.send(make_slice(0))
        assert (await take(one.reports)).step == 1
        one.rig.topic.publish("drain", b"interrupted")
        saved = await take(one.reports)
        assert (type(saved).__name__, saved.step) == ("CheckpointReady", 1)
        assert [entry for entry in one.backend.log if entry in ("save", "finish")] == ["save", "finish"]
        await one.end()


async def test_a_backend_is_told_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "close", lambda self: self.log.append("close"), raising=False)
    async with training(tmp_path, monkeypatch, batch=1, total=1) as one:
        await one.send(make_slice(0))
        await take(one.reports)
        await take(one.reports)
        await one.end()
        await one.stage.close()
        assert one.backend.log[-1] == "close"
