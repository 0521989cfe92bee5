"""Metrics files, read by other readers, killed, torn and resumed; and the end of a run: summary and learning curve."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.errors import MetricsError, SummaryError
from pipeline.facts.stats import LedgerCounts
from pipeline.observe.metrics import JsonlMetrics, Metrics, TensorBoardMetrics, read_metrics
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

ROOT = Path(__file__).parents[3]


def test_rows_are_strict_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlMetrics(path)
    writer.write(1, {"train/loss": 0.25, "reward/mean": 1}, wall_s=1.23456, trained_tokens=100)
    writer.write(2, {"train/loss": math.nan, "a": math.inf, "b": -math.inf}, wall_s=2, trained_tokens=200)
    writer.close()
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    first, second = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert first == {"step": 1, "wall_s": 1.235, "trained_tokens": 100, "train/loss": 0.25, "reward/mean": 1.0}
    assert second["train/loss"] is None
    assert second["nonfinite"] == {"train/loss": "nan", "a": "inf", "b": "-inf"}
    assert list(read_metrics(path)) == [
        {"step": 1, "wall_s": 1.235, "trained_tokens": 100, "train/loss": 0.25, "reward/mean": 1.0},
        {"step": 2, "wall_s": 2.0, "trained_tokens": 200},
    ]


def test_a_name_of_the_rows_own_fields_is_refused(tmp_path: Path) -> None:
    writer = JsonlMetrics(tmp_path / "m.jsonl")
    with pytest.raises(MetricsError, match="'step' would overwrite"):
        writer.write(1, {"step": 2.0}, wall_s=0, trained_tokens=0)
    writer.close()


def test_every_row_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom pipeline.observe.metrics import JsonlMetrics\n"
        "writer = JsonlMetrics(Path(sys.argv[1]))\n"
        "for step in range(200):\n    writer.write(step, {'x': step}, wall_s=step, trained_tokens=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["x"] for row in read_metrics(path)] == list(range(200))


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_is_cut_off_and_writing_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    writer = JsonlMetrics(path)
    for step in (1, 2, 3):
        writer.write(step, {"x": step}, wall_s=step, trained_tokens=step)
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    writer = JsonlMetrics(path)
    writer.write(3, {"x": 33}, wall_s=3, trained_tokens=3)
    writer.close()
    assert [row["x"] for row in read_metrics(path)] == [1, 2, 33]
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_resume_drops_what_never_happened(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    writer = JsonlMetrics(path)
    for step in range(6):
        writer.write(step, {"x": step}, wall_s=step, trained_tokens=step)
    writer.close()
    JsonlMetrics(path, resume_step=3).close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":1}\n{"stap":2}\n{"step":3}\n')
    with pytest.raises(MetricsError, match="line 2 is no metrics row"):
        list(read_metrics(path))


def test_tensorboard_reads_the_same_values(tmp_path: Path) -> None:
    fan = Metrics(tmp_path, tensorboard=True)
    for step in range(1, 4):
        loss = math.nan if step == 2 else step / 8
        fan.write(step, {"train/loss": loss}, wall_s=step * 2.0, trained_tokens=step * 10)
    fan.close()
    fan.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert set(accumulator.Tags()["scalars"]) == {"train/loss", "axis/wall_s", "axis/trained_tokens"}
    scalars = accumulator.Scalars("train/loss")
    assert [event.step for event in scalars] == [1, 2, 3]
    assert [scalars[0].value, scalars[2].value] == [0.125, 0.375]
    assert math.isnan(scalars[1].value)
    assert [event.value for event in accumulator.Scalars("axis/trained_tokens")] == [10, 20, 30]
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [row.get("train/loss") for row in rows] == [0.125, None, 0.375]


def test_tensorboard_hides_the_steps_after_the_resumed_one(tmp_path: Path) -> None:
    first = TensorBoardMetrics(tmp_path)
    for step in range(1, 6):
        first.write(step, {"x": float(step)}, wall_s=step, trained_tokens=0)
    first.close()
    events = next(tmp_path.iterdir())
    events.rename(events.with_name(events.name.replace("tfevents.", "tfevents.0")))  # read first, whatever the clock
    second = TensorBoardMetrics(tmp_path, resume_step=3)
    second.write(4, {"x": 40.0}, wall_s=4, trained_tokens=0)
    second.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("x")] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_no_torch_and_no_tensorboard_at_import_and_no_torch_in_use(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "import pipeline.observe.metrics, pipeline.facts.trace, pipeline.observe.summary\n"
        "import pipeline.observe.view, pipeline.observe.table, pipeline.observe.plot\n"
        "heavy = {'torch', 'tensorboard', 'matplotlib', 'tensorflow', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from pipeline.observe.metrics import Metrics\n"
        "fan = Metrics(Path(sys.argv[1]), tensorboard=True)\n"
        "fan.write(1, {'a': 1.0}, wall_s=0, trained_tokens=0)\nfan.close()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_with_its_cure(tmp_path: Path) -> None:
    writer = JsonlMetrics(tmp_path / "m.jsonl")
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._file.fileno())
    with pytest.raises(MetricsError, match=r"m\.jsonl cannot be written .No space left.*choose another --run-dir"):
        writer.write(1, {"x": 1.0}, wall_s=0, trained_tokens=0)
    writer.close()


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
