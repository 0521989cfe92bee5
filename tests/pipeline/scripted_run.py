"""Runs with a script beside their controller: what it does to them, when it wants."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.control.client import NotRunning, ask
from pipeline.control.endpoint import Command, Reply, RunStatus, Status
from pipeline.controller import Controller
from pipeline.graph import Placement
from pipeline.hosts.launcher import Launcher
from pipeline.hosts.rendezvous import Keys
from pipeline.record.journal import Stepped, audit, read_journal
from pipeline.supervise.lifecycle import Lifecycle
from pipeline.supervise.runner import Runner
from transport import Node

Script = Callable[["Scripted"], Awaitable[None]]


class Scripted:
    """A run beside whose controller a script is followed; with its end the run drains."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.runner: Runner
        self.controller: Controller
        self.keys: Keys = None

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
        reported = self.controller.recorder.view._replicas.get(("generate", replica))
        return reported.newest.items_out if reported is not None else 0

    def kill(self, replica: str, number: int) -> None:
        os.kill(int((self.run_dir / "replicas" / f"{replica}.pid").read_text()), number)


def scripted(monkeypatch: pytest.MonkeyPatch, run_dir: Path, script: Script, run: Callable[[Path], int]) -> Scripted:
    """The run that the script was told of. Fails with what the script failed with."""
    run_ = Scripted(run_dir)
    controls, runs, tasks = Controller.__init__, Runner.__init__, list[asyncio.Task[None]]()

    def controlled(self: Controller, *parts: Any) -> None:
        controls(self, *parts)
        run_.controller = self

    def made(self: Runner, place: Placement, node: Node, launcher: Launcher, lifecycle: Lifecycle, keys: Keys) -> None:
        runs(self, place, node, launcher, lifecycle, keys)
        run_.runner, run_.keys = self, keys
        tasks.append(asyncio.ensure_future(run_.follow(script)))

    monkeypatch.setattr(Controller, "__init__", controlled)
    monkeypatch.setattr(Runner, "__init__", made)
    code = run(run_dir)
    tasks[0].result()
    assert code == 0
    books = audit(run_dir / "ledger.jsonl")
    assert books.open == 0
    assert books.twice == ()
    return run_


# Commands to a run in another process, and waiting for what its status tells.


PATIENCE_S = 180.0


def done(run_dir: Path, command: Command) -> Reply:
    reply = ask(run_dir, command)
    assert reply.ok, reply.lines
    return reply


def until(process: subprocess.Popen[str], run_dir: Path, holds: Callable[[RunStatus], bool]) -> RunStatus:
    """The first status of which it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        try:
            status = ask(run_dir, Status()).status
        except NotRunning:  # it starts
            status = None
        if status is not None and holds(status):
            return status
        time.sleep(0.1)
    raise AssertionError("it never came to that")
