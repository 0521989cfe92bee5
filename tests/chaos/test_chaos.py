"""Killed runs: six kills of `make chaos`, runs with `--auto-resume` that are killed again and again, killed calls.

Where the controller alone is killed, its engines continue.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.compared import trained_by
from tests.chaos.kills import CONTROLLER, END, EVERYTHING, PRUNE, RESUME, ROLLBACK, RUNNING, SAVE, TRAIN, Kill
from tests.chaos.suite import AUTO, Case, Running, calls_flags, flags, sync_flags

pytestmark = pytest.mark.slow

KILLS = (
    Kill("generate-0", RUNNING, 2, 0.05),
    Kill("engine-0", RUNNING, 4, 0.1),
    Kill(CONTROLLER, SAVE, 7, 0.002),
    Kill(CONTROLLER, RESUME, 0, 1.0),  # long before the resumed run can be at its end
    Kill(TRAIN, PRUNE, 12, 0.001),
    Kill("evaluate-0", END, 20, 0.05),
)


def test_six_kills_lose_nothing(tmp_path: Path) -> None:
    verdict = Running(Case("six", tuple(flags(seed=1)), KILLS), tmp_path).run()
    assert verdict.faults == []
    assert len(verdict.done) >= len(KILLS) - 1, verdict.missed  # the end may come before its kill
    assert verdict.resumes == 2  # of the controller: with a checkpoint after each step a killed trainer goes on


BACK_KILLS = (
    Kill(ROLLBACK, RUNNING, 3, 0.0),
    Kill(TRAIN, RUNNING, 3, 1.0),  # while it goes back
    Kill("engine-0", RUNNING, 7, 0.05),
    Kill(ROLLBACK, RUNNING, 8, 0.001),
    Kill(CONTROLLER, RUNNING, 16, 0.1),  # when the second is long over
)


def test_a_run_that_goes_back_while_it_is_killed_keeps_its_books_and_has_the_weights_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    verdict = Running(Case("back", tuple(flags(seed=4)), BACK_KILLS), tmp_path).run()
    assert verdict.faults == []
    assert (verdict.missed, verdict.kills, verdict.compared, verdict.resumes) == ([], 3, 2, 1)


RESUMED_KILLS = (Kill(CONTROLLER, SAVE, 3, 0.002), Kill(EVERYTHING, RUNNING, 12, 0.05))


@pytest.mark.full
def test_a_run_that_is_killed_as_a_whole_comes_back_by_itself(tmp_path: Path) -> None:
    verdict = Running(Case("auto", (*flags(seed=2), *AUTO), RESUMED_KILLS, auto=True), tmp_path).run()
    assert verdict.faults == []
    assert verdict.missed == []
    assert verdict.resumes == len(RESUMED_KILLS)
    terminal = (tmp_path / "terminal.log").read_text()
    assert terminal.count("auto-resume: the run ended with signal SIGKILL; resuming") == len(RESUMED_KILLS)
    for engine in ("engine-0", "engine-1"):
        assert terminal.count(f"{engine}: taken over from the start before") == 1


@pytest.mark.full
def test_a_sync_run_on_engines_that_it_took_over_trains_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    given = tuple(sync_flags(seed=3))
    alone = Case("undisturbed", given, (), bound=0)
    assert Running(alone, tmp_path / "alone").run().faults == []
    undisturbed = trained_by(tmp_path / "alone" / "run", alone.expected)
    kills = (Kill(CONTROLLER, RUNNING, 4, 0.1), Kill(CONTROLLER, SAVE, 9, 0.002), Kill(CONTROLLER, RUNNING, 14, 0.0))
    case = Case("auto", (*given, *AUTO), kills, bound=0, undisturbed=undisturbed, auto=True)
    verdict = Running(case, tmp_path / "killed").run()
    assert (verdict.faults, verdict.resumes) == ([], len(kills))
    terminal = (tmp_path / "killed" / "terminal.log").read_text()
    assert terminal.count("engine-0: taken over from the start before") == len(kills)


CALLS_KILLS = (
    Kill("environment", RUNNING, 1, 0.1),
    Kill("agents-0", RUNNING, 2, 0.05),
    Kill("engine-0", RUNNING, 3, 0.05),
    Kill(CONTROLLER, RUNNING, 4, 0.1),
    Kill("environment", RUNNING, 5, 0.05),
)


@pytest.mark.full
def test_killed_runs_make_each_call_once_or_are_uncertain(tmp_path: Path) -> None:
    given = tuple(calls_flags(seed=3, steps=7))
    verdict = Running(Case("calls", given, CALLS_KILLS, calls=True, steps=7), tmp_path).run()
    assert verdict.faults == [], verdict.figures
    assert len(verdict.done) >= len(CALLS_KILLS) - 1, verdict.missed
    assert verdict.resumes == 1
