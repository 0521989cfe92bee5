"""The train stage is killed while the run goes on: it is started again, and nothing is undone."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, Finished, finish, made_model, start, succeed

from pipeline.observe.metrics import read_metrics
from pipeline.record.journal import RolledBack, read_journal
from tests.chaos.oracle import Expected, judge
from tests.pipeline.test_kill import kill, pids, wait_for_steps, wait_until

pytestmark = pytest.mark.slow


def killed(run_dir: Path, at: tuple[int, ...], *flags: str) -> Finished:
    """The run, with its trainer killed as soon as there are so many steps."""
    process = start(run_dir, *flags, "--save-interval", "1", "--max-restarts", "20")
    for steps in at:
        wait_for_steps(process, run_dir, steps)
        [old] = pids(run_dir, "train-0")
        kill(run_dir, "train-0")
        wait_until(process, lambda old=old: pids(run_dir, "train-0") != [old], "the trainer is started anew")
    done = finish(process, run_dir)
    assert done.code == 0, done.err[-3000:]
    assert not any(isinstance(event, RolledBack) for event in read_journal(run_dir / "ledger.jsonl"))
    assert done.summary["restarts"] == {"train-0": len(at)}
    return done


def evaluated(run_dir: Path) -> list[int]:
    """Versions in the order of their rows."""
    rows = list(read_metrics(run_dir / "metrics.jsonl"))
    return [int(row["eval/version"]) for row in rows if "eval/held" in row]


def test_a_killed_trainer_goes_on_from_its_checkpoint_and_evaluations_come_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    evaluates = ["--eval-prompt-data", "held=arithmetic@[0:4]", "--eval-interval", "2"]
    done = killed(
        run_dir, (1, 4), *SMALL, *made_model(), *SIMULATED, *evaluates, "--num-rollout", "6",
        "--simulated-step-s", "0.2",
    )  # fmt: skip
    done.check_books()
    assert evaluated(run_dir) == list(range(0, 7, 2))
    assert judge(run_dir, Expected(6, 4, 2)) == []
    assert 0.0 < done.summary["effective_training_time"] < 1.0


@pytest.mark.full
def test_a_killed_trainer_trains_the_same(tmp_path: Path) -> None:
    """In a synchronous run each token depends on all weights before it."""
    flags = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--num-rollout", "6"]
    done = killed(tmp_path / "killed", (1, 2, 4), *flags)
    assert done.audit.batches == succeed(tmp_path / "run", *flags, "--save-interval", "1").audit.batches
