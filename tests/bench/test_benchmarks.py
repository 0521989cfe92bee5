"""Benchmarks: the short form of each runs to its end; figures of the planner and of the scaling runs.

The planner's simulation: cases by hand, conservation, the bound, and figures that must not get worse with more GPUs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.plan import QUICK, Efficiency, Job, Plan, bounds, changes, cluster_of, search, shape_of, splits, weight_bytes
from bench.planner.cluster import simulate
from bench.planner.world import Cluster, Result
from bench.scale import Cost, Point, points, report, usage
from configs.schema.model_shapes import total_parameters

ROOT = Path(__file__).resolve().parents[2]
SHARED = "arguments(__doc__, "  # the options that every benchmark has
BENCHMARKS = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if SHARED in path.read_text())


def test_the_benchmarks_are_those_of_make_bench() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert len(BENCHMARKS) >= 6
    assert [name for name in BENCHMARKS if f"-m bench.{name} --quick" not in makefile] == []


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


# One engine of two slots, one group of two rollouts of 100 tokens in 10 ms each, 0.5 s of training.
TRIVIAL = Cluster(
    engines=1, slots=2, a_s=0.01, c_s=0.0, token_s=0.0025, groups=1, members=2, mean=100.0, sigma=0.0, cap=100,
    staleness=0, streams=False, batches=6, warm_up=2,
)  # fmt: skip
BUSY = Cluster(
    engines=2, slots=16, a_s=0.01, c_s=0.0002, token_s=4e-5, groups=4, members=4, prompt=20, mean=200.0, sigma=0.9,
    cap=1500, staleness=2, update_s=0.3, batches=12, warm_up=4,
)  # fmt: skip


def conserved(result: Result) -> bool:
    """I1: every group has one end, or is open."""
    return result.admitted == sum(result.outcomes.values()) + result.open


def test_engines_stand_still_for_new_weights() -> None:
    result = simulate(replace(TRIVIAL, update_s=0.25))
    assert result.step_s == pytest.approx(1.75)
    assert result.stalled == pytest.approx(0.25 / 1.75)


def test_a_waiting_tool_holds_no_slot() -> None:
    """Rollouts of two turns, whose tools take as long as a turn: of twice as many, half decodes and half waits."""
    alone = simulate(replace(TRIVIAL, turns=2, tool_s=1.0, batches=40, warm_up=4, token_s=0.0))
    assert alone.step_s > 1.5, "the slower of two tools is waited for"
    shared = simulate(replace(TRIVIAL, turns=2, tool_s=1.0, batches=80, warm_up=8, token_s=0.0, staleness=7))
    assert shared.step_s < 0.7 * alone.step_s, "other groups decode meanwhile"


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 24), st.integers(0, 3), st.integers(1, 2), st.sampled_from((0.0, 0.3)),
    st.booleans(), st.integers(1, 2), st.integers(0, 99),
)  # fmt: skip
def test_every_group_has_one_end_and_no_token_is_older_than_the_bound(
    engines: int, slots: int, ahead: int, interval: int, filtered: float, streams: bool, turns: int, seed: int
) -> None:
    bound = ahead + interval - 1
    cluster = replace(
        BUSY, engines=engines, slots=slots, staleness=bound, interval=interval, filtered=filtered, streams=streams,
        turns=turns, tool_s=0.5, seed=seed, batches=5, warm_up=2,
    )  # fmt: skip
    result = simulate(cluster)
    assert conserved(result)
    assert result.outcomes["trained"] == 5 * cluster.groups
    assert (result.outcomes["filtered"] > 0) <= (filtered > 0)
    assert max(result.staleness) <= bound
    assert min(result.staleness) >= 0
    assert result.open <= (bound + 1) * cluster.groups
    for share in (result.engine_busy, result.slots_busy, result.trainer_busy, result.stalled, result.wasted):
        assert -1e-9 <= share <= 1 + 1e-9


def test_filtered_groups_are_replaced() -> None:
    result = simulate(replace(BUSY, filtered=0.4))
    share = result.outcomes["filtered"] / (result.outcomes["filtered"] + result.outcomes["trained"])
    assert conserved(result)
    assert 0.2 < share < 0.6


def test_a_higher_bound_is_no_slower_and_older() -> None:
    found = [simulate(replace(BUSY, staleness=bound, batches=24)) for bound in (0, 1, 3)]
    assert found[0].step_s > 1.2 * found[1].step_s >= 1.1 * found[2].step_s
    assert found[0].staleness_mean == 0.0 < found[1].staleness_mean < found[2].staleness_mean


def test_more_engines_a_faster_trainer_and_shorter_answers_are_faster() -> None:
    one = replace(BUSY, engines=1, slots=4, sigma=0.2)
    base = simulate(one).step_s
    assert simulate(replace(one, engines=3)).step_s < 0.7 * base
    assert simulate(replace(one, mean=100.0)).step_s < 0.7 * base
    slow = replace(BUSY, engines=8, token_s=2e-3)
    assert simulate(replace(slow, token_s=1e-3)).step_s < 0.7 * simulate(slow).step_s


def test_the_trainer_alone_bounds_a_run_with_engines_to_spare() -> None:
    cluster = replace(BUSY, engines=16, token_s=2e-3, sigma=0.0, streams=True)
    result = simulate(cluster)
    assert result.step_s == pytest.approx(16 * (200 + 20) * 2e-3, rel=0.01)
    assert result.trainer_busy > 0.99


def test_staleness_at_a_share() -> None:
    result = replace(simulate(TRIVIAL), staleness={0: 90, 1: 9, 2: 1})
    assert [result.staleness_at(share) for share in (0.5, 0.95, 0.99, 1.0)] == [0, 1, 1, 2]
    assert result.staleness_mean == pytest.approx(0.11)


def test_a_dense_model_reads_all_its_weights_and_experts_are_read_as_they_are_wanted() -> None:
    dense, sparse = shape_of("qwen3-32b"), shape_of("qwen3-30b-a3b")
    assert weight_bytes(dense, 1) == weight_bytes(dense, 100) == 2 * total_parameters(dense)
    few, many = weight_bytes(sparse, 1), weight_bytes(sparse, 10_000)
    assert few < many / 5
    assert many == pytest.approx(2 * total_parameters(sparse))


def test_a_decode_step_by_hand() -> None:
    """8B in bfloat16 from 80 % of 3.35 TB/s, and 7 ms beside it."""
    job = Job(model="llama3.1-8b", gpus=2, groups=1, members=1, prompt=1, mean=10.0, sigma=0.0, cap=10)
    cluster = cluster_of(job, 1, 1)
    assert cluster.a_s == pytest.approx(2 * 8.03e9 / (3.35e12 * 0.8) + Efficiency().overhead_s, rel=0.01)
    assert math.isclose(cluster_of(job, 1, 2).token_s, cluster.token_s / 2)


def test_splits_use_the_gpus_and_leave_the_trainer_its_memory() -> None:
    job = Job(gpus=8, engine_gpus=1)
    found = dict(splits(job))
    assert found
    assert all(engines + trainer == 8 for engines, trainer in found.items())
    assert all(trainer * 64e9 >= 18 * 7.6e9 for trainer in found.values())
    assert dict(splits(replace(job, trainer_unit=4))) == {1: 4, 2: 4, 3: 4, 4: 4}


def test_the_best_split_is_the_fastest_of_those_simulated_and_none_beats_the_bound_of_full_slots() -> None:
    job = replace(QUICK, mean=300.0, cap=1500, groups=6, members=4)
    plans = search(job, most=3, batches=6)
    assert [plan.result.step_s for plan in plans] == sorted(plan.result.step_s for plan in plans)
    for plan in plans:
        assert plan.bound_s == pytest.approx(max(bounds(job, plan.engines, plan.trainer_gpus)))
        assert max(plan.result.staleness) <= job.staleness
    names = [name for name, *_ in changes(job, Plan(2, 4, 1.0, plans[0].result))]
    assert len(names) == len(set(names)) >= 7


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


def test_one_number_of_replicas_adds_no_run() -> None:
    assert points([100, 100_000], [1], wide=1000) == [Point(in_flight=n, replicas=1) for n in (100, 100_000)]


def test_ratios_are_to_the_smallest_run() -> None:
    cost = Cost(cpu_ms=2.0, wakeups=5.0, seconds=1.0, rollouts=100, processes=8, by_process={"generate": 1.0})
    small, large = Point(in_flight=100, replicas=1), Point(in_flight=1000, replicas=1)
    series = report({small: cost, large: cost})
    assert {one.setting for one in series} == {"rollouts in flight"}, "one number of replicas is no series"
    assert [one.values for one in series if one.unit == "cpu_ms"] == [[2.0], [2.0]]
