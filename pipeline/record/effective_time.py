"""Effective training time: which share of a run's wall clock ended in a step that counts.

A start of a run goes from its first to its last line in the journal or its summary; what lies between two starts is
nobody's time. Inside a start, a step's time is that from the end of the step before it, or from the moment when the
trainer's first weights were out. All else is lost: starting, what a roll-back undoes, a batch that was begun and never
ended, the way to the end.

Invariants: pure but for `last_sign_s`; what is known of former starts comes from the journal alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.record.journal import Began, Event, RolledBack, Stepped


@dataclass
class EffectiveTime:
    """`former_s`: the wall clock of former starts. `steps`: seconds of each step that counts, over all starts."""

    began_s: float  # unix time of this start
    former_s: float = 0.0
    steps: dict[int, float] = field(default_factory=dict)

    def share(self, now_s: float) -> float:
        """Of the wall clock up to a unix time; 0 before there is any."""
        wall = self.former_s + max(0.0, now_s - self.began_s)
        return min(1.0, sum(self.steps.values()) / wall) if wall > 0 else 0.0


def resumed_time(events: Iterable[Event], now: Began, step: int) -> EffectiveTime:
    """What a run that goes on from `step` has behind it. Each start wrote down the last sign of the one before it, and
    `now` is the one that begins."""
    former_s, begun = 0.0, 0.0
    steps: dict[int, float] = {}
    for event in (*events, now):
        match event:
            case Began():
                former_s += max(0.0, event.before_s - begun) if begun else 0.0
                begun = event.unix_s
            case Stepped():
                steps[event.step] = event.took_s
            case RolledBack():
                steps = {number: took_s for number, took_s in steps.items() if number <= event.step}
            case _:
                pass
    return EffectiveTime(now.unix_s, former_s, {number: took_s for number, took_s in steps.items() if number <= step})


def last_sign_s(*files: Path) -> float:
    """Unix time at which one of these files was written last, 0 if there is none."""
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
