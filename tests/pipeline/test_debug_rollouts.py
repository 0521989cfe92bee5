"""Rollout batches saved by one run and trained by another; generation without training."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SMALL, Finished, made_model, succeed_here

from models.disk import latest_checkpoint
from stages.train.saved_groups import load_batch

pytestmark = pytest.mark.slow


def weights(done: Finished) -> bytes:
    checkpoint = latest_checkpoint(done.run_dir / "checkpoints")
    assert checkpoint is not None
    return b"".join(file.read_bytes() for file in sorted((checkpoint / "hf").glob("*.safetensors")))


@pytest.mark.parametrize("mode", [("sync",), ("async", "--dynamic-sampling-filter", "nonzero_std")])
def test_saved_batches_train_the_same_model_to_the_bit(tmp_path: Path, mode: tuple[str, ...]) -> None:
    flags = [*SMALL, *made_model(), "--lr", "1e-3", "--mode", *mode]
    template = str(tmp_path / "batches" / "{rollout_id}.msgpack")
    saved = succeed_here(tmp_path / "saves", *flags, "--save-debug-rollout-data", template)
    loads = ["--load-debug-rollout-data", template, "--debug-train-only"]
    loaded = succeed_here(tmp_path / "loads", *flags, *loads)
    assert weights(saved) == weights(loaded)
    assert loaded.summary["engine"]["count"] == 0
    if mode == ("sync",):
        assert saved.audit.batches == loaded.audit.batches, "the ids, too, are the same where no group was dropped"
    other = succeed_here(tmp_path / "other", *flags, *loads, "--lr", "2e-3")
    assert weights(other) != weights(saved)


def test_rollouts_alone_leave_the_weights_as_they_are(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--debug-rollout-only"]
    template = str(tmp_path / "{rollout_id}.msgpack")
    done = succeed_here(tmp_path / "run", *flags, "--save-debug-rollout-data", template)
    start = b"".join(file.read_bytes() for file in sorted(Path(made_model()[1]).glob("*.safetensors")))
    assert weights(done) == start
    assert done.summary["groups"]["trained"] == 16
    assert len(load_batch(template, 3)) == 4
