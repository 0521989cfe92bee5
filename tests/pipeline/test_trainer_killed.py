"""The train stage is killed while the run goes on: it is started again, and nothing is undone."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from launching import SIMULATED, SIMULATED_ENGINE, SMALL, Finished, finish, here, made_model, start, succeed

from pipeline.record.journal import RolledBack, read_journal
from pipeline.record.metrics import read_metrics
from tests.chaos.oracle import Expected, judge
from tests.pipeline.test_kill import kill, kill_and_await, killed_after, nothing_left, pids, wait_for_steps, wait_until

pytestmark = pytest.mark.slow


def killed(run_dir: Path, at: tuple[int, ...], *flags: str) -> Finished:
    """The run, with its trainer killed as soon as there are so many steps; 0: before its first weights."""
    process = start(run_dir, *flags, "--max-restarts", "20")
    for steps in at:
        wait_until(process, (run_dir / "replicas" / "train-0.pid").exists, "the trainer is started")
        wait_for_steps(process, run_dir, steps)
        kill_and_await(process, run_dir, "train-0")
    done = finish(process, run_dir).check()
    assert not any(isinstance(event, RolledBack) for event in read_journal(run_dir / "ledger.jsonl"))
    assert done.summary["restarts"] == {"train-0": len(at)}
    return done


def evaluated(run_dir: Path) -> list[int]:
    """Versions in the order of their rows."""
    rows = list(read_metrics(run_dir / "metrics.jsonl"))
    return [int(row["eval/version"]) for row in rows if "eval/held" in row]


@pytest.mark.parametrize(
    "saving",
    [pytest.param([], id="no checkpoint"), pytest.param(["--save-interval", "3"], id="saves", marks=pytest.mark.full)],
)
def test_a_killed_trainer_loses_nothing_and_evaluations_come_once(tmp_path: Path, saving: list[str]) -> None:
    """Before its first weights, after a step, and with several steps in no checkpoint."""
    run_dir = tmp_path / "run"
    evaluates = ["--eval-prompt-data", "held=arithmetic@[0:4]", "--eval-interval", "2"]
    done = killed(
        run_dir, (0, 1, 5), *SMALL, *made_model(), *SIMULATED, *evaluates, *saving, "--num-rollout", "8",
        "--simulated-step-s", "0.2",
    )  # fmt: skip
    assert evaluated(run_dir) == list(range(0, 9, 2))
    assert judge(run_dir, Expected(8, 4, 2)) == []
    assert 0.0 < done.summary["effective_training_time"] < 1.0
    assert not (run_dir / "trainer").exists(), "the last checkpoint holds all"


def test_a_trainer_that_is_killed_in_its_save_saves_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "6", "--save-interval", "2", "--max-restarts", "20"]
    process = start(run_dir, *flags, "--simulated-step-s", "0.2")
    draft = run_dir / "checkpoints" / ".step-00000004.draft"
    wait_until(process, draft.exists, "the second checkpoint is begun", poll_s=0.0)
    kill_and_await(process, run_dir, "train-0")
    done = finish(process, run_dir).check()
    assert judge(run_dir, Expected(6, 4, 2)) == []
    assert [path.name for path in sorted((run_dir / "checkpoints").glob("step-*"))][-2:] == [
        "step-00000004", "step-00000006",
    ]  # fmt: skip
    assert done.summary["restarts"] == {"train-0": 1}


@pytest.mark.full
def test_a_killed_trainer_does_not_go_on_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "2000", "--save-interval", "1"]
    process = start(run_dir, *flags)
    wait_for_steps(process, run_dir, 2)
    kill(run_dir, "train-0", signal.SIGSTOP)
    time.sleep(1.0)  # what it reported is committed
    newest = max((run_dir / "checkpoints").glob("step-*"))
    weights = newest / "hf" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    kill(run_dir, "train-0")
    done = finish(process, run_dir)
    assert (done.code, "--resume" in done.err) == (6, True)
    assert f"{weights} is damaged" in done.out
    steps = int(newest.name.removeprefix("step-")) + 2
    resumed = finish(start(None, "--resume", str(run_dir), "--num-rollout", str(steps)), run_dir).check()
    assert f"skipped: {weights} is damaged" in resumed.err


@pytest.mark.full
@pytest.mark.parametrize("ranks", [[], ["--actor-num-gpus-per-node", "2", "--train-device", "cpu"]], ids=["one", "two"])
def test_a_killed_trainer_trains_the_same(ranks: list[str], tmp_path: Path) -> None:
    """In a synchronous run each token depends on all weights before it."""
    flags = [*SMALL, *made_model(), *ranks, "--mode", "sync", "--deterministic", "--num-rollout", "6"]
    done = killed(tmp_path / "killed", (1, 2, 4), *flags, "--save-interval", "3")
    assert done.audit.batches == succeed(tmp_path / "run", *flags, "--save-interval", "3").audit.batches


# Whole runs whose trainer is a trainer group of two ranks: one rank or the train stage is killed, and the books
# balance.


RANKS_LOAD_S = 180  # all ranks load torch
TRAINER_GROUP = ["--actor-num-gpus-per-node", "2", "--train-device", "cpu"]
MEGATRON = ["--train-backend", "megatron", "--tensor-model-parallel-size", "2"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "steps", "at", "rank"),
    [
        pytest.param([*SIMULATED_ENGINE, "--save-interval", "2"], 6, 3, 1, id="torch"),
        pytest.param([*MEGATRON, "--save-interval", "2"], 6, 3, 1, id="megatron"),
        pytest.param([*SIMULATED_ENGINE, "--train-backend", "fsdp"], 8, 2, 0, id="before any save"),
    ],
)
def test_a_killed_rank_loses_nothing(tmp_path: Path, flags: list[str], steps: int, at: int, rank: int) -> None:
    """Nobody can tell that one rank was killed but by what is said of it."""
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *TRAINER_GROUP, *flags, "--num-rollout", str(steps))
    wait_for_steps(process, run_dir, at, RANKS_LOAD_S)
    kill(run_dir, f"train-rank-{rank}")
    done = finish(process, run_dir).check()
    books = done.audit
    assert sorted(books.batches) == list(range(1, steps + 1)), "every step once; versions go on"
    assert len(books.trained) == done.summary["groups"]["trained"] == steps * 4
    assert done.summary["restarts"] == {"train-0": 1}
    assert done.summary["weight_versions"]["last"] == steps
    assert f"SIGKILL of train-rank-{rank}" in done.out
    assert done.out.count("2 ranks are up again") == 1
    assert (run_dir / "checkpoints" / f"step-{steps:08d}" / "hf" / "config.json").exists()
    assert not (run_dir / "trainer").exists()
    nothing_left(run_dir)


@pytest.mark.full
def test_a_killed_rank_beside_the_tasks_of_one_process_ends_the_run(tmp_path: Path) -> None:
    """A task is not started again."""
    run_dir = tmp_path / "run"

    with killed_after(run_dir, 2, "train-rank-1"):
        done = here(run_dir, *SMALL, *made_model(), *TRAINER_GROUP, "--num-rollout", "2000")
    assert done.code == 6
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
    flags = [*SMALL, *made_model(), *SIMULATED_ENGINE, *TRAINER_GROUP, "--num-rollout", "8", "--save-interval", "2"]
    flags += ["--runner", runner, *(["--ray-cpus", "train=0", "rollout=0"] if runner == "ray" else [])]
    process = start(run_dir, *flags)
    for steps in (2, 5):
        wait_for_steps(process, run_dir, steps, RANKS_LOAD_S)
        stage, rank = pids(run_dir, "train-0", "train-rank-0")
        os.kill(psutil.Process(stage).ppid() if runner == "ray" and steps == 5 else stage, signal.SIGKILL)
        wait_until(process, lambda old=stage: pids(run_dir, "train-0") != [old], "the train stage is started anew")
        wait_until(process, lambda old=rank: pids(run_dir, "train-rank-0") != [old], "its ranks are started anew")
    done = finish(process, run_dir).check()
    assert judge(run_dir, Expected(8, 4, done.summary["staleness"]["bound"])) == []
    assert not any(isinstance(event, RolledBack) for event in read_journal(run_dir / "ledger.jsonl"))
    assert done.summary["restarts"] == {"train-0": 2}, "the ranks' end was no loss of its own"
    assert done.out.count("2 ranks are up again") == 2
    nothing_left(run_dir)


def test_several_machines_are_refused(tmp_path: Path) -> None:
    done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED_ENGINE, *TRAINER_GROUP, "--actor-num-nodes", "2")
    assert done.code == 2
    assert re.search(r"--actor-num-nodes 2 .* --runner inprocess .* --runner ray", done.err), done.err
    assert "Traceback" not in done.err


@pytest.mark.full
def test_ranks_that_are_killed_on_purpose_lose_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *SIMULATED_ENGINE, *TRAINER_GROUP, "--num-rollout", "8", "--save-interval", "2"]
    process = start(run_dir, *flags, "--fault-inject", "rank:0.02:kill", "--max-restarts", "100", "--seed", "3")
    done = finish(process, run_dir).check()
    assert sorted(done.audit.batches) == list(range(1, 9))
    assert done.summary["faults_injected"]["rank kill"] >= done.summary["restarts"]["train-0"] >= 1
    nothing_left(run_dir)
