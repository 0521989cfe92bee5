"""Whether a node has the run directory and the model of the controller, and one train stage at a time."""

from __future__ import annotations

import asyncio
import fcntl
from pathlib import Path

import msgspec
import pytest
from launching import SMALL

from configs.load import load
from configs.schema import Config
from pipeline.facts.run_directory import RunDir
from pipeline.hosts.launcher import shared_files
from pipeline.hosts.worker import TRAINER_LOCK, only_trainer


def model(place: Path, weights: bytes) -> Path:
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(weights)
    return place


def config(checkpoint: Path, *flags: str) -> Config:
    return load([*SMALL, "--hf-checkpoint", str(checkpoint), *flags]).config


def test_a_run_directory_is_known_by_what_nobody_can_guess(tmp_path: Path) -> None:
    checkpoint = model(tmp_path / "model", b"w" * 100)
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        told = shared_files(rundir, config(checkpoint))
        assert told.lacking() is None
        rundir.path.rename(tmp_path / "away")
        (tmp_path / "run").mkdir()  # as another machine may have one, with all that a run leaves
        for path in (tmp_path / "away").iterdir():
            if path.name != rundir.seal.name:
                path.rename(tmp_path / "run" / path.name)
        assert told.lacking() == f"does not see the controller's run directory {tmp_path / 'run'}"
    with RunDir(tmp_path / "again").open(resume=False) as rundir:
        (rundir.path / ".seal-0123").touch()  # a run that was killed
        rundir.write_config("")
    with RunDir(tmp_path / "again").open(resume=True) as rundir:
        assert [path.name for path in rundir.path.glob(".seal-*")] == [rundir.seal.name]
        assert shared_files(rundir, config(checkpoint)).lacking() is None
    assert list((tmp_path / "again").glob(".seal-*")) == []


def test_a_model_is_compared_by_what_it_holds(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 4096
    checkpoint, reference = model(tmp_path / "model", weights), model(tmp_path / "reference", weights)
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        told = shared_files(rundir, config(checkpoint, "--ref-load", str(reference), "--kl-loss-coef", "0.1"))
        assert sorted(told.models) == [str(checkpoint), str(reference)]
        assert told.lacking() is None
        (checkpoint / "README").touch()  # nobody reads it
        assert told.lacking() is None
        (checkpoint / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 4096)
        other = f"has another model than the controller's at {checkpoint}, or not all of its files"
        assert told.lacking() == other
        (checkpoint / "model.safetensors").unlink()
        assert told.lacking() == other
        (checkpoint / "model.safetensors").write_bytes(weights)
        (reference / "config.json").unlink()
        (reference / "model.safetensors").unlink()
        reference.rmdir()
        assert told.lacking() == f"does not see the controller's model {reference}"
        assert msgspec.structs.replace(told, models={}).lacking() is None
        assert shared_files(rundir, config(Path("org/name"))).models == {}


async def test_a_train_stage_waits_for_the_end_of_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()

    async def train() -> None:
        async with only_trainer(tmp_path):
            begun.set()
            with (tmp_path / TRAINER_LOCK).open("w") as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(20):
        with (tmp_path / TRAINER_LOCK).open("w") as zombie:
            fcntl.flock(zombie, fcntl.LOCK_EX)
            tasks.create_task(train())
            while "another train stage still writes" not in caplog.text:  # noqa: ASYNC110  (a log announces nothing)
                await asyncio.sleep(0.01)
            assert not begun.is_set()
        await begun.wait()
    with (tmp_path / TRAINER_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
