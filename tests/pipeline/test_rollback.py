"""A running run goes back to a checkpoint: its weights become a new version, and nothing sampled before is trained."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgspec
import pytest
from launching import SIMULATED, SMALL, Finished, finish, made_model, start

import launch as program
from configs.schema import Config
from models.checkpoint import draft_path, final_path
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.record.journal import Stepped, WentBack, read_journal
from pipeline.record.metrics import read_metrics
from pipeline.record.recorder import Recorder
from pipeline.supervise.lifecycle import Lifecycle
from pipeline.supervise.runner import TaskRunner
from stages.base import TrainOptions
from stages.messages import CheckpointReady
from stages.prompts.ledger import Ledger
from stages.staleness_gate import StalenessGate
from tests.pipeline.test_kill import kill_and_await, pids, wait_for_steps, wait_until
from tests.stages.stage_rig import make_sample

STEPS = 16
SAVED = ["--save-interval", "2", "--keep-last-n", "20", "--num-rollout", str(STEPS)]


def went_back(process: subprocess.Popen[str], run_dir: Path, step: int) -> int:
    """The version that the weights of the checkpoint get, once the run has said so."""
    assert program.main(["rollback", str(run_dir), str(step)]) == 0
    words = f"back to the checkpoint of step {step}: its weights become version "
    log = run_dir / "run.log"
    wait_until(process, lambda: words in log.read_text(), "it goes back")
    return int(log.read_text().rpartition(words)[2].split()[0])


def check(done: Finished, version: int) -> None:
    """The version's number is that of no batch, each other step is there once, and later ones train younger tokens."""
    done.check()
    events = list(read_journal(done.run_dir / "ledger.jsonl"))
    assert {event.step for event in events if isinstance(event, WentBack)} == {version}
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [event.step for event in steps] == [step for step in range(1, STEPS + 1) if step != version]
    rows = [int(row["step"]) for row in read_metrics(done.run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert rows == [event.step for event in steps]
    assert all(event.step - 1 - event.oldest >= version for event in steps if event.step > version)
    assert done.audit.outcomes["trained"] == 4 * (STEPS - 1)


@pytest.mark.slow
def test_a_running_run_goes_back_to_weights_and_optimizer_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SAVED)
    wait_for_steps(process, run_dir, 5)
    assert program.main(["rollback", str(run_dir), "3"]) == 4
    assert "no checkpoint of step 3 is kept, but of 2, 4" in capsys.readouterr().err
    version = went_back(process, run_dir, 2)
    assert version > 5
    done = finish(process, run_dir)
    check(done, version)
    assert done.summary["restarts"] == {"train-0": 1}
    assert [(change["what"], change["value"]) for change in done.summary["changes"]] == [("rollback", "to step 2")]
    left, taken = (run_dir / "checkpoints" / f"step-{step:08d}" for step in (2, version))
    for file in ("hf/model.safetensors", "trainer/optimizer.safetensors"):
        assert (taken / file).read_bytes() == (left / file).read_bytes(), file
    before = run_dir / "checkpoints" / "step-00000004" / "hf" / "model.safetensors"
    assert before.read_bytes() != (left / "hf" / "model.safetensors").read_bytes()
    resumed = finish(start(None, "--resume", str(run_dir), "--num-rollout", str(STEPS + 2)), run_dir).check()
    assert resumed.audit.outcomes["trained"] == 4 * (STEPS + 1)


@pytest.mark.slow
def test_a_trainer_that_is_lost_while_it_goes_back_goes_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, *SAVED, "--simulated-step-s", "0.3")
    wait_for_steps(process, run_dir, 5)
    [first], file = pids(run_dir, "train-0"), run_dir / "replicas" / "train-0.pid"
    version = went_back(process, run_dir, 2)
    wait_until(process, lambda: file.read_text() not in ("", str(first)), "the trainer is started", poll_s=0.01)
    kill_and_await(process, run_dir, "train-0")
    done = finish(process, run_dir)
    check(done, version)
    assert done.summary["restarts"] == {"train-0": 2}


@pytest.mark.slow
def test_a_run_that_has_trained_its_last_step_does_not_go_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits for its last evaluation. A rollback takes the number of a step, and would be one too many."""
    run_dir = tmp_path / "run"
    late = ["--eval-prompt-data", "held=arithmetic@[0:100]", "--eval-interval", "4", "--eval-max-in-flight", "1"]
    flags = ["--num-rollout", "4", "--save-interval", "2", "--keep-last-n", "9"]
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, *late, *flags, "engine.simulated.a_ms=20")
    wait_for_steps(process, run_dir, 4)
    assert program.main(["rollback", str(run_dir), "2"]) == 4
    assert "all 4 steps are trained" in capsys.readouterr().err
    done = finish(process, run_dir).check()
    assert done.summary["restarts"] == {}
    assert not [event for event in read_journal(run_dir / "ledger.jsonl") if isinstance(event, WentBack)]


@pytest.mark.parametrize(("trained", "begins"), [(3, 4), (4, 2)])
async def test_a_last_step_that_is_reported_meanwhile_is_the_last(
    trained: int, begins: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the command and the end of the trainer."""
    monkeypatch.setattr("pipeline.supervise.lifecycle.damage", lambda _: None)
    for step in (1, 2):
        final_path(tmp_path, step).mkdir()
    said: list[str] = []
    ledger = Ledger()
    for position in range(trained):
        ledger.settle(ledger.admit(position=position).group_id, "trained")
    recorder = SimpleNamespace(
        ledger=ledger, committed=2, training_started=1.0, say=said.append, rundir=SimpleNamespace(checkpoints=tmp_path)
    )
    lifecycle = object.__new__(Lifecycle)
    config = msgspec.convert({"rollout": {"num_rollout": 4, "rollout_batch_size": 1}}, Config)
    vars(lifecycle).update(config=config, recorder=recorder, hubs={"settle": SimpleNamespace(held=list)})
    options = await lifecycle.trainer_state(TrainOptions(), back=1)
    assert options is not None
    assert (options.start_step, options.resume_from) == (begins, str(final_path(tmp_path, 1 if begins == 4 else 2)))
    assert ("does not go back" in said[0]) is (trained == 4)


async def test_the_chosen_checkpoint_stays_until_the_run_has_gone_back_to_it(tmp_path: Path) -> None:
    """A checkpoint of a step that was done before may be on its way, and would remove the chosen one."""
    observe = {"use_tensorboard": False, "trace": False}
    config = msgspec.convert({"observe": observe, "checkpoint": {"keep_last_n": 1}}, Config)
    runner = object.__new__(TaskRunner)
    ledger = Ledger()
    with RunDir(tmp_path / "run").open(resume=False) as rundir, Recorder(config, rundir) as recorder:

        async def save(step: int) -> list[str]:
            draft = draft_path(rundir.checkpoints, step)
            draft.mkdir()
            await recorder.commit(CheckpointReady(step, step, str(draft)), ledger.snapshot())
            return sorted(path.name for path in rundir.checkpoints.iterdir())

        trainer = SimpleNamespace(rollback=AsyncMock())
        vars(runner).update(lifecycle=SimpleNamespace(recorder=recorder), rundir=rundir, config=config)
        vars(runner).update(_trainer=trainer)
        recorder.ledger = ledger
        await save(1)
        await runner.rollback(1)
        trainer.rollback.assert_awaited_once_with(1)
        with pytest.raises(UsageError, match="no checkpoint of step 9 is kept, but of 1;"):
            await runner.rollback(9)
        trainer.rollback.side_effect = UsageError("the trainer is being started again")
        with pytest.raises(UsageError, match="is being started again"):
            await runner.rollback(1)
        assert recorder.spared == {1}
        assert await save(2) == ["step-00000001", "step-00000002"]
        ledger.rollbacks = (3,)
        assert await save(3) == ["step-00000003"]


def test_what_is_older_than_the_rollback_is_as_good_as_too_old() -> None:
    gate = replace(StalenessGate(batch=4, max_staleness=3), floor=7)
    assert not gate.fresh(step=8, version=6)
    assert gate.fresh(step=8, version=7)
    refused = gate.refusal(8, [make_sample(0, version=6)])
    assert refused == ("stale", "oldest token has version 6, batch 8, bound 3, and version 7 went back to a checkpoint")


def test_a_rollback_takes_the_number_of_a_step_and_no_groups() -> None:
    ledger = Ledger()
    for position in range(8):
        ledger.settle(ledger.admit(position=position).group_id, "trained")
    assert ledger.steps(4) == 2
    ledger.rollbacks = (3,)
    assert Ledger(ledger.snapshot()).steps(4) == 3
