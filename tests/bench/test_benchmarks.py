"""Benchmarks: the short form of each runs to its end; figures of the planner and of the scaling runs.

The planner: cases by hand, the bound, and figures that must not get worse with more GPUs. Its simulation is tested in
tests/configs/test_goodput.py.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from bench.off_policy import LATE, without_late
from bench.plan import QUICK, Efficiency, Job, changes, measure, search, shape_of, speed_of, splits, weight_bytes
from bench.report import Series, by_unit
from bench.rigs.sums import Row, sequence
from bench.scale import CPU, WOKEN, Point, points, report, usage
from configs.schema.model_shapes import total_parameters
from models.train.interface import TrainSequence

ROOT = Path(__file__).resolve().parents[2]
SHARED = "arguments(__doc__, "  # the options that every benchmark has
BENCHMARKS = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if SHARED in path.read_text())


def test_the_benchmarks_are_those_of_make_bench() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert len(BENCHMARKS) >= 6
    assert [name for name in BENCHMARKS if f"-m bench.{name} --quick" not in makefile] == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_can_be_imported(name: str) -> None:
    """The short forms take minutes, and are not run with each change."""
    assert callable(importlib.import_module(f"bench.{name}").main)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_short_form_runs(name: str, tmp_path: Path) -> None:
    output = tmp_path / "document.json"
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    document = json.loads(output.read_text())
    assert document["series"], "a benchmark has measured something"


def test_a_dense_model_reads_all_its_weights_and_experts_are_read_as_they_are_wanted() -> None:
    dense, sparse = shape_of("qwen3-32b"), shape_of("qwen3-30b-a3b")
    assert weight_bytes(dense, 1) == weight_bytes(dense, 100) == 2 * total_parameters(dense)
    few, many = weight_bytes(sparse, 1), weight_bytes(sparse, 10_000)
    assert few < many / 5
    assert many == pytest.approx(2 * total_parameters(sparse))


def test_a_decode_step_by_hand() -> None:
    """8B in bfloat16 from 80 % of 3.35 TB/s, and 7 ms beside it."""
    job = Job(model="llama3.1-8b", gpus=2, groups=1, members=1, prompt=1, mean=10.0, sigma=0.0, cap=10)
    speed = speed_of(job, 1, 1)
    assert speed.a_s == pytest.approx(2 * 8.03e9 / (3.35e12 * 0.8) + Efficiency().overhead_s, rel=0.01)
    assert math.isclose(speed_of(job, 1, 2).token_s, speed.token_s / 2)


def test_splits_use_the_gpus_and_leave_the_trainer_its_memory() -> None:
    job = Job(gpus=8, engine_gpus=1)
    found = dict(splits(job))
    assert found
    assert all(engines + trainer == 8 for engines, trainer in found.items())
    assert all(trainer * 64e9 >= 18 * 7.6e9 for trainer in found.values())
    assert dict(splits(replace(job, trainer_unit=4))) == {1: 4, 2: 4, 3: 4, 4: 4}


def test_the_best_split_is_the_fastest_and_none_beats_the_bound_of_full_slots() -> None:
    job = replace(QUICK, mean=300.0, cap=1500, groups=6, members=4)
    plans = search(job)
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    for plan in plans:
        assert plan.step_s >= 0.97 * plan.bound_s  # what was made before the count began may be trained in it
        assert plan.attained.staleness <= job.staleness
    names = [name for name, *_ in changes(replace(job, tool_s=1.0), plans[0])]
    assert len(names) == len(set(names)) >= 7


def test_more_engines_a_faster_trainer_shorter_answers_and_quicker_weights_are_faster() -> None:
    job = Job(gpus=16, sigma=0.2, slots=16)
    base = measure(job, 2, 14).step_s
    assert measure(job, 6, 14).step_s < 0.6 * base
    assert measure(replace(job, mean=2000.0), 2, 14).step_s < 0.7 * base
    assert measure(replace(job, update_s=0.3 * base), 2, 14).step_s > 1.2 * base
    slow = replace(job, slots=256)
    assert measure(slow, 12, 2).step_s < 0.7 * measure(slow, 12, 1).step_s


def test_the_trainer_alone_bounds_a_run_with_engines_to_spare() -> None:
    plan = measure(Job(gpus=16, mean=500.0, sigma=0.0, staleness=4), 15, 1)
    assert plan.step_s == pytest.approx(plan.train_s, rel=0.02)
    assert plan.step_s == pytest.approx(plan.bound_s, rel=0.02)


def test_tools_and_filtered_groups_cost_what_they_take() -> None:
    """Twice the groups for half of them filtered; with enough groups beside it a rollout's tool costs nothing."""
    job = Job(gpus=16, mean=500.0, sigma=0.0, slots=8, staleness=6)
    base = measure(job, 2, 14).step_s
    assert measure(replace(job, filtered=0.5), 2, 14).step_s == pytest.approx(2 * base, rel=0.1)
    assert measure(replace(job, tool_s=base / 2), 2, 14).step_s < 1.1 * base
    turns = [measure(replace(job, tool_s=wait), 2, 14, turns=True).step_s for wait in (0.0, base)]
    assert turns[1] > turns[0] + 2 * base, "the slowest of many tools is waited for"


def test_late_groups_are_dropped_whole_and_late_tokens_alone_masked() -> None:
    """Groups 0 to 3 of one long and one short answer each: 1 and 3 are late."""
    row = Row(np.array([5, 6], np.int32), (1, 2))

    def batch() -> list[TrainSequence]:
        return [
            sequence(group, 2 * group + n, row, ids, [0.0] * len(ids), 0.5, 0)
            for group in range(4)
            for n, ids in enumerate(([1, 2, 3, 4], [1, 2, 3]))
        ]

    trained = [without_late(batch(), name) for name in LATE]
    assert [one.loss_mask.tolist() for one in trained[0]] == [[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1]] * 4
    assert [one.group_id for one in trained[1]] == [0, 0, 2, 2]
    masks = [[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]
    assert [one.loss_mask.tolist() for one in trained[2]] == masks * 2
    assert [one.advantages.tolist() for one in trained[2]] == [[0.5 * bit for bit in mask] for mask in masks] * 2


END = "print('done', flush=True)\ninput()"
SPINS = f"import time\nend = time.process_time() + 0.35\nwhile time.process_time() < end: pass\n{END}"
SLEEPS = f"import time\nfor _ in range(400): time.sleep(0.0001)\n{END}"


def counted(program: str) -> tuple[float, int]:
    """CPU seconds and wake-ups of a program that is a child of a child."""
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    child = subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    found = usage(child.pid)
    child.communicate(b"\n")
    assert len(found.by_process) == 2
    return found.cpu_s, found.wakeups


def test_grandchildren_are_counted_with_their_time_and_their_waits() -> None:
    spun, slept = counted(SPINS), counted(SLEEPS)
    assert spun[0] >= 0.3
    assert slept[1] >= spun[1] + 190  # of 400 sleeps: a start has some waits of its own, more on a busy machine


def test_one_thing_changes_between_the_runs_of_a_series() -> None:
    found = points([1000, 100], [4, 1], wide=1000)
    assert found == [
        Point(in_flight=100, replicas=1), Point(in_flight=1000, replicas=1), Point(in_flight=1000, replicas=4),
    ]  # fmt: skip
    assert points([100, 100_000], [1], wide=1000) == [Point(in_flight=n, replicas=1) for n in (100, 100_000)]


def test_ratios_are_to_the_smallest_run() -> None:
    cost = {CPU: 2.0, WOKEN: 5.0, "seconds": 1.0, "rollouts": 100, "generate": 1.0}
    small, large = Point(in_flight=100, replicas=1), Point(in_flight=1000, replicas=1)
    series = report({small: cost, large: cost | {CPU: 3.0}})
    assert {one.setting for one in series} == {"in flight"}, "one number of replicas is no series"
    assert [one.values for one in series if one.unit == CPU] == [[2.0], [3.0]]
    assert [one.values for one in series if one.unit == f"{CPU}, by the smallest"] == [[1.0], [1.5]]


def test_contenders_with_several_units_have_a_line_each() -> None:
    found = by_unit(
        [Series("a", "x", "s", [3.0, 1.0, 2.0]), Series("a", "x", "%", [7.0]), Series("a", "y", "%", [0.5])]
    )
    assert found == ["| | contender | s | % |", "|---|---|---|---|", "| a | x | 2 (1 to 3) | 7 |", "| a | y |  | 0.5 |"]
    assert by_unit([Series("a", "x", "s", [1.0]), Series("a", "y", "%", [1.0])]) == []
