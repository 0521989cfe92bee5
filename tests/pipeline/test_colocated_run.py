"""A synchronous run whose trainer and engines share their devices in turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import SMALL, made_model, succeed

pytestmark = pytest.mark.slow


def test_engines_give_their_memory_back_for_every_batch(tmp_path: Path) -> None:
    """Two engines, four batches, an evaluation in between that still needs the older weights."""
    done = succeed(
        tmp_path / "run", *SMALL, *made_model(), "--mode", "sync", "--colocate", "--scale", "engine=2",
        "--eval-prompt-data", "sums=arithmetic@[0:8]", "--eval-interval", "2",
    )  # fmt: skip
    assert "colocate" not in done.err
    assert done.summary["groups"]["trained"] == 16
    assert done.summary["staleness"]["max"] == 0
    trace = json.loads((done.run_dir / "trace.json").read_text())
    spans = [one for one in trace["traceEvents"] if one.get("ph") == "b"]
    released = [one for one in spans if one["name"] == "release_memory"]
    assert len(released) == 2 * 4, "each engine gives its memory back before each batch"
    computed = [one for one in spans if one["name"] == "train"]
    assert min(one["ts"] for one in computed) > min(one["ts"] for one in released)
