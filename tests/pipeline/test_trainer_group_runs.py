"""Whole runs whose trainer is a trainer group of two ranks: one rank or the train stage is killed, and the books
balance."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from launching import SIMULATED, SMALL, Finished, alive, finish, here, made_model, start

from pipeline.record.journal import RolledBack, read_journal
from tests.chaos.oracle import Expected, judge
from tests.pipeline import test_kill
from tests.pipeline.test_kill import steps_done, wait_until

pytestmark = pytest.mark.slow

wait_for_steps = functools.partial(test_kill.wait_for_steps, timeout_s=180)  # all ranks load torch

TRAINER_GROUP = ["--actor-num-gpus-per-node", "2", "--train-device", "cpu"]
ENGINE = SIMULATED[: SIMULATED.index("--train-backend")]
MEGATRON = ["--train-backend", "megatron", "--tensor-model-parallel-size", "2"]


def number_of(run_dir: Path, name: str) -> int:
    return int((run_dir / "replicas" / f"{name}.pid").read_text())


def nothing_left(run_dir: Path) -> None:
    for path in (run_dir / "replicas").glob("*.pid"):
        assert not alive(int(path.read_text())), f"{path.stem} outlived its run"


def lost_nothing(done: Finished, steps: int, rank: int) -> None:
    """One rank was killed, and nobody can tell but by what is said of it."""
    run_dir = done.run_dir
    assert done.code == 0, f"{done.err[-3000:]}\n{(run_dir / 'logs' / 'train-rank-0.log').read_text()[-3000:]}"
    done.check_books()
    books = done.audit
    assert sorted(books.batches) == list(range(1, steps + 1)), "every step once; versions go on"
    assert len(books.trained) == steps * 4
    assert done.summary["groups"]["trained"] == steps * 4
    assert done.summary["restarts"] == {"train-0": 1}
    assert done.summary["weight_versions"]["last"] == steps
    assert done.summary["staleness"]["max"] <= done.summary["staleness"]["bound"]
    assert f"SIGKILL of train-rank-{rank}" in done.out
    assert done.out.count("2 ranks are up again") == 1
    assert (run_dir / "checkpoints" / f"step-{steps:08d}" / "hf" / "config.json").exists()
    assert not (run_dir / "trainer").exists()
    nothing_left(run_dir)


@pytest.mark.parametrize(
    "flags", [pytest.param(ENGINE, id="torch"), pytest.param(MEGATRON, id="megatron", marks=pytest.mark.full)]
)
def test_a_killed_rank_loses_nothing(tmp_path: Path, flags: list[str]) -> None:
    run_dir = tmp_path / "run"
    process = start(
        run_dir, *SMALL, *made_model(), *TRAINER_GROUP, *flags, "--num-rollout", "12", "--save-interval", "4"
    )
    wait_for_steps(process, run_dir, 6)
    os.kill(number_of(run_dir, "train-rank-1"), signal.SIGKILL)
    lost_nothing(finish(process, run_dir), 12, rank=1)


@pytest.mark.full
def test_a_killed_rank_before_any_save_loses_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *ENGINE, *TRAINER_GROUP, "--train-backend", "fsdp", "--num-rollout", "8"]
    process = start(run_dir, *flags)
    wait_for_steps(process, run_dir, 2)
    os.kill(number_of(run_dir, "train-rank-0"), signal.SIGKILL)
    lost_nothing(finish(process, run_dir), 8, rank=0)


@pytest.mark.full
def test_a_killed_rank_beside_the_tasks_of_one_process_ends_the_run(tmp_path: Path) -> None:
    """A task is not started again."""
    run_dir = tmp_path / "run"

    def kill() -> None:
        deadline = time.monotonic() + 180
        while steps_done(run_dir) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(number_of(run_dir, "train-rank-1"), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = here(run_dir, *SMALL, *made_model(), *TRAINER_GROUP, "--num-rollout", "2000")
    killer.join()
    assert done.code == 1
    assert "train-rank-1 ended with signal SIGKILL" in done.err
    assert "--resume" in done.err
    nothing_left(run_dir)


@pytest.mark.full
@pytest.mark.parametrize("runner", ["local", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def test_a_killed_train_stage_goes_on_with_its_ranks(runner: str, tmp_path: Path) -> None:
    """It is killed with and without steps that are in no checkpoint; under Ray with its actor too, as where its node is
    lost: the whole unit is placed again."""
    if runner == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *ENGINE, *TRAINER_GROUP, "--num-rollout", "8", "--save-interval", "2"]
    flags += ["--runner", runner, *(["--ray-cpus", "train=0", "rollout=0"] if runner == "ray" else [])]
    process = start(run_dir, *flags)
    for steps in (2, 5):
        wait_for_steps(process, run_dir, steps)
        stage, rank = number_of(run_dir, "train-0"), number_of(run_dir, "train-rank-0")
        os.kill(psutil.Process(stage).ppid() if runner == "ray" and steps == 5 else stage, signal.SIGKILL)
        wait_until(process, lambda old=stage: number_of(run_dir, "train-0") != old, "the train stage is started anew")
        wait_until(process, lambda old=rank: number_of(run_dir, "train-rank-0") != old, "its ranks are started anew")
    done = finish(process, run_dir).check()
    assert judge(run_dir, Expected(8, 4, done.summary["staleness"]["bound"])) == []
    assert not any(isinstance(event, RolledBack) for event in read_journal(run_dir / "ledger.jsonl"))
    assert done.summary["restarts"] == {"train-0": 2}, "the ranks' end was no loss of its own"
    assert done.out.count("2 ranks are up again") == 2
    nothing_left(run_dir)


def test_several_machines_are_refused(tmp_path: Path) -> None:
    done = here(tmp_path / "run", *SMALL, *made_model(), *ENGINE, *TRAINER_GROUP, "--actor-num-nodes", "2")
    assert done.code == 2
    assert "--actor-num-nodes 2" in done.err
    assert "Traceback" not in done.err


@pytest.mark.full
def test_ranks_that_are_killed_on_purpose_lose_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *ENGINE, *TRAINER_GROUP, "--num-rollout", "8", "--save-interval", "2"]
    process = start(run_dir, *flags, "--fault-inject", "rank:0.02:kill", "--max-restarts", "100", "--seed", "3")
    done = finish(process, run_dir).check()
    assert sorted(done.audit.batches) == list(range(1, 9))
    assert done.summary["faults_injected"]["rank kill"] >= done.summary["restarts"]["train-0"] >= 1
    nothing_left(run_dir)
