"""Resuming: what is damaged is passed over aloud, what is refused changes nothing, nothing stays in shared memory."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from launching import ROOT, SIMULATED, SMALL, environment, finish, made_model, start, succeed_here
from test_kill import kill, steps_done, wait_for_steps, wait_until

import launch as program
from models.checkpoint import final_path
from pipeline.record.journal import RolledBack, read_journal
from tests.models.test_checkpoint import flip

pytestmark = pytest.mark.slow


def contents(run_dir: Path) -> dict[str, bytes]:
    """All that a user would miss: not the lock, what processes say of themselves, or what is fetched again."""
    return {
        str(p.relative_to(run_dir)): p.read_bytes()
        for p in run_dir.rglob("*")
        if p.is_file() and p.parent.name not in ("logs", "replicas", "trace")
    }


def test_a_refused_resume_changes_nothing_and_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    succeed_here(run_dir, *SMALL, *made_model(), *SIMULATED, "--save-interval", "2")
    before = contents(run_dir)
    others = ["--prompt-data", "arithmetic@[0:50]"]
    for flags, words in [
        (others, "the prompts are not those"),
        (["--custom-rm-path", "no.such:part"], "no.such"),
        (["--train-backend", "torch", "--train-device", "cpu"], "holds no complete training state"),  # by the trainer
    ]:
        assert program.main(["--resume", str(run_dir), "--num-rollout", "9", *flags]) == 2
        assert words in capsys.readouterr().err
        assert contents(run_dir) == before

    weights = "hf/model.safetensors"
    flip(final_path(run_dir / "checkpoints", 4) / weights)
    assert program.main(["--resume", str(run_dir), "--num-rollout", "5"]) == 0
    assert "skipped" in capsys.readouterr().err
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir())[-1] == "step-00000005"

    for checkpoint in (run_dir / "checkpoints").iterdir():
        flip(checkpoint / weights)
    before = contents(run_dir)
    assert program.main(["--resume", str(run_dir), "--num-rollout", "9"]) == 2
    assert "can be resumed" in capsys.readouterr().err
    assert contents(run_dir) == before


def test_a_run_that_goes_on_again_and_again_needs_no_checkpoint_that_was_pruned(tmp_path: Path) -> None:
    """Resumed twice from one checkpoint its weights have different labels, as engines that it does not own may have
    those of the first time; and its engines start again after that checkpoint is gone."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *SIMULATED, "--simulated-step-s", "0.2"]
    more = ["--runner", "local", "--num-rollout", "400"]
    succeed_here(run_dir, *flags, "--num-rollout", "2", "--save-interval", "2", "--keep-last-n", "1")
    process = start(None, "--resume", str(run_dir), *more, "--save-interval", "100")
    wait_for_steps(process, run_dir, 3)
    process.kill()
    process.communicate()
    process = start(None, "--resume", str(run_dir), *more, "--save-interval", "2")
    wait_until(process, lambda: final_path(run_dir / "checkpoints", 4).is_dir(), "a checkpoint of its own")
    wait_until(process, lambda: not final_path(run_dir / "checkpoints", 2).is_dir(), "the first one is pruned")
    engine = run_dir / "replicas" / "engine-0.pid"
    before = engine.read_text()
    kill(run_dir, "engine-0")
    wait_until(process, lambda: engine.exists() and engine.read_text() != before, "another engine")
    read = Path(f"/proc/{engine.read_text()}/cmdline").read_text()
    assert "--model-path" in read
    assert str(run_dir / "checkpoints") not in read
    wait_for_steps(process, run_dir, steps_done(run_dir) + 4)
    process.send_signal(signal.SIGINT)
    finish(process, run_dir, 60).check(130)
    resumes = [event for event in read_journal(run_dir / "ledger.jsonl") if isinstance(event, RolledBack)]
    assert [(event.step, event.run_generation) for event in resumes] == [(2, 1), (2, 2)]


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGINT, signal.SIGINT), pytest.param((signal.SIGHUP,), marks=pytest.mark.full, id="closed terminal")],
)
def test_a_run_that_is_stopped_at_once_leaves_no_weights_in_shared_memory(
    tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    run_dir = tmp_path / "run"
    runtime = Path(tempfile.mkdtemp(prefix="home-"))  # a path of sockets is short
    slow = [*SIMULATED, "--simulated-step-s", "3"]  # the drain waits for the batch in training
    process = start(run_dir, *SMALL, *made_model(), *slow, XDG_RUNTIME_DIR=str(runtime))
    wait_for_steps(process, run_dir, 1)
    (sockets,) = runtime.iterdir()
    slots = Path("/dev/shm") / sockets.name
    assert slots.is_dir() or (run_dir / sockets.name).is_dir()
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)  # two signals at once are one
    done = finish(process, run_dir, 60)
    assert done.code == 130, done.err[-2000:]
    assert "stopped at once" in done.err
    assert not slots.exists()
    assert not (run_dir / sockets.name).exists()
    assert not sockets.exists()
    runtime.rmdir()


@pytest.mark.parametrize(("limit", "flags"), [(64, []), (128, ["--scale", "reward=9"])])
def test_too_few_open_files_are_one_sentence(limit: int, flags: list[str], tmp_path: Path) -> None:
    """Before anything is started: libzmq ends a process that has none left."""
    command = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash", sys.executable, str(ROOT / "launch.py")]
    flags = ["--run-dir", str(tmp_path / "run"), *SMALL, *made_model(), *SIMULATED, *flags]
    done = subprocess.run([*command, *flags], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"error: the limit of open files \({limit}, at most {limit}\) is too low for this run, which needs \d+: raise "
        r"it, such as with `ulimit -n 4096`, or start fewer replicas with --scale",
        said,
    )
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_is_removed_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, "--num-rollout", "2000", "--save-interval", "1")
    wait_for_steps(process, run_dir, 1)
    run_dir.rename(tmp_path / "elsewhere")
    done = finish(process, run_dir, 120)
    assert done.code == 2, done.err[-2000:]
    assert f"the run directory {run_dir} was removed or replaced while the run used it" in done.err
    assert "Traceback" not in done.err
    assert not (run_dir / "summary.json").exists()
