"""Metrics files: read back by others' readers, killed, torn, resumed, and fed with values that are not finite."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.errors import MetricsError
from pipeline.observe.metrics import JsonlMetrics, Metrics, TensorBoardMetrics, read_metrics

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
