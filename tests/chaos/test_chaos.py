"""Six kills of `make chaos`, of those after which something was once wrong or most is in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.kills import CONTROLLER, END, PRUNE, RESUME, RUNNING, SAVE, TRAIN, Kill
from tests.chaos.suite import Case, Running, flags

pytestmark = pytest.mark.slow

KILLS = (
    Kill("generate-0", RUNNING, 2, 0.05),
    Kill("engine-0", RUNNING, 4, 0.1),
    Kill(CONTROLLER, SAVE, 7, 0.002),
    Kill(CONTROLLER, RESUME, 0, 3.0),
    Kill(TRAIN, PRUNE, 12, 0.001),
    Kill("evaluate-0", END, 20, 0.05),
)


def test_six_kills_lose_nothing(tmp_path: Path) -> None:
    verdict = Running(Case("six", tuple(flags(seed=1)), KILLS), tmp_path).run()
    assert verdict.faults == []
    assert len(verdict.done) >= len(KILLS) - 1, verdict.missed  # the end may come before its kill
    assert verdict.resumes == 2  # of the controller: with a checkpoint after each step a killed trainer goes on
