"""The train stage is killed while the run goes on: it is started again, and nothing is undone."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, Finished, finish, made_model, start, succeed

from pipeline.observe.metrics import read_metrics
from pipeline.record.journal import RolledBack, read_journal
from tests.chaos.oracle import Expected, judge
from tests.pipeline.test_kill import kill, pids, steps_done, wait_for_steps, wait_until

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
    assert f"passed over: {weights} is damaged" in resumed.err


@pytest.mark.full
@pytest.mark.parametrize("ranks", [[], ["--actor-num-gpus-per-node", "2", "--train-device", "cpu"]], ids=["one", "two"])
def test_a_killed_trainer_trains_the_same(ranks: list[str], tmp_path: Path) -> None:
    """In a synchronous run each token depends on all weights before it."""
    flags = [*SMALL, *made_model(), *ranks, "--mode", "sync", "--deterministic", "--num-rollout", "6"]
    done = killed(tmp_path / "killed", (1, 2, 4), *flags)
    assert done.audit.batches == succeed(tmp_path / "run", *flags, "--save-interval", "1").audit.batches


def standing_by(run_dir: Path) -> list[int]:
    """Numbers of all processes that ever stood by."""
    log = run_dir / "logs" / "train-0.log"
    said = log.read_text() if log.exists() else ""
    return [int(number) for number in re.findall(r"process (\d+) stands by for train-0", said)]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*SIMULATED, "--simulated-step-s", "0.3"], id="simulated"),
        pytest.param(
            [*SIMULATED[: SIMULATED.index("--train-backend")], "engine.simulated.a_ms=60"],
            id="with libraries to load",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_process_that_stands_by_takes_the_place_of_a_killed_trainer(tmp_path: Path, flags: list[str]) -> None:
    """The one that stands by for it in turn ends with the run."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *flags]
    process = start(run_dir, *flags, "--train-standby", "--num-rollout", "2000", "--save-interval", "1")
    wait_until(process, lambda: len(standing_by(run_dir)) == 1, "a process stands by")
    kill(run_dir, "train-0")
    wait_until(process, lambda: pids(run_dir, "train-0") == standing_by(run_dir)[:1], "it takes the place")
    wait_for_steps(process, run_dir, steps_done(run_dir) + 2)
    process.send_signal(signal.SIGTERM)
    done = finish(process, run_dir).check(130)
    assert done.summary["restarts"] == {"train-0": 1}
    assert not any(Path("/proc", str(number)).exists() for number in standing_by(run_dir))
