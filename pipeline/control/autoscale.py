"""`--autoscale`: makes what is advised, one change at a time, and takes back what brought nothing.

A change goes the way of `scale`: checked, journalled, kept for a resume. It is a trial until the next whole window,
which begins after the new replicas are up: a rate that rose keeps it. Where the rate stood still and another stage has
become the bottleneck, that one is tried as well, for two equal ones only help together; else all trials are taken back.

Invariants: a stage stays within its limits; what was taken back is not tried again until another trial has raised the
rate, and a stage that was found too small at some number never goes back to it: so there is an end of changes. A stage
that the user scales himself is his from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from pipeline.control.advice import LEAST_GAIN, Advice, Limits, Window, advise
from pipeline.control.meter import Meter

KEPT_GAIN: Final = 0.03  # by which the rate must rise for more replicas to stay
LOST: Final = 0.05  # by which it may seem to fall after some have gone: the noise of a window


class Trial(Struct, frozen=True):
    """A change that the next window judges."""

    stage: str
    before: int
    to: int


class Autoscale:
    """Decides from windows; makes nothing itself. Pure but for what it remembers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = dict(limits)
        self._trials: list[Trial] = []
        self._base = 0.0  # rate before the first of them
        self._useless: set[str] = set()  # more of these brought nothing
        self._least: dict[str, int] = {}  # of stages that were too small with fewer

    def users(self, stages: Mapping[str, int]) -> None:
        """The user scaled these: they are no longer ours, and neither are trials, whose rate is that of another run."""
        for stage in stages:
            self._limits.pop(stage, None)
        self.forget()

    def forget(self) -> None:
        """The run was changed otherwise: what was tried stays, and is not judged."""
        self._trials.clear()

    def refused(self, counts: Mapping[str, int]) -> None:
        """A change could not be made."""
        self._useless |= counts.keys()
        self.forget()

    def decide(self, window: Window) -> tuple[dict[str, int], str]:
        """What to bring stages to, and why; nothing most of the time. Called once for each whole window."""
        advice = advise(window, self.within(window))
        if self._trials:
            gained = window.rate / self._base - 1
            risen = gained >= KEPT_GAIN or (self._trials[0].to < self._trials[0].before and gained >= -LOST)
            if not risen:
                if advice is not None and advice.kind == "up" and self._joins(advice):
                    return self._try(advice)
                return self._take_back(gained)
            self._keep(gained)
            advice = advise(window, self.within(window))  # within what was learnt now
        if advice is None or advice.kind not in ("up", "down"):
            return {}, ""
        self._base = window.rate
        return self._try(advice)

    def within(self, window: Window) -> dict[str, tuple[int, int]]:
        """The limits, narrowed by what was learnt."""
        now = {stage.name: stage.replicas for stage in window.stages}
        found = {}
        for stage, (least, most) in self._limits.items():
            here = now.get(stage, least)
            found[stage] = (max(least, self._least.get(stage, 1)), here if stage in self._useless else most)
        return found

    def _joins(self, advice: Advice) -> bool:
        """Whether a second change is worth a try together with those that brought nothing alone."""
        ups = all(trial.to > trial.before for trial in self._trials)
        return ups and advice.stage not in {trial.stage for trial in self._trials}

    def _try(self, advice: Advice) -> tuple[dict[str, int], str]:
        self._trials.append(Trial(advice.stage, advice.now, advice.to))
        return {advice.stage: advice.to}, advice.sentence

    def _keep(self, gained: float) -> None:
        for trial in self._trials:
            if trial.to > trial.before:
                self._least[trial.stage] = trial.before + 1
        if gained >= LEAST_GAIN:
            self._useless.clear()
        self._trials.clear()

    def _take_back(self, gained: float) -> tuple[dict[str, int], str]:
        back = {trial.stage: trial.before for trial in self._trials}
        for trial in self._trials:
            if trial.to > trial.before:
                self._useless.add(trial.stage)
            else:
                self._least[trial.stage] = trial.before
        self._trials.clear()
        return back, f"taken back, for the rate changed by {gained:+.0%}"


class Adviser:
    """The newest advice of a run, and what `--autoscale` wants to change. `limits`: empty without it."""

    def __init__(self, meter: Meter, limits: Limits) -> None:
        self.meter, self.autoscale = meter, Autoscale(limits) if limits else None
        self._advice: Advice | None = None
        self._decided_step = -1

    def look(self) -> Advice | None:
        """Measure, and advise; None until enough was measured. At its end a run keeps the last advice."""
        self.meter.look()
        window = self.meter.window()
        if window is not None:
            self._advice = advise(window, None if self.autoscale is None else self.autoscale.within(window))
        elif self.meter.steady:
            self._advice = None
        return self._advice

    def change(self) -> tuple[dict[str, int], str]:
        """What to bring stages to now, and why. A window is decided upon once, and no batch is in two of them."""
        window = self.meter.window()
        if self.autoscale is None or window is None or not self.meter.steady:
            return {}, ""
        if window.step - window.batches < self._decided_step:
            return {}, ""
        self._decided_step = window.step
        return self.autoscale.decide(window)
