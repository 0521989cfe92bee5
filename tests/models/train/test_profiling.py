"""Profiles of the trainer, written by torch itself; the memory history against a recorded device."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.resolve import resolve
from configs.schema import Config, TrainConfig
from configs.schema.run import DebugConfig
from models.errors import TrainConfigInvalid
from models.train.build import build_backend
from models.train.profiling import Profiler
from tests.models.train.rig import make_sequences


@pytest.mark.slow
def test_a_profile_holds_the_batches_of_its_window_and_no_other(tiny: Path, tmp_path: Path) -> None:
    train = TrainConfig(hf_checkpoint=str(tiny), train_device="cpu")
    debug = DebugConfig(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=3)
    backend = build_backend(resolve(Config(train=train, debug=debug)), 4, tmp_path)
    backend.setup()
    sequences = make_sequences(groups=2, per_group=1)
    written = tmp_path / "profile" / "rank-0.json.gz"
    for batch in range(4):
        assert written.exists() is (batch == 3)
        backend.begin_batch(rollouts=len(sequences), steps=2)
        backend.accumulate(sequences)
        with torch.profiler.record_function(f"batch {batch}"):
            backend.step()
            backend.step()
    names = [event.get("name") for event in json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]]
    assert {"batch 1", "batch 2"} <= set(names)
    assert not {"batch 0", "batch 3"} & set(names)
    assert "aten::mm" in names
    assert len(list(tmp_path.iterdir())) == 1


def test_a_batch_that_is_begun_anew_does_not_begin_the_profile_again(tmp_path: Path) -> None:
    profiler = Profiler(DebugConfig(use_pytorch_profiler=True, profile_step_start=0, profile_step_end=1), tmp_path)
    profiler.begin(0)
    torch.zeros(3).exp()
    profiler.begin(0)
    profiler.end(1)
    assert b"aten::exp" in gzip.decompress((tmp_path / "rank-0.json.gz").read_bytes())


def test_the_memory_history_is_that_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debug = DebugConfig(record_memory_history=True, memory_snapshot_num_steps=2, memory_snapshot_path="mine.pickle")
    if not torch.cuda.is_available():
        with pytest.raises(TrainConfigInvalid, match=r"sees no CUDA device, .*; leave --record-memory-history out"):
            Profiler(debug, tmp_path).setup()
    calls: list[Any] = []
    observers: list[Any] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options), _dump_snapshot=lambda path: calls.append(path)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    profiler, place = Profiler(debug, tmp_path), str(tmp_path / "rank-0-mine.pickle")
    profiler.setup()
    assert [list(options) for options in calls] == [["max_entries"]]
    profiler.end(1)
    assert len(calls) == 1
    observers[0](0, 1, 2, 3)
    assert calls[1:] == [place], "memory ran out"
    for batches in (2, 3):
        profiler.end(batches)
    assert calls[2:] == [place, {"enabled": None}]
    calls.clear()
    Profiler(DebugConfig(), tmp_path).setup()
    assert calls == []
