"""What is counted of a run's processes, and which runs are compared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bench.scale import MEMBERS, Cost, Point, flags, points, report, usage
from configs.load import load

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


def test_usage_of_this_process_only_grows() -> None:
    before = usage(os.getpid())
    time.sleep(0.001)
    after = usage(os.getpid())
    assert after.wakeups > before.wakeups
    assert after.cpu_s >= before.cpu_s
    assert after.at_s > before.at_s


def test_one_thing_changes_between_the_runs_of_a_series() -> None:
    found = points([1000, 100], [4, 1], wide=1000)
    assert found == [
        Point(in_flight=100, replicas=1), Point(in_flight=1000, replicas=1), Point(in_flight=1000, replicas=4),
    ]  # fmt: skip


def test_one_number_of_replicas_adds_no_run() -> None:
    assert points([100, 100_000], [1], wide=1000) == [Point(in_flight=n, replicas=1) for n in (100, 100_000)]


def test_the_gate_of_the_run_lets_as_many_rollouts_out(tmp_path: Path) -> None:
    for number in (128, 1000, 100_000):
        point = Point(in_flight=number, replicas=2)
        config = load(flags(point, tmp_path)).config
        assert config.rollout.rollout_batch_size * (1 + config.asynchrony.async_buffer_size) * MEMBERS <= number
        assert config.rollout.rollout_batch_size * (1 + config.asynchrony.async_buffer_size) * MEMBERS > 0.8 * number
        assert config.run.scale == {"engine": 1, "generate": 2, "reward": 2, "group": 2}


def test_ratios_are_to_the_smallest_run() -> None:
    cost = Cost(cpu_ms=2.0, wakeups=5.0, seconds=1.0, rollouts=100, processes=8, by_process={"generate": 1.0})
    small, large = Point(in_flight=100, replicas=1), Point(in_flight=1000, replicas=1)
    series = report({small: cost, large: cost})
    assert {one.setting for one in series} == {"rollouts in flight"}, "one number of replicas is no series"
    assert [one.values for one in series if one.unit == "cpu_ms"] == [[2.0], [2.0]]
