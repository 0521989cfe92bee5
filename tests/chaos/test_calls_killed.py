"""Calls that change the world in a run that is killed: each took effect once, or is said to be uncertain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.calls import UNSURE, judge_calls
from tests.chaos.kills import CONTROLLER, RUNNING, Kill
from tests.chaos.suite import Case, Running, calls_flags

KILLS = (
    Kill("environment", RUNNING, 1, 0.1),
    Kill("agents-0", RUNNING, 2, 0.05),
    Kill("engine-0", RUNNING, 3, 0.05),
    Kill(CONTROLLER, RUNNING, 4, 0.1),
    Kill("environment", RUNNING, 5, 0.05),
)


@pytest.mark.slow
def test_killed_runs_make_each_call_once_or_say_that_nobody_knows(tmp_path: Path) -> None:
    flags = calls_flags(seed=3, steps=7)
    verdict = Running(Case("calls", tuple(flags), KILLS, calls=True, steps=7), tmp_path).run()
    assert verdict.faults == [], verdict.figures
    assert len(verdict.done) >= len(KILLS) - 1, verdict.missed
    assert verdict.resumes == 1


def test_the_oracle_finds_what_is_wrong(tmp_path: Path) -> None:
    calls = [[f"{group}/0", group, 0, "1"] for group in range(5)]
    run, files = tmp_path / "run", tmp_path / "run" / "episodes" / "0"
    files.mkdir(parents=True)

    def write(name: str, *lines: object) -> None:
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def told(count: int) -> None:
        (run / "summary.json").write_text(json.dumps({"uncertain_calls": count}))

    (files / "0a").write_text(json.dumps({"key": {"arguments": [calls[0]]}}))
    (files / "0b").write_text("00000000 {}")
    write("counter", [calls[0], 1], [calls[1], 2], [calls[2], 3])
    write("answered", [calls[0], UNSURE], [calls[1], 2], [calls[1], 2])
    told(1)
    assert judge_calls(run, tmp_path) == []
    write("counter", [calls[1], 2], [calls[2], 3], [calls[2], 4])
    write("answered", [calls[1], 5], [calls[3], 6], [calls[4], UNSURE])
    told(2)
    assert [fault.kind for fault in judge_calls(run, tmp_path)] == ["twice", "lost", "lost", "unreported", "unreported"]
