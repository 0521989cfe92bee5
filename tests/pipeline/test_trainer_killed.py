"""The train stage is killed while the run goes on: it is started again, and nothing is undone."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, Finished, finish, made_model, start, succeed

from pipeline.observe.metrics import read_metrics
from pipeline.record.journal import RolledBack, read_journal
from tests.chaos.oracle import Expected, judge
from tests.pipeline.test_kill import kill, pids, wait_for_steps, wait_until

pytestmark = pytest.mark.slow


def killed(run_dir: Path, at: tuple[int, ...], *flags: str) -> Finished:
    """The run, with its trainer killed as soon as there are so many steps; 0: before its first weights."""
    process = start(run_dir, *flags, "--max-restarts", "20")
    for steps in at:
        wait_until(process, (run_dir / "replicas" / "train-0.pid").exists, "the trainer is started")
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


@pytest.mark.parametrize("saving", [[], ["--save-interval", "3"]], ids=["no checkpoint", "every third step"])
def test_a_killed_trainer_loses_nothing_and_evaluations_come_once(tmp_path: Path, saving: list[str]) -> None:
    """Before its first weights, after a step, and with several steps in no checkpoint."""
    run_dir = tmp_path / "run"
    evaluates = ["--eval-prompt-data", "held=arithmetic@[0:4]", "--eval-interval", "2"]
    done = killed(
        run_dir, (0, 1, 5), *SMALL, *made_model(), *SIMULATED, *evaluates, *saving, "--num-rollout", "8",
        "--simulated-step-s", "0.2",
    )  # fmt: skip
    done.check_books()
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
    [old] = pids(run_dir, "train-0")
    kill(run_dir, "train-0")
    wait_until(process, lambda: pids(run_dir, "train-0") != [old], "the trainer is started anew")
    done = finish(process, run_dir).check()
    done.check_books()
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
    assert (done.code, "--resume" in done.err) == (1, True)
    assert f"{weights} is damaged" in done.out
    steps = int(newest.name.removeprefix("step-")) + 2
    resumed = finish(start(None, "--resume", str(run_dir), "--num-rollout", str(steps)), run_dir)
    assert resumed.code == 0, resumed.err[-3000:]
    assert f"skipped: {weights} is damaged" in resumed.err


@pytest.mark.full
@pytest.mark.parametrize("ranks", [[], ["--actor-num-gpus-per-node", "2", "--train-device", "cpu"]], ids=["one", "two"])
def test_a_killed_trainer_trains_the_same(ranks: list[str], tmp_path: Path) -> None:
    """In a synchronous run each token depends on all weights before it."""
    flags = [*SMALL, *made_model(), *ranks, "--mode", "sync", "--deterministic", "--num-rollout", "6"]
    done = killed(tmp_path / "killed", (1, 2, 4), *flags, "--save-interval", "3")
    assert done.audit.batches == succeed(tmp_path / "run", *flags, "--save-interval", "3").audit.batches
