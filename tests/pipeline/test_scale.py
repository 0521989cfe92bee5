"""Replicas of a stage that come and go while the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, made_model
from launching import here as run_here
from scripted_run import Scripted, scripted

import launch as program
from pipeline.errors import UsageError

pytestmark = pytest.mark.slow

FLAGS = [*SMALL, *made_model(), *SIMULATED, "--scale", "engine=2", "--num-rollout", "4000"]  # the script ends it


async def one_three_one(run: Scripted) -> None:
    await run.until(lambda: run.generating() == ["generate-0"] and (run.run_dir / "ledger.jsonl").exists())
    await run.steps(2)
    run.runner.scale("generate", 3)
    assert run.generating() == ["generate-0", "generate-1", "generate-2"]
    assert run.runner.topic.get("scale/generate") == b"3"
    await run.until(lambda: run.answered("generate-1") > 0 and run.answered("generate-2") > 0)
    run.runner.scale("generate", 1)
    await run.until(lambda: run.generating() == ["generate-0"])
    assert run.runner.topic.get("scale/generate") == b"1"
    assert not [key for key in run.runner.topic.items("") if key.endswith(("generate-1", "generate-2"))]
    await run.steps(2)
    for stage, count in (("generate", 0), ("train", 2), ("nothing", 1)):
        with pytest.raises(UsageError, match=f"{stage} cannot be scaled"):
            run.runner.scale(stage, count)


def test_tasks_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = scripted(monkeypatch, tmp_path / "run", one_three_one, lambda run_dir: run_here(run_dir, *FLAGS).code)
    assert done.controller.recorder.restarts == {}


@pytest.mark.full
def test_processes_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = scripted(monkeypatch, tmp_path / "run", one_three_one, as_processes)
    assert done.controller.recorder.restarts == {}, "a replica that is retired ends with 0, and is not started again"


def test_a_retiring_replica_that_dies_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(run: Scripted) -> None:
        await run.until((run.run_dir / "ledger.jsonl").exists)
        await run.steps(1)
        run.runner.scale("generate", 2)
        await run.until(lambda: run.answered("generate-1") > 0)
        run.kill("generate-1", signal.SIGSTOP)  # with work in its care
        run.runner.scale("generate", 1)
        run.kill("generate-1", signal.SIGKILL)
        await run.until(lambda: run.generating() == ["generate-0"])

    done = scripted(monkeypatch, tmp_path / "run", script, as_processes)
    assert done.controller.recorder.restarts == {}


def as_processes(run_dir: Path) -> int:
    return program.main(["--run-dir", str(run_dir), *FLAGS])
