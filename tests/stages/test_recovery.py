"""Recovery files of the trainer: batches since the newest state, and when a recovery point is worth its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.checkpoint import CheckpointError
from stages.errors import SavedBatchError
from stages.train import recovery as recovery_module
from stages.train.recovery import Recovery, remove_superseded
from tests.stages.stage_rig import make_slice


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(tmp_path: Path, clock: Clock, *, model_bytes: int = 0) -> Recovery:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"\0" * model_bytes)
    found = Recovery(tmp_path / "run", model, clock)
    found.clear()
    return found


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "trainer").glob("*"))


def state(directory: Path) -> None:
    directory.mkdir()
    (directory / "weights").write_bytes(b"1234")


def test_a_recovery_point_takes_the_place_of_all_before_it(tmp_path: Path) -> None:
    kept = made(tmp_path, Clock())
    for step in (1, 2, 3):
        kept.keep(step, [make_slice(group_id) for group_id in (7, step)])
    assert [slice_.group.group_id for slice_ in kept.batch(2)] == [7, 2], "in the order of training"
    kept.save(2, state)
    assert names(tmp_path) == ["batch-00000003.msgpack", "state-00000002"]
    kept.save(3, state)
    assert names(tmp_path) == ["state-00000003"]
    assert kept.newest_state(3) == (3, tmp_path / "run" / "trainer" / "state-00000003")
    assert kept.newest_state(2) is None, "the ledger does not count its step"


def test_a_committed_checkpoint_removes_what_it_holds(tmp_path: Path) -> None:
    kept = made(tmp_path, Clock())
    kept.keep(1, [make_slice(0)])
    kept.save(1, state)
    kept.keep(2, [make_slice(1)])
    kept.keep(3, [make_slice(2)])
    remove_superseded(tmp_path / "run", 2)
    assert names(tmp_path) == ["batch-00000003.msgpack"]
    remove_superseded(tmp_path / "run", 3)
    assert not (tmp_path / "run" / "trainer").exists()
    remove_superseded(tmp_path / "run", 4)


def test_a_batch_that_cannot_be_read_names_its_file(tmp_path: Path) -> None:
    kept = made(tmp_path, Clock())
    with pytest.raises(SavedBatchError, match=r"batch-00000001.msgpack cannot be read .* --resume"):
        kept.batch(1)


def test_recovery_points_take_at_most_a_fiftieth_of_the_time(tmp_path: Path) -> None:
    clock = Clock()
    kept = made(tmp_path, clock)
    kept.keep(1, [make_slice(0)])
    clock.now = 59.0
    assert not kept.due()
    clock.now = 60.0
    assert kept.due()
    kept.saved(10.0)  # a checkpoint, which took that long
    clock.now += 499.0
    assert not kept.due()
    clock.now += 1.0
    assert kept.due()


def test_the_first_recovery_point_of_a_large_model_waits_for_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_module, "DISK_BYTES_PER_S", 100.0)
    clock = Clock()
    kept = made(tmp_path, clock, model_bytes=1000)  # 8000 bytes, 80 s, so every 4000 s
    kept.keep(1, [make_slice(0)])
    clock.now = 3999.0
    assert not kept.due()
    clock.now = 4000.0
    assert kept.due()


def test_no_recovery_point_fills_the_disk_or_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    kept = made(tmp_path, clock)
    kept.keep(1, [make_slice(0)])

    def full(directory: Path) -> None:
        directory.mkdir()
        raise CheckpointError("no space left")

    kept.save(1, full)
    assert names(tmp_path) == ["batch-00000001.msgpack"]
    clock.now = 1e6
    assert not kept.due(), "it is not tried again"

    monkeypatch.setattr(recovery_module, "STATE_FACTOR", 1 << 60)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 1000)
    monkeypatch.setattr(recovery_module, "DISK_BYTES_PER_S", 1e300)
    small = Recovery(tmp_path / "run", tmp_path / "model", clock)
    clock.now = 2e6
    assert not small.due()


def test_a_full_disk_costs_the_recovery_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recovery = Recovery(tmp_path, tmp_path)
    recovery.keep(1, [])
    files = recovery_module.write_batch

    def full(path: Path, groups: object) -> None:
        raise CheckpointError(f"no room for {path}")

    monkeypatch.setattr(recovery_module, "write_batch", full)
    recovery.keep(2, [])
    assert not recovery.home.exists(), "its room is free for the run"
    assert "step 2 could not be kept" in caplog.text
    monkeypatch.setattr(recovery_module, "write_batch", files)
    recovery.keep(3, [])
    assert not recovery.home.exists(), "without batch 2, batch 3 is of no use"
    assert not recovery.due()
    with pytest.raises(SavedBatchError, match="--resume"):
        recovery.batch(1)
