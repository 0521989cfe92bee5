"""Effective training time: what counts, over one start of a run and over several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from configs.schema import Config
from pipeline.facts.run_directory import RunDir
from pipeline.record.journal import (
    Admitted,
    Began,
    Committed,
    EffectiveTime,
    Event,
    RolledBack,
    Stepped,
    last_sign_s,
    read_journal,
    resumed_time,
)
from pipeline.record.recorder import Recorder
from stages.messages import StepDone


def step(number: int, took_s: float) -> Event:
    return Stepped(number, f"hash {number}", 0, took_s)


def test_one_start_loses_its_beginning_and_its_end() -> None:
    time = EffectiveTime(began_s=1000.0, steps={1: 10.0, 2: 20.0})
    assert time.share(1040.0) == 0.75
    assert EffectiveTime(began_s=1000.0).share(1000.0) == 0.0


def test_what_a_roll_back_undoes_is_lost_and_what_lies_between_two_starts_is_nobodys_time() -> None:
    first = [Began(1000.0), Admitted(0, 0), step(1, 10.0), Committed(1), step(2, 10.0)]
    second = [RolledBack(1, 1, 4), Began(5000.0, before_s=1030.0), step(2, 8.0), step(3, 8.0), Committed(3)]
    once = resumed_time(first, Began(5000.0, before_s=1030.0), step=1)
    assert (once.former_s, once.steps) == (30.0, {1: 10.0})
    assert once.share(5010.0) == 10.0 / 40.0
    again = resumed_time([*first, *second], Began(9000.0, before_s=5020.0), step=3)
    assert (again.former_s, again.steps) == (50.0, {1: 10.0, 2: 8.0, 3: 8.0})
    back = resumed_time([*first, *second], Began(9000.0, before_s=5020.0), step=0)
    assert back.steps == {}


def test_a_journal_without_such_lines_and_a_clock_that_jumps_give_no_nonsense() -> None:
    old = resumed_time([Stepped(1, "hash", 0)], Began(50.0, before_s=40.0), step=1)
    assert (old.former_s, old.share(60.0)) == (0.0, 0.0)
    backwards = resumed_time([Began(1000.0), step(1, 10.0)], Began(50.0, before_s=40.0), step=1)
    assert backwards.former_s == 0.0
    assert backwards.share(51.0) == 1.0


def test_the_last_sign_of_a_start_is_its_newest_file(tmp_path: Path) -> None:
    for name, at in (("a", 100), ("b", 300)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at, at))
    assert last_sign_s(tmp_path / "a", tmp_path / "b", tmp_path / "none") == 300.0
    assert last_sign_s(tmp_path / "none") == 0.0


async def test_the_recorder_writes_it_down_and_a_resume_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("pipeline.record.recorder.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("pipeline.record.recorder.time.time", lambda: 1000.0 + clock[0])
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        with Recorder(Config(), rundir) as recorder:
            recorder.journal.begin_with(recorder.began)
            clock[0] += 5.0  # the processes start
            await recorder.step(StepDone(0, 0, (), {}, 0))
            for number in (1, 2):
                clock[0] += 10.0
                await recorder.step(StepDone(number, number, (number,), {}, 10))
            assert recorder.effective.share(1000.0 + clock[0]) == 20.0 / 25.0
        for file in (rundir.ledger, rundir.metrics):
            os.utime(file, (1127.0, 1127.0))  # it was killed two seconds later
        assert [e.took_s for e in read_journal(rundir.ledger) if isinstance(e, Stepped)] == [10.0, 10.0]
        assert '"perf/effective_training_time":0.8' in rundir.metrics.read_text()
        clock[0] = 900.0
        with Recorder(Config(), rundir, resume_step=1) as resumed:
            assert resumed.began == Began(1900.0, 1127.0)
            assert (resumed.effective.former_s, resumed.effective.steps) == (27.0, {1: 10.0})
