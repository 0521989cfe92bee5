"""Replicas of a stage that come and go while the run goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, made_model
from launching import here as run_here

import launch as program
from pipeline.controller import Controller
from pipeline.errors import UsageError
from pipeline.hosts.rendezvous import Keys
from pipeline.record.journal import Stepped, audit, read_journal
from pipeline.supervise.restarts import Lifecycle
from pipeline.supervise.runner import Runner
from transport import Node, TopicServer

FLAGS = [*SMALL, *made_model(), *SIMULATED, "--scale", "engine=2", "--num-rollout", "4000"]  # the script ends it
Script = Callable[["Scaling"], Awaitable[None]]


class Scaling:
    """A run in which a script scales stages. Asyncio: it runs beside the controller."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.runner: Runner
        self.controller: Controller

    async def follow(self, script: Script) -> None:
        try:
            await script(self)
        finally:
            self.controller.stage.drain("the script has ended")

    def generating(self) -> list[str]:
        return [name for name in self.runner.alive() if name.startswith("generate-")]

    async def steps(self, count: int) -> None:
        """Wait until so many batches more have been trained."""
        goal = self._done() + count
        await self.until(lambda: self._done() >= goal)

    def _done(self) -> int:
        return sum(isinstance(event, Stepped) for event in read_journal(self.run_dir / "ledger.jsonl"))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110  (a journal announces nothing)
                await asyncio.sleep(0.02)

    def answered(self, replica: str) -> int:
        """Slices that a replica has passed on, as it told last."""
        told = self.controller.recorder.view._replicas.get(("generate", replica))
        return told.newest.items_out if told is not None else 0

    def kill(self, replica: str, number: int) -> None:
        os.kill(int((self.run_dir / "replicas" / f"{replica}.pid").read_text()), number)


def scaled(monkeypatch: pytest.MonkeyPatch, run_dir: Path, script: Script, run: Callable[[Path], int]) -> Scaling:
    """The run that the script was told of. Fails with what the script failed with."""
    scaling = Scaling(run_dir)
    make, tasks = Controller._runner, list[asyncio.Task[None]]()

    def made(self: Controller, node: Node, topic: TopicServer, lifecycle: Lifecycle, keys: Keys) -> Runner:
        scaling.controller, scaling.runner = self, make(self, node, topic, lifecycle, keys)
        tasks.append(asyncio.ensure_future(scaling.follow(script)))
        return scaling.runner

    monkeypatch.setattr(Controller, "_runner", made)
    code = run(run_dir)
    tasks[0].result()
    assert code == 0
    books = audit(run_dir / "ledger.jsonl")
    assert books.open == 0
    assert books.twice == ()
    return scaling


async def one_three_one(run: Scaling) -> None:
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


@pytest.mark.slow
def test_tasks_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = scaled(monkeypatch, tmp_path / "run", one_three_one, lambda run_dir: run_here(run_dir, *FLAGS).code)
    assert scaling.runner.restarts == {}


@pytest.mark.slow
def test_processes_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = scaled(monkeypatch, tmp_path / "run", one_three_one, as_processes)
    assert scaling.runner.restarts == {}, "a replica that is retired ends with 0, and is not started again"


@pytest.mark.slow
def test_a_retiring_replica_that_dies_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(run: Scaling) -> None:
        await run.until((run.run_dir / "ledger.jsonl").exists)
        await run.steps(1)
        run.runner.scale("generate", 2)
        await run.until(lambda: run.answered("generate-1") > 0)
        run.kill("generate-1", signal.SIGSTOP)  # with work in its care
        run.runner.scale("generate", 1)
        run.kill("generate-1", signal.SIGKILL)
        await run.until(lambda: run.generating() == ["generate-0"])

    scaling = scaled(monkeypatch, tmp_path / "run", script, as_processes)
    assert scaling.runner.restarts == {}


def as_processes(run_dir: Path) -> int:
    return program.main(["--run-dir", str(run_dir), *FLAGS])
