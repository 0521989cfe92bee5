"""Experiment trackers: the rows of a run arrive under the same names, and a tracker that fails ends nothing."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.record.metrics import Metrics, read_metrics
from pipeline.record.trackers import IDS, TrackerThread, trackers
from tests.configs.config_rig import faults_of
from tests.stages.stage_rig import make_config

ROWS: list[tuple[int, dict[str, float]]] = [
    (1, {"train/loss": 0.5, "rollout/raw_reward": 0.25}),
    (2, {"train/loss": float("nan"), "eval/sums": 0.75, "eval/sums-pass@4": 1.0}),
]


def record(run_dir: Path, rows: list[tuple[int, dict[str, float]]], **observe: Any) -> None:
    """What a run writes, start to end."""
    config = make_config(observe={"project": "sums", "run_group": "mine", **observe})
    metrics = Metrics(run_dir, tensorboard=True, more=trackers(config, run_dir))
    for step, values in rows:
        metrics.write(step, values, wall_s=float(step), trained_tokens=10 * step)
    metrics.close()


def wandb_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The history in a file of an offline run: records of a LevelDB log, in blocks of 32 KiB behind 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):
            return  # it is just being written
        record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found = wandb_internal_pb2.Record()
            found.ParseFromString(record)
            if found.WhichOneof("record_type") == "history":
                items = found.history.item
                yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def kept_by_wandb(run_dir: Path, count: int) -> list[dict[str, Any]]:
    """Rows of all offline runs under the id of this one. wandb may return before its process has written the last."""
    known = json.loads((run_dir / IDS).read_text())["wandb"]
    deadline = time.monotonic() + 60
    while True:
        files = sorted(run_dir.glob(f"wandb/offline-run-*/run-{known}.wandb"))
        rows = [row for file in files for row in wandb_rows(file)]
        if len(rows) >= count or time.monotonic() > deadline:
            return rows
        time.sleep(0.05)


@pytest.mark.slow
def test_weights_and_biases_gets_every_finite_value_and_a_resumed_run_goes_on_in_its_run(tmp_path: Path) -> None:
    """Also from an earlier step."""
    pytest.importorskip("wandb")
    record(tmp_path, ROWS, report_to=("wandb",), wandb_mode="offline")
    rows = kept_by_wandb(tmp_path, len(ROWS))
    written = list(read_metrics(tmp_path / "metrics.jsonl"))
    for row, (step, values), line in zip(rows, ROWS, written, strict=True):
        finite = {name: value for name, value in values.items() if value == value}
        assert row["step"] == step
        assert {name: row[name] for name in finite} == finite
        assert set(finite) <= set(line), "as in metrics.jsonl"
        assert (row["axis/wall_s"], row["axis/trained_tokens"]) == (step, 10 * step)
        assert ("train/loss" in row) is (step == 1), "a value that is not finite is left out"
    begun = int(time.time())  # or before: wandb names the folder of an offline run by the second in which it begins
    while int(time.time()) == begun:
        time.sleep(0.02)
    record(tmp_path, ROWS[1:], report_to=("wandb",), wandb_mode="offline")
    assert [row["step"] for row in kept_by_wandb(tmp_path, 3)] == [1, 2, 2]


@pytest.mark.slow
def test_mlflow_gets_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    record(tmp_path, ROWS, report_to=("mlflow",), run_name="first")
    record(tmp_path, ROWS[1:], report_to=("mlflow",))
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run(json.loads((tmp_path / IDS).read_text())["mlflow"])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert json.loads(run.data.params["train"])["lr"] == make_config().train.lr
    history = client.get_metric_history(run.info.run_id, "eval/sums-pass_at_4")
    assert [(one.step, one.value) for one in history] == [(2, 1.0), (2, 1.0)]
    assert [one.value for one in client.get_metric_history(run.info.run_id, "train/loss")] == [0.5]


def test_trackio_gets_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read at its import
    pytest.importorskip("trackio")
    from trackio import SQLiteStorage

    record(tmp_path, ROWS, report_to=("trackio",), run_name="first")
    record(tmp_path, ROWS[1:], report_to=("trackio",), run_name="second")
    name = json.loads((tmp_path / IDS).read_text())["trackio"]
    assert name.startswith("first-")
    assert SQLiteStorage.get_runs("sums") == [name], "a resumed run goes on in its run"
    assert SQLiteStorage.get_run_config("sums", name)["train"]["lr"] == make_config().train.lr
    found = SQLiteStorage.get_logs("sums", name)
    assert [row["step"] for row in found] == [1, 2, 2]
    for row, line in zip(found, read_metrics(tmp_path / "metrics.jsonl"), strict=False):
        values = {key: value for key, value in line.items() if key not in ("step", "wall_s", "trained_tokens")}
        assert {key: row.get(key) for key in values} == values
    assert ("train/loss" in found[0], "train/loss" in found[1]) == (True, False)


class Held:
    """A tracker that waits, or fails, in its first row."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.go, self.rows = error, threading.Event(), list[int]()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.error is not None:
            raise self.error
        self.go.wait(30.0)
        self.rows.append(step)

    def close(self) -> None:
        self.rows.append(-1)


def write(thread: TrackerThread) -> None:
    for step, values in ROWS:
        thread.write(step, values, wall_s=0.0, trained_tokens=0)


def test_a_slow_tracker_delays_no_row_and_the_end_for_a_bounded_time(caplog: pytest.LogCaptureFixture) -> None:
    slow = Held()
    thread = TrackerThread("wandb", lambda: slow, close_s=0.05)
    write(thread)
    with caplog.at_level(logging.WARNING):
        thread.close()
    assert slow.rows == []
    assert "wandb has not taken all rows within 0.05 s" in caplog.text
    slow.go.set()
    thread._thread.join(30.0)
    assert slow.rows == [1, 2, -1]


@pytest.mark.parametrize("at_start", [True, False])
def test_a_tracker_that_fails_is_named_once(caplog: pytest.LogCaptureFixture, at_start: bool) -> None:
    def make() -> Held:
        if at_start:
            raise ConnectionError("no such server")
        return Held(ConnectionError("no such server"))

    thread = TrackerThread("mlflow", make)
    with caplog.at_level(logging.WARNING):
        write(thread)
        thread.close()
        thread.close()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("nothing goes to mlflow any more (ConnectionError: no such server)")


def test_a_tracker_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    base = "--prompt-data arithmetic --num-rollout 3 --hf-checkpoint tiny-arithmetic"
    names = ("wandb", "mlflow", "trackio")
    faults = faults_of(base, f"--report-to {' '.join(names)}")
    assert [fault for fault in faults if "--report-to" in fault] == [
        f"--report-to {name} needs a package that is not installed; pip install {name}"
        for name in ("wandb", "mlflow", "trackio")
    ]
    assert (
        "--report-to is 'neptune', but must be one of wandb, mlflow, trackio"
        in faults_of(base, "--report-to neptune")[0]
    )
    assert "only --report-to wandb reads it" in faults_of(base, "--report-to mlflow --wandb-team ours")[-1]
