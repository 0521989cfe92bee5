"""Metrics files, read by other readers, killed, torn and resumed; and the end of a run: summary and learning curve."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from models.disk import write_json
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.facts.stats import Changed, LedgerCounts, StageStats
from pipeline.observe.plot import Curve, curve_from_rows, plot_learning_curve, smooth
from pipeline.observe.report import summarise
from pipeline.observe.summary import (
    RewardSummary,
    RunSummary,
    StalenessSummary,
    WeightVersions,
    closing_text,
    package_versions,
    read_summary,
    summarise_evals,
    summarise_staleness,
)
from pipeline.record.goodput import MOST_REASONS, GroupOutcomes
from pipeline.record.metrics import JsonlMetrics, Metrics, TensorBoardMetrics, read_metrics
from pipeline.record.recorder import Recorder
from stages.messages import Settled, StepDone
from stages.prompts.ledger import Ledger, LedgerSnapshot
from stages.topic_values import EngineAddress, EngineEntry, PolicyDifference
from tests.stages.stage_rig import make_config
from tests.transport.memory_link import MemoryNetwork, MemoryNode

ROOT = Path(__file__).parents[3]


def write_rows(path: Path, *steps: int, resume_step: int | None = None) -> None:
    writer = JsonlMetrics(path, resume_step=resume_step)
    for step in steps:
        writer.write(step, {"x": step}, wall_s=step, trained_tokens=step)
    writer.close()


def test_rows_are_strict_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlMetrics(path)
    writer.write(1, {"train/loss": 0.25, "reward/mean": 1}, wall_s=1.23456, trained_tokens=100)
    writer.write(2, {"train/loss": math.nan, "a": math.inf, "b": -math.inf}, wall_s=2, trained_tokens=200)
    with pytest.raises(UsageError, match="'step' would overwrite"):
        writer.write(3, {"step": 2.0}, wall_s=0, trained_tokens=0)
    writer.close()
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    first, second = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert first == {"step": 1, "wall_s": 1.235, "trained_tokens": 100, "train/loss": 0.25, "reward/mean": 1.0}
    assert second["train/loss"] is None
    assert second["nonfinite"] == {"train/loss": "nan", "a": "inf", "b": "-inf"}
    assert list(read_metrics(path)) == [first, {"step": 2, "wall_s": 2.0, "trained_tokens": 200}]


def test_every_row_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom pipeline.record.metrics import JsonlMetrics\n"
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
    write_rows(path, 1, 2, 3)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    write_rows(path, 33)
    assert [row["x"] for row in read_metrics(path)] == [1, 2, 33]
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_resume_drops_what_never_happened_and_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_rows(path, *range(6))
    write_rows(path, resume_step=3)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    path.write_text('{"step":1}\n{"stap":2}\n{"step":3}\n')
    with pytest.raises(UsageError, match="line 2 is no metrics row"):
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_with_its_cure(tmp_path: Path) -> None:
    writer = JsonlMetrics(tmp_path / "m.jsonl")
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._file.fileno())
    with pytest.raises(UsageError, match=r"m\.jsonl cannot be written .No space left.*choose another --run-dir"):
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


def test_evals_by_data_set() -> None:
    found = summarise_evals([("a", 0, 0.1), ("b", 0, 0.5), ("a", 4, 0.9), ("a", 8, 0.7)])
    a = found.sets["a"]
    assert (a.first, a.last, a.best, a.best_version) == (0.1, 0.7, 0.9, 4)
    assert found.sets["b"].evaluations == 1
    assert (found.first, found.last, found.best) == (0.1, 0.7, 0.9), "the first data set is the run's own figure"
    assert summarise_evals([]).first is None


def summary() -> RunSummary:
    return RunSummary(
        mode="async", exit_reason="completed", steps=50, wall_s=83.4,
        groups=LedgerCounts(admitted=100, trained=90, filtered=5, stale=2, failed=3),
        staleness=summarise_staleness({0: 50, 1: 50}, 2), reward=RewardSummary(first=0.35, last=0.61),
        eval=summarise_evals([("heldout", 0, 0.4), ("heldout", 25, 0.7), ("heldout", 50, 0.65)]),
        tokens_per_s=12_345.0, generated_tokens_per_s=15_000.0, efficiency_vs_bound=0.93, busiest_stage="train",
        failed_rollouts={"no number": 2}, wasted_tokens=100, wasted_share=0.1,
        weight_versions=WeightVersions(0, 50, 51, "delta", 12.5),
        restarts={"reward": 2, "train": 0}, advice="train is the bottleneck", versions=package_versions(),
    )  # fmt: skip


def test_the_file_reads_back_and_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, summary())
    assert read_summary(path) == summary()
    assert os.listdir(path.parent) == ["summary.json"]
    plain = json.loads(path.read_text())
    assert plain["groups"]["open"] == 0
    assert (plain["wasted_tokens"], plain["wasted_share"]) == (100, 0.1)
    assert {"python", "torch", "msgspec"} <= plain["versions"].keys()
    with pytest.raises(UsageError, match="does not exist: the run has not ended"):
        read_summary(tmp_path / "none.json")
    path.write_text("{}")
    with pytest.raises(UsageError, match="is no run summary"):
        read_summary(path)


def test_the_closing_text_says_what_happened_where_it_is_and_what_next(tmp_path: Path) -> None:
    places = {"run": tmp_path, "checkpoint": tmp_path / "hf", "trace": tmp_path / "t.json"}
    again = "python launch.py --resume here"
    text = closing_text(summary(), places, tmp_path / "tb", again)
    for words in (
        "completed: 50 steps in 1:23 (async)", "0.350 -> 0.610", "0.400 -> 0.650 (best 0.700 at version 25)",
        "mean 0.50, p99 1, max 1, bound 2", "12.3k trained", "51 versions by delta, differences of 1/12.5 of the bytes",
        "busiest stage (train) at work 93% of the time", "advice           train is the bottleneck",
        "90 trained, 5 filtered, 2 stale, 3 failed, 0 discarded, 0 in flight", "reward 2",
        f"AutoModelForCausalLM.from_pretrained('{tmp_path}/hf')", f"tensorboard --logdir {tmp_path}/tb",
        "failed rollouts  2: no number", "ui.perfetto.dev", "python launch.py --resume here",
    ):  # fmt: skip
        assert words in text, words
    assert "train 0" not in text
    bare = closing_text(summary(), {"run": tmp_path}, None, None)
    assert "Next:" not in bare


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_the_curve_is_a_png_drawn_from_the_metrics_file_or_from_next_to_nothing(tmp_path: Path) -> None:
    writer = JsonlMetrics(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        row = {"reward/mean": step / 50, "staleness/mean": 0.5, "staleness/max": 2.0, "train/loss": 0.1}
        if step % 10 == 0:
            row |= {"eval/heldout": step / 60, "eval/version": step, "eval/heldout-truncated_ratio": 0.0}
        writer.write(step, row, wall_s=step, trained_tokens=step)
    writer.close()
    curve = curve_from_rows(read_metrics(tmp_path / "metrics.jsonl"), title="run", staleness_bound=2)
    out = plot_learning_curve(curve, tmp_path / "curve.png")
    assert png_size(out) == (1500, 1050)
    assert out.stat().st_size > 20_000
    assert sorted(os.listdir(tmp_path)) == ["curve.png", "metrics.jsonl"]
    for poor in (
        Curve(),
        Curve(steps=[1], rewards=[0.5]),
        Curve(evals={"only": [(0, 0, 0.3)]}, staleness_bound=0),
        Curve(steps=[1, 2], rewards=[math.nan, math.nan], staleness=[(1, 0.0, math.nan)]),
    ):
        assert png_size(plot_learning_curve(poor, tmp_path / "c.png")) == (1500, 1050)


def test_series_are_picked_by_name() -> None:
    rows = [
        {"step": 0, "eval/a": 0.1, "eval/version": 0},
        {"step": 1, "reward/mean": 0.2, "staleness/mean": 0.0, "staleness/max": 0},
        {"step": 2, "reward/mean": 0.3, "eval/a": 0.4, "eval/version": 2, "eval/a-pass@4": 0.9},
        {"step": 3, "eval/a": 0.5, "eval/b-c": 0.6, "eval/version": 3, "eval/time_s": 9.0, "eval/a-truncated_ratio": 0},
    ]
    curve = curve_from_rows(rows, staleness_bound=1)
    assert (curve.steps, curve.rewards) == ([1, 2], [0.2, 0.3])
    assert curve.evals == {"a": [(0, 0, 0.1), (2, 2, 0.4), (3, 3, 0.5)], "b-c": [(3, 3, 0.6)]}
    assert curve.staleness == [(1, 0.0, 0)]


def test_smoothing_is_unbiased_at_the_start_and_passes_over_gaps() -> None:
    assert smooth([2.0, 2.0, 2.0], 10) == pytest.approx([2.0, 2.0, 2.0])
    found = smooth([math.nan, 1.0, math.nan, 3.0], 3)
    assert math.isnan(found[0])
    assert found[1:3] == [1.0, 1.0]
    assert found[3] == pytest.approx((0.5 * 3 + 0.25 * 1) / 0.75)


# Filter metrics, the bias report and the warning about the effective sample size, from settlements alone.


def step(n: int, *groups: int, **metrics: float) -> StepDone:
    values = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StepDone(n, n, groups, values, tokens=10 * len(groups))


def filtered(
    group_id: int, reason: str, *, tokens: int = 40, rate: float | None = None, reward: float = 0.0
) -> Settled:
    return Settled(group_id, "filtered", reason, tokens=tokens, reward=reward, pass_rate=rate)


def test_drops_are_counted_by_reason_since_the_last_step() -> None:
    group_outcomes = GroupOutcomes(4)
    for group_id, reason in enumerate(["zero_std_0.0", "zero_std_0.0", "zero_std_1.0", "my own: reason!"]):
        group_outcomes.settled(filtered(group_id, reason))
    metrics = group_outcomes.step(step(1, 10, 11, rollout__raw_reward=0.5))
    assert {name: value for name, value in metrics.items() if "drop_" in name} == {
        "filter/drop_zero_std_0.0": 2,
        "filter/drop_zero_std_1.0": 1,
        "filter/drop_my_own_reason": 1,
    }
    assert metrics["filter/wasted_tokens"] == 160
    assert metrics["filter/accept_ratio"] == pytest.approx(2 / 6)
    assert metrics["filter/oversample_ratio"] == 3.0
    again = group_outcomes.step(step(2, 12, rollout__raw_reward=0.5))
    assert not any("drop_" in name for name in again)
    assert (again["filter/wasted_tokens"], again["filter/accept_ratio"]) == (0.0, 1.0)


def test_the_bias_report_compares_what_was_trained_with_what_was_not(tmp_path: Path) -> None:
    group_outcomes = GroupOutcomes(4)
    group_outcomes.settled(Settled(0, "stale", tokens=4 * 100, reward=0.0, pass_rate=0.0))
    group_outcomes.settled(Settled(1, "discarded", tokens=4))  # cut short: it has no length of its own
    group_outcomes.settled(Settled(4, "filtered", "zero_std_0.0, early", tokens=4, reward=0.0))  # as this one
    group_outcomes.settled(Settled(2, "trained", step=1, pass_rate=1.0))
    group_outcomes.settled(Settled(3, "trained", step=1, pass_rate=0.25))
    lengths = {"rollout/group_len/16": 1.0, "rollout/group_len/32": 1.0, "rollout/response_len/mean": 20.0}
    metrics = group_outcomes.step(StepDone(1, 1, (2, 3), lengths, 80))
    assert metrics["filter/trained_len_ratio"] == pytest.approx(20 / ((100 + 20 + 20) / 3))
    group_outcomes.write(tmp_path / "bias.json")
    report = json.loads((tmp_path / "bias.json").read_text())
    names = ("groups", "length_mean", "pass_rate_mean", "lengths", "pass_rates")
    trained, discarded = (tuple(report[outcome][name] for name in names) for outcome in ("trained", "discarded"))
    assert trained == (2, 20.0, 0.625, {"16": 1, "32": 1}, {"0.2": 1, "1.0": 1})
    assert report["stale"]["lengths"] == {"128": 1}
    assert discarded == (1, None, None, {}, {})
    assert (report["filtered"]["groups"], report["filtered"]["lengths"]) == (1, {})


@given(st.lists(st.text(max_size=12), max_size=80))
def test_names_of_metrics_stay_few_and_plain_whatever_the_reasons_are(reasons: list[str]) -> None:
    group_outcomes = GroupOutcomes(1)
    for group_id, reason in enumerate(reasons):
        group_outcomes.settled(filtered(group_id, reason))
    drops = {name: n for name, n in group_outcomes.step(step(1, 99)).items() if name.startswith("filter/drop_")}
    assert sum(drops.values()) == len(reasons)
    assert len(drops) <= MOST_REASONS + 1
    assert all(name.isascii() and " " not in name and name.count("/") == 1 for name in drops)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    config = make_config(observe={"use_tensorboard": False, "trace": False}, correction={"ess_warn": 0.5})
    with RunDir(tmp_path / "run").open(resume=False) as rundir, Recorder(config, rundir) as one:
        yield one


async def test_a_small_effective_sample_size_is_reported_once_in_fifty_steps(recorder: Recorder) -> None:
    lines: list[str] = []
    recorder.lines = lines.append
    for number in range(1, 120):
        ess = 0.9 if number == 1 else float("nan") if number == 2 else 0.31
        await recorder.step(step(number, number, train__ess=ess, rollout__raw_reward=0.0))
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 53", "step 103"]
    assert "train/ess is 0.31, below --ess-warn 0.5" in lines[0]
    assert "lower --async-buffer-size" in lines[0]


async def test_the_recorder_writes_what_the_tally_counts(recorder: Recorder) -> None:
    recorder.settled([(0, filtered(0, "too_long", tokens=7, reward=1.0, rate=1.0))])
    recorder.settled([(1, Settled(1, "trained", step=1, pass_rate=0.5))])
    await recorder.step(step(1, 1, rollout__raw_reward=0.5, rollout__response_len__mean=3.0))
    assert recorder.rewards == [0.75]
    recorder.__exit__(None, None, None)
    row = json.loads(recorder.rundir.metrics.read_text())
    assert (row["filter/drop_too_long"], row["passrate/mean"], row["ledger/skipped"]) == (1, 0.75, 0)
    assert {name: row[name] for name in recorder.newest_metrics} == recorder.newest_metrics, "what /metrics shows"
    assert "rollout/raw_reward" in recorder.newest_metrics
    report = json.loads((recorder.rundir.path / "bias.json").read_text())
    assert {outcome: line["groups"] for outcome, line in report.items()} == {"filtered": 1, "trained": 1}


async def test_the_speed_of_a_step_is_also_told_by_gpu(rundir: RunDir) -> None:
    with Recorder(make_config(), rundir, gpus=4) as recorder:
        recorder.view.stage(StageStats(stage="train", replica="train-0", unix_s=10.0, busy_s=1.0, starved_s=9.0))
        recorder.view.stage(StageStats(stage="train", replica="train-0", unix_s=20.0, busy_s=9.0, starved_s=11.0))
        recorder.settled([(0, Settled(0, "stale", tokens=7)), (0, filtered(1, "zero_std_1", tokens=7, reward=1.0))])
        recorder.training_started = recorder.last_step_s = time.monotonic() - 2.0
        await recorder.step(step(1, 1, 2))
    row = json.loads(recorder.rundir.metrics.read_text())
    assert row["perf/tokens_per_s"] == pytest.approx(row["trained_tokens"] / 2, rel=0.05)
    assert row["perf/tokens_per_gpu_per_s"] == row["perf/tokens_per_s"] / 4
    assert row["rollout/aborted_ratio"] == 0.25, "one of two that were trained and two that were not"
    shares = {name: value for name, value in row.items() if name.startswith("stage/")}
    assert shares == {
        "stage/train/busy": pytest.approx(0.8),
        "stage/train/starved": pytest.approx(0.2),
        "stage/train/blocked": 0.0,
        "stage/train/stalled": 0.0,
    }


async def test_the_recorder_tells_of_the_weights_on_their_way(recorder: Recorder) -> None:
    await recorder.step(step(1, 1))
    extra = {"delta_ratio": 12.5, "publish_s": 0.5}
    async with MemoryNode("run", "test", MemoryNetwork()) as node:
        topic = await node.topic_server("topic")
        stats = StageStats(stage="train", replica="train-0", unix_s=1.0, extra=extra)
        topic.publish("stats/train-0", msgspec.msgpack.encode(stats))
        for i, update_s in enumerate((0.25, 0.75)):
            entry = EngineEntry(f"engine-{i}", "", 0, state="serving", run_generation=0, version=1, update_s=update_s)
            entry = msgspec.structs.replace(entry, stall_s=update_s / 2)
            entry = msgspec.structs.replace(entry, proof=PolicyDifference(0.02 * i, 0.01 - 0.01 * i, 0.005))
            topic.publish(f"directory/engine-{i}", msgspec.msgpack.encode(entry))
        for i in range(3):
            address = EngineAddress(f"engine-{i}", "", 0)
            topic.publish(f"engine/engine-{i}", msgspec.msgpack.encode(address))
        judge = EngineAddress("frozen-judge", "", 0, "judge")
        topic.publish("engine/frozen-judge", msgspec.msgpack.encode(judge))
        recorder.observe(topic, {}, 0, 1)
        # Proven after the last look at the topic: steps may be shorter than the time between two.
        late = msgspec.structs.replace(entry, proof=PolicyDifference(0.03, 0.0, 0.005))
        topic.publish("directory/engine-1", msgspec.msgpack.encode(late))
    await recorder.step(step(2, 2))
    rows = [(row.name, row.version, row.update_s) for row in recorder.view.engine_rows()]
    assert rows == [("engine-0", 1, 0.25), ("engine-1", 1, 0.75), ("engine-2", None, None)]
    weights = summarise(recorder, recorder.config, "finished").weight_versions
    assert (weights.transport, weights.delta_ratio) == ("disk", 12.5)
    recorder.__exit__(None, None, None)
    first, second = map(json.loads, recorder.rundir.metrics.read_text().splitlines())
    names = ("perf/delta_ratio", "perf/publish_weights_time", "perf/update_weights_time")
    assert [second[name] for name in names] == [12.5, 0.5, 0.75]
    assert second["perf/update_stall_time"] == 0.375
    proof = ("train/policy_proof_max_diff", "train/policy_proof_mean_diff", "train/policy_proof_time")
    assert [second[name] for name in proof] == [0.03, 0.01, 0.005], "of the worst engine, at the step"
    assert first.keys().isdisjoint(proof)
    assert first.keys().isdisjoint(names), "nothing is told of what was not seen"


def test_waste_is_counted_as_it_is_seen_and_not_by_the_ledger_of_a_checkpoint(rundir: RunDir) -> None:
    recorder = Recorder(make_config(), rundir, resume_step=4)
    recorder.ledger = Ledger(LedgerSnapshot(4, 4, {"filtered": 4}, (), tokens={"filtered": 4000}))
    recorder.view.step(5, at_s=1.0, metrics={}, tokens=300, staleness={0: 300})
    recorder.view.waste["stale"] += 100
    recorder.view.stage(StageStats("group", "group-0", 1.0, extra={"failed/no number": 2.0}))
    summary = summarise(recorder, recorder.config, "finished")
    assert summary.failed_rollouts == {"no number": 2}
    assert (summary.wasted_tokens, summary.wasted_share) == (100, 0.25)


async def test_the_summary_of_a_resumed_run_is_of_all_its_starts(rundir: RunDir) -> None:
    """Three of them. The second took longer to its first step than all of the first, so no clock tells them apart."""
    starts: list[list[tuple[float, int, int]]] = [[(2.0, 100, 0), (4.0, 200, 50)], [(9.0, 100, 60), (10.0, 200, 70)]]
    rows, number = [], 0
    for start in starts:
        for wall_s, trained, waste in start:
            number += 1
            row = {"step": number, "wall_s": wall_s, "trained_tokens": trained, "reward/mean": number / 10}
            row |= {"staleness/token_hist/0": 25, "staleness/token_hist/2": 75, "waste/stale": waste}
            rows.append(row | {"waste/recomputed_prefill": 7, "waste/failed": 1})
    rows.append({**rows[-1], "step": 5, "reward/mean": 9.0})  # never happened
    rundir.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = make_config(observe={"use_tensorboard": False, "trace": False})
    with Recorder(config, rundir, resume_step=4) as recorder:
        await recorder.step(StepDone(4, 4, (), {}, 0, publishes=True))
    assert not (rundir.path / "bias.json").exists(), "a start without a step keeps that of the start before"
    with Recorder(config, rundir, resume_step=4) as recorder:
        await recorder.step(StepDone(4, 4, (), {}, 0, publishes=True))
        metrics = {"rollout/raw_reward": 0.5, "rollout/response_len/mean": 1.0}
        await recorder.step(StepDone(5, 5, (9,), metrics, 100, staleness={1: 100}))
        recorder.view.waste["stale"] += 30
        recorder.started -= 100.0
        found = summarise(recorder, config, "finished")
    assert found.resumed_from == 4
    assert found.wall_s >= 4.0 + 10.0 + 100.0
    assert found.reward.first == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.5) / 5)
    assert (found.staleness.mean, found.staleness.max) == ((300 * 2 + 100) / 500, 2)
    assert (found.wasted_tokens, found.wasted_share) == (50 + 70 + 30 + 2, 152 / 652)
    assert found.goodput.waste == {"stale": 150, "failed": 2}
    text = closing_text(found, {"run": rundir.path}, None, None)
    assert "resumed    from step 4; engines, weights, tokens/s" in text
    changes = tuple(Changed(step, "scale reward", str(step)) for step in range(7))
    text = closing_text(msgspec.structs.replace(found, changes=changes), {"run": rundir.path}, None, None)
    assert "scale reward 6 (step 6), and 2 before, see summary.json" in text
    assert "scale reward 1 " not in text
    text = closing_text(msgspec.structs.replace(found, changes=changes[:5]), {"run": rundir.path}, None, None)
    assert "scale reward 4 (step 4)\n" in text
    assert "from step" not in closing_text(summary(), {"run": rundir.path}, None, None)
