"""Whole runs with responses that live for many batches: stale tokens are masked, and N follows the lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.record.metrics import read_metrics
from tests.pipeline.launching import NO_DATA, SIMULATED, made_model, succeed

pytestmark = pytest.mark.slow

# 16 slots for batches of 16 rollouts; the longest response lives for eight batches.
LONG_TAIL = [
    *NO_DATA, *made_model(), "--prompt-data", "arithmetic", *SIMULATED, "--rollout-max-response-len", "800",
    "--rollout-max-context-len", "1000", "--engine-slots", "16", "--server-concurrency", "16",
    "engine.simulated.length_mean=100", "engine.simulated.length_cap=800", "engine.simulated.time_scale=0.3",
    "--simulated-step-s", "0.2",
]  # fmt: skip


def test_stale_tokens_are_masked_and_their_groups_are_trained(tmp_path: Path) -> None:
    masked = succeed(
        tmp_path / "masked", *LONG_TAIL, "--num-rollout", "16", "--async-unused-samples-handler", "train_masked"
    )
    rows = read_metrics(masked.run_dir / "metrics.jsonl")
    tokens = sum(row.get("rollout/masked_stale_tokens", 0.0) for row in rows)
    summary = masked.summary
    assert tokens > 0
    assert summary["goodput"]["waste"]["stale"] >= tokens
    assert summary["staleness"]["max"] <= 2 == summary["staleness"]["bound"]
    assert summary["groups"]["trained"] == 16 * 4
    dropped = succeed(tmp_path / "dropped", *LONG_TAIL, "--num-rollout", "16")
    assert dropped.summary["groups"]["stale"] > summary["groups"]["stale"], "the longest groups are not lost any more"
    assert summary["goodput"]["lost"]["tail"] > 0
    assert "goodput" in masked.out


def test_auto_follows_the_measured_lengths_and_a_resume_begins_where_it_was(tmp_path: Path) -> None:
    flags = [*LONG_TAIL, "--async-buffer-size", "auto", "--max-staleness", "1", "--save-interval", "24"]
    run = succeed(tmp_path / "run", *flags, "--num-rollout", "24")
    changes = run.summary["changes"]
    assert changes[0]["what"] == "auto max_staleness"
    chosen = int(changes[-1]["value"].split()[0])
    assert 4 <= chosen <= 8
    assert "--async-buffer-size auto: N 1 to " in run.out
    rows = [row for row in read_metrics(run.run_dir / "metrics.jsonl") if "goodput/share" in row]
    assert rows[-1]["staleness/max"] <= 8
    assert max(row["staleness/max"] for row in rows) > 1, "the new bound is used"
    resumed = succeed(run.run_dir, "--resume", str(run.run_dir), "--num-rollout", "26")
    held = json.loads((run.run_dir / "config.json").read_text())["asynchrony"]
    assert held["async_buffer_size"] == "auto"
    assert held["max_staleness"] >= 4
    assert resumed.summary["steps"] == 26
