"""`launch.py watch`: the table of a run that goes on elsewhere, from its first status to its end."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import launch
from pipeline.control.client import watch
from pipeline.control.endpoint import Command, Reply, RunStatus, endpoint
from pipeline.facts.run_directory import RunDir
from pipeline.observe.table import LiveTable, PlainLog
from tests.pipeline.control.test_run_states import summary
from tests.pipeline.observe.test_displays import T0, made_up_run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.control.client.ASK_S", 0.005)


@pytest.fixture
def rundir(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        rundir.write_config("[run]\n")
        yield rundir


class Running:
    """Answers as a run of which each status shows the next step; refuses the second question."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked, self.enough = path, 0, asyncio.Event()

    async def answer(self, command: Command) -> Reply:
        self.asked += 1
        if self.asked == 2:
            return Reply(False, ("8 requests are being answered; try again",))
        if self.asked >= 6:
            self.enough.set()
        step = min(self.asked, 4)
        snapshot = dataclasses.replace(made_up_run().snapshot(T0 + 20), step=step)
        return Reply(True, status=RunStatus(str(self.path), "paused" if step == 4 else "running", snapshot))


async def test_the_steps_of_a_run_are_shown_until_it_has_ended(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Running(rundir.path)
    watching = asyncio.ensure_future(asyncio.to_thread(launch.main, ["watch", str(rundir.path)]))
    async with endpoint(rundir.path, rundir.sockets, run.answer):
        await run.enough.wait()
    summary(rundir.path, "interrupted")
    rundir.__exit__()
    assert await watching == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown, "no terminal"
    lines = [line.split(" ", 1)[1] for line in shown.splitlines() if line[2:3] == ":"]
    assert [line.partition(" |")[0] for line in lines if line.startswith("step")] == [
        "step 1/10",
        "step 3/10",
        "step 4/10",
    ]
    others = [line for line in lines if not line.startswith("step")]
    assert [line for line in others if line not in ("starting", "stopping")] == [
        "running", "8 requests are being answered; try again", "running", "paused", "drained"
    ]  # fmt: skip
    assert "state      drained (interrupted)" in shown
    assert f"continue   python launch.py --resume {rundir.path}" in shown


async def test_a_terminal_of_eighty_columns_shows_the_table(rundir: RunDir) -> None:
    run, out = Running(rundir.path), io.StringIO()

    def watched() -> RunStatus:
        with LiveTable(Console(file=out, force_terminal=True, width=80), refresh_per_s=200) as display:
            return watch(rundir.path, display)

    watching = asyncio.ensure_future(asyncio.to_thread(watched))
    async with endpoint(rundir.path, rundir.sockets, run.answer):
        await run.enough.wait()
    summary(rundir.path, "completed")
    rundir.__exit__()
    assert (await watching).state == "completed"
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    assert any("step 4/10" in line for line in lines)
    assert any("starved" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_before_there_is_anything_to_draw_the_state_is_shown() -> None:
    out = io.StringIO()
    with LiveTable(Console(file=out, force_terminal=True, width=80)) as display:
        display.note("starting")
    assert "starting" in out.getvalue()


def test_the_steps_after_a_warm_start_are_shown_too() -> None:
    out = io.StringIO()
    with PlainLog(Console(file=out)) as display:
        for step in (59, 60, 0, 1, 1, 2):
            display.update(dataclasses.replace(made_up_run().snapshot(T0 + 20), step=step))
    assert re.findall(r"step (\d+)/", out.getvalue()) == ["59", "60", "1", "2"]


@pytest.mark.parametrize(
    ("reason", "code", "words"),
    [
        ("completed", 0, "state      completed\n"),
        ("interrupted", 0, "drained"),
        ("failed: out of luck", 1, "out of luck"),
    ],
)
def test_of_a_run_that_has_ended_the_end_is_shown_at_once(
    reason: str, code: int, words: str, rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    summary(rundir.path, reason)
    rundir.__exit__()
    assert launch.main(["watch", str(rundir.path)]) == code
    assert words in capsys.readouterr().out


def test_a_killed_run_is_an_end(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    rundir.__exit__()
    (rundir.path / ".seal-0123").touch()
    assert launch.main(["watch", str(rundir.path)]) == 1
    assert "killed (its process went without an end" in capsys.readouterr().out


def test_where_there_is_no_run_the_error_says_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["watch", str(tmp_path / "nowhere")]) == 3
    assert "nowhere is no directory; give the run directory" in capsys.readouterr().err
