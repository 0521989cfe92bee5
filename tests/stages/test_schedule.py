"""What is due after each step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stages.train.schedule import Due, Schedule

EVERY = Schedule(
    total=6, first=0, publish_every=2, save_every=3, evaluate_every=2, evaluate_initial=True
)  # fmt: skip


def steps(schedule: Schedule, field: str) -> list[int]:
    return [step for step in range(schedule.total + 1) if getattr(schedule.due(step), field)]


def test_each_interval_counts_over_all_starts_of_a_run() -> None:
    assert steps(EVERY, "publish") == [0, 2, 4, 6]
    assert steps(EVERY, "evaluate") == [0, 2, 4, 6]
    assert steps(EVERY, "save") == [0, 3, 6]
    assert steps(EVERY, "end") == [6]
    assert steps(replace(EVERY, first=3), "publish") == [0, 2, 3, 4, 6], "the weights of a resumed run"


def test_the_end_publishes_saves_and_evaluates() -> None:
    last = replace(EVERY, total=5).due(5)
    assert last == Due(publish=True, evaluate=True, save=True, end=True)
    assert EVERY.due(1, target_reached=True) == Due(publish=True, evaluate=False, save=True, end=True)


def test_what_is_off_is_never_due() -> None:
    off = Schedule(total=9, first=0, publish_every=None, save_every=None, evaluate_every=2, evaluate_initial=True)
    assert (steps(off, "publish"), steps(off, "evaluate"), steps(off, "save")) == ([], [], [9])
    assert off.due(4, save_requested=True).save


@pytest.mark.parametrize(("initial", "versions"), [(True, [0, 6]), (False, [6])])
def test_only_published_versions_are_evaluated(initial: bool, versions: list[int]) -> None:
    assert steps(replace(EVERY, evaluate_every=3, evaluate_initial=initial), "evaluate") == versions
