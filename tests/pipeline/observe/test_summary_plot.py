"""The end of a run: golden numbers of the summary, its file, its text, and the learning curve."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import SummaryError
from pipeline.facts.stats import LedgerCounts
from pipeline.observe.metrics import JsonlMetrics
from pipeline.observe.plot import Curve, curve_from_rows, plot_learning_curve, plot_metrics_file, smooth
from pipeline.observe.summary import (
    RewardSummary,
    RunSummary,
    StalenessSummary,
    WeightVersions,
    closing_text,
    efficiency_vs_bound,
    package_versions,
    read_summary,
    summarise_evals,
    summarise_reward,
    summarise_staleness,
    write_summary,
)


def test_staleness_of_a_histogram() -> None:
    assert summarise_staleness({0: 2, 1: 2, 2: 3}, 2) == StalenessSummary(mean=1.142857, p99=2, max=2, bound=2)
    assert summarise_staleness({0: 989, 1: 1, 5: 10, 9: 0}, None) == StalenessSummary(mean=0.051, p99=1, max=5)
    assert summarise_staleness({}, 3) == StalenessSummary(bound=3)


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 50), min_size=1))
def test_staleness_agrees_with_the_sorted_tokens(histogram) -> None:
    tokens = sorted(lag for lag, count in histogram.items() for _ in range(count))
    found = summarise_staleness(histogram, None)
    if tokens:
        assert found.max == tokens[-1]
        assert found.p99 == tokens[math.ceil(0.99 * len(tokens)) - 1]
        assert found.mean == pytest.approx(sum(tokens) / len(tokens), abs=1e-6)


def test_reward_over_the_first_and_last_tenth_at_least_five() -> None:
    assert summarise_reward([float(i) for i in range(100)]) == RewardSummary(first=4.5, last=94.5)
    assert summarise_reward([float(i) for i in range(20)]) == RewardSummary(first=2.0, last=17.0)
    assert summarise_reward([1.0, math.nan, 3.0]) == RewardSummary(first=2.0, last=2.0)
    assert summarise_reward([]) == RewardSummary()


def test_evals_by_data_set() -> None:
    found = summarise_evals([("a", 0, 0.1), ("b", 0, 0.5), ("a", 4, 0.9), ("a", 8, 0.7)])
    a = found.sets["a"]
    assert (a.first, a.last, a.best, a.best_version) == (0.1, 0.7, 0.9, 4)
    assert found.sets["b"].evaluations == 1
    assert (found.first, found.last, found.best) == (0.1, 0.7, 0.9), "the first data set is the run's own figure"
    assert summarise_evals([]).first is None


def test_efficiency_is_the_share_of_the_busiest_stage() -> None:
    assert efficiency_vs_bound({"generate": 0.8, "train": 0.9}) == 0.9
    assert efficiency_vs_bound({}) is None


def summary() -> RunSummary:
    return RunSummary(
        mode="async",
        exit_reason="completed",
        steps=50,
        wall_s=83.4,
        groups=LedgerCounts(admitted=100, trained=90, filtered=5, stale=2, failed=3),
        staleness=summarise_staleness({0: 50, 1: 50}, 2),
        reward=RewardSummary(first=0.35, last=0.61),
        eval=summarise_evals([("heldout", 0, 0.4), ("heldout", 25, 0.7), ("heldout", 50, 0.65)]),
        tokens_per_s=12_345.0,
        generated_tokens_per_s=15_000.0,
        efficiency_vs_bound=0.93,
        busiest_stage="train",
        wasted_tokens=100,
        wasted_share=0.1,
        weight_versions=WeightVersions(0, 50, 51, "delta", 12.5),
        restarts={"reward": 2, "train": 0},
        advice="train is the bottleneck",
        versions=package_versions(),
    )


def test_the_file_reads_back_and_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, summary())
    assert read_summary(path) == summary()
    assert os.listdir(path.parent) == ["summary.json"]
    plain = json.loads(path.read_text())
    assert plain["groups"]["open"] == 0
    assert (plain["wasted_tokens"], plain["wasted_share"]) == (100, 0.1)
    assert {"python", "torch", "msgspec"} <= plain["versions"].keys()
    with pytest.raises(SummaryError, match="does not exist: the run has not ended"):
        read_summary(tmp_path / "none.json")
    path.write_text("{}")
    with pytest.raises(SummaryError, match="is no run summary"):
        read_summary(path)


def test_the_closing_text_says_what_happened_where_it_is_and_what_next(tmp_path: Path) -> None:
    places = {"run": tmp_path, "checkpoint": tmp_path / "hf", "trace": tmp_path / "t.json"}
    again = "python launch.py --resume here"
    text = closing_text(summary(), places, tensorboard=tmp_path / "tb", resume_command=again)
    for words in (
        "completed: 50 steps in 1:23 (async)",
        "0.350 -> 0.610",
        "0.400 -> 0.650 (best 0.700 at version 25)",
        "mean 0.50, p99 1, max 1, bound 2",
        "12.3k trained",
        "51 versions by delta, differences of 1/12.5 of the bytes",
        "busiest stage (train) at work 93% of the time",
        "advice        train is the bottleneck",
        "90 trained, 5 filtered, 2 stale, 3 failed, 0 discarded, 0 in flight",
        "reward 2",
        f"AutoModelForCausalLM.from_pretrained('{tmp_path}/hf')",
        f"tensorboard --logdir {tmp_path}/tb",
        "ui.perfetto.dev",
        "python launch.py --resume here",
    ):
        assert words in text, words
    assert "train 0" not in text
    bare = closing_text(summary(), {"run": tmp_path})
    assert "Next:" not in bare


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_the_curve_is_a_png_drawn_from_the_metrics_file(tmp_path: Path) -> None:
    writer = JsonlMetrics(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        row = {"reward/mean": step / 50, "staleness/mean": 0.5, "staleness/max": 2.0, "train/loss": 0.1}
        if step % 10 == 0:
            row |= {"eval/heldout": step / 60, "eval/heldout/version": step, "eval/heldout-truncated_ratio": 0.0}
        writer.write(step, row, wall_s=step, trained_tokens=step)
    writer.close()
    out = plot_metrics_file(tmp_path / "metrics.jsonl", tmp_path / "curve.png", title="run", staleness_bound=2)
    assert png_size(out) == (1500, 1050)
    assert out.stat().st_size > 20_000
    assert sorted(os.listdir(tmp_path)) == ["curve.png", "metrics.jsonl"]


def test_series_are_picked_by_name() -> None:
    rows = [
        {"step": 0, "eval/a": 0.1, "eval/a/version": 0},
        {"step": 1, "reward/mean": 0.2, "staleness/mean": 0.0, "staleness/max": 0},
        {"step": 2, "reward/mean": 0.3, "eval/a": 0.4, "eval/a/version": 2, "eval/a-pass@4": 0.9},
        {"step": 3, "eval/a": 0.5, "eval/b-c": 0.6, "eval/version": 3, "eval/time_s": 9.0, "eval/a-truncated_ratio": 0},
    ]
    curve = curve_from_rows(rows, staleness_bound=1)
    assert (curve.steps, curve.rewards) == ([1, 2], [0.2, 0.3])
    assert curve.evals == {"a": [(0, 0, 0.1), (2, 2, 0.4), (3, 3, 0.5)], "b-c": [(3, 3, 0.6)]}
    assert curve.staleness == [(1, 0.0, 0)]


@pytest.mark.parametrize(
    "curve",
    [
        Curve(),
        Curve(steps=[1], rewards=[0.5]),
        Curve(evals={"only": [(0, 0, 0.3)]}, staleness_bound=0),
        Curve(steps=[1, 2], rewards=[math.nan, math.nan], staleness=[(1, 0.0, math.nan)]),
    ],
    ids=["empty", "one step", "evaluation only", "nan"],
)
def test_poor_runs_are_drawn_too(tmp_path: Path, curve: Curve) -> None:
    assert png_size(plot_learning_curve(curve, tmp_path / "c.png")) == (1500, 1050)


def test_smoothing_is_unbiased_at_the_start_and_passes_over_gaps() -> None:
    assert smooth([2.0, 2.0, 2.0], 10) == pytest.approx([2.0, 2.0, 2.0])
    found = smooth([math.nan, 1.0, math.nan, 3.0], 3)
    assert math.isnan(found[0])
    assert found[1:3] == [1.0, 1.0]
    assert found[3] == pytest.approx((0.5 * 3 + 0.25 * 1) / 0.75)
