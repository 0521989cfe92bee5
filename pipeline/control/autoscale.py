"""`--autoscale`: measures a run, makes what is advised, one change at a time, and takes back what brought nothing.

Twice a second the meter adds up what the monitor sees. A window is the difference between two of these sums. It begins
after a round of all that was in flight, has a least length and a least number of batches, and starts again whenever
replicas come or go, or a user changes the run: two different runs are not averaged.

A change goes the way of `scale`: checked, journalled, kept for a resume. It is a trial until the next whole window,
which begins after the new replicas are up: a rate that rose keeps it. Where the rate stood still and another stage has
become the bottleneck, that stage is tried as well, because two equal ones only help together. Otherwise all trials are
taken back.

Invariants: a stage stays within its limits; what was taken back is not tried again until another trial has raised the
rate, and a stage that was too small at some number never goes back to it, so changes come to an end. A stage that the
user scales is left to the user from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from configs.graph import SINGLE, loops
from pipeline.control.advice import LEAST_GAIN, Advice, Limits, StageLoad, Window, advise
from pipeline.control.monitor import RunParts
from pipeline.facts.stats import CPU, QUEUED, Ring
from pipeline.graph import JOINERS
from pipeline.hosts.machine import IdleCores
from stages.topic_values import POLICY, RUNNING, WAITING, entries

LEAST_BATCHES: Final = 4
LOOKS: Final = 20  # sums that are kept of a window
ENGINE: Final = "engine"


# Sums of one stage since the meter began: seconds, and replica or rollout seconds. `here` and `waiting` are messages
# times seconds, for the engines rollouts times seconds.
SUMS: Final = ("busy", "starved", "watched", "items", "cpu", "here", "waiting", "queued")


class Meter:
    """Measures one phase of a run."""

    def __init__(self, parts: RunParts, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.graph, self.runner = parts.placement.config, parts.placement.graph, parts.runner
        self.stage, self.recorder, self.hubs, self.topic = parts.stage, parts.recorder, parts.hubs, parts.topic
        self.window_s = self.config.run.autoscale_window_s
        self._idle = IdleCores() if self.config.run.runner != "ray" else None
        self._names = [node.name for node in self.graph.nodes if node.name not in SINGLE or node.name == "train"]
        self._generates = "generate" in self._names
        named = (*self._names, *((ENGINE,) if self._generates else ()))
        self._sums = {name: dict.fromkeys(SUMS, 0.0) for name in named}
        self._open = 0.0
        self._clock, self._last_s = clock, clock()
        self._ring = Ring(self.window_s, step=LEAST_BATCHES)
        self._state: tuple[object, ...] = ()
        self._began_step = -1

    def look(self) -> None:
        """Add the time since the last look. Called after the view was updated."""
        now = self._clock()
        passed, self._last_s = now - self._last_s, now
        if not self._generates:
            return
        full = self._look_at_engines(passed)
        for name in self._names:
            self._look_at(name, passed, full)
        self._open += self.stage.ledger.open * passed
        step, state = self.stage.steps, self._run_state()
        if state != self._state:
            self._state, self._began_step = state, step
            self._ring.clear()
        # Groups from before a change are trained first, and faster than later groups where a queue is worked off.
        if step > self._began_step + self.stage.gate.max_staleness and self.steady:
            self._mark(now, step)

    @property
    def steady(self) -> bool:
        """Whether the figures describe the run: it trains, and prompts still enter."""
        total, stage = self.stage.gate.total, self.stage
        ends = total is not None and stage.ledger.trained + stage.ledger.open >= total * stage.gate.batch
        return self.recorder.training_started is not None and stage.draining is None and not stage.paused and not ends

    def _run_state(self) -> tuple[object, ...]:
        """What must not change during a window."""
        serving = sorted(name for name, entry in entries(self.topic, POLICY).items() if entry.version >= 0)
        changes, restarts = len(self.recorder.changes), sum(self.recorder.restarts.values())
        return (self.recorder.view.alive(), tuple(serving), self.stage.paused, changes, restarts)

    def _look_at_engines(self, passed: float) -> bool:
        """Returns whether the engines are full: waiting prompts then wait for engines."""
        view, known = self.recorder.view, entries(self.topic, POLICY)
        running = sum(view.extra("engines", f"{name}{RUNNING}") for name in known)
        waiting = sum(view.extra("engines", f"{name}{WAITING}") for name in known)
        full = waiting >= 1 or (bool(known) and running >= 0.9 * sum(entry.limit for entry in known.values()))
        prompts = self.hubs["generate"].stats().queued * self.config.rollout.n_samples_per_prompt if full else 0
        idle = [row.idle for row in view.engine_rows() if row.idle is not None]
        sums = self._sums[ENGINE]
        sums["starved"] += passed * sum(idle)
        sums["busy"] += passed * (len(idle) - sum(idle))
        sums["watched"] += passed * len(idle)
        sums["here"] += passed * (running + waiting + prompts)
        sums["waiting"] += passed * (waiting + prompts)
        sums["queued"] += passed * full
        if self.config.engine.engine == "embedded":  # computes on this machine, or keeps a core busy beside a GPU
            sums["cpu"] += passed * (len(idle) - sum(idle))
        return full

    def _look_at(self, name: str, passed: float, engines_full: bool) -> None:
        view, sums = self.recorder.view, self._sums[name]
        sums["busy"], sums["starved"] = view.total(name, "busy_s"), view.total(name, "starved_s")
        sums["watched"] = sums["busy"] + sums["starved"] + view.total(name, "blocked_s") + view.total(name, "stalled_s")
        sums["items"], sums["cpu"] = view.total(name, "items_in"), view.extra(name, CPU)
        stats = [self.hubs[stream.name].stats() for stream in self.graph.inlets(name).values()]
        queued = sum(s.queued for s in stats) + int(view.extra(name, QUEUED))
        leased = max(
            sum(s.leased for s in stats), view.in_flight(name)
        )  # hubs lease nothing to a later stage of a chain
        if name == "generate":  # engines do its work; prompts that wait for full engines do not wait for generate
            here = waiting = 0 if engines_full else queued
        elif name in JOINERS:  # holds parts of groups by its nature
            here = waiting = queued
        else:
            here = queued + leased
            waiting = max(0, here - view.in_flight(name))
        sums["here"] += passed * here
        sums["waiting"] += passed * waiting
        sums["queued"] += passed * (waiting >= 1)

    def _mark(self, now: float, step: int) -> None:
        """Keep the present sums."""
        newest, ledger = self._ring.newest, self.stage.ledger
        if newest is not None and (now - newest[0] < self.window_s / LOOKS or step == newest[1]["step"]):
            return
        run = {
            "step": step,
            "step_s": self.recorder.last_step_s,
            "trained": ledger.trained,
            "settled": ledger.admitted - ledger.open,
            "open": self._open,
            "idle_cores": self._idle.look() if self._idle is not None else 0.0,
        }
        stages = {f"{name}/{what}": value for name, sums in self._sums.items() for what, value in sums.items()}
        self._ring.add(now, run | stages)

    def window(self) -> Window | None:
        """The newest window; None while it is too short, and once stages have ended, one by one, at the end of a
        run."""
        if not all(self.runner.replicas(name) for name in self._names):
            return None
        if not self._ring.full or self._ring.newest is None:
            return None
        members, (seconds, grown) = self.config.rollout.n_samples_per_prompt, self._ring.change()
        between = max(grown["step_s"], 1e-9)
        flow = grown["settled"] * members / between
        sums = {name: {what: grown[f"{name}/{what}"] for what in SUMS} for name in self._sums}
        return Window(
            batches=int(grown["step"]),
            step=int(self._ring.newest[1]["step"]),
            rate=grown["trained"] * members / between,
            open=grown["open"] / seconds * members,
            train=_share(sums["train"]["busy"], sums["train"]["watched"]),
            stages=tuple(self._load(name, load, seconds, flow) for name, load in sums.items() if name != "train"),
            free_cores=None if self._idle is None else grown["idle_cores"] / seconds,
        )

    def _load(self, name: str, sums: Mapping[str, float], seconds: float, flow: float) -> StageLoad:
        members = self.config.rollout.n_samples_per_prompt
        if name == ENGINE or name in loops(self.config):  # a rollout goes round a loop on its own
            rollouts = 1.0
        elif name == "generate":
            rollouts = float(members)
        else:  # in a message, mean
            rollouts = min(max(flow * seconds / sums["items"], 1.0), float(members)) if sums["items"] else 1.0
        count = max(1, len(self.runner.replicas(name)))
        return StageLoad(
            name=name,
            replicas=count,
            busy=_share(sums["busy"], sums["watched"]),
            starved=_share(sums["starved"], sums["watched"]),
            here=sums["here"] / seconds * rollouts,
            waiting=sums["waiting"] / seconds * rollouts,
            queued=sums["queued"] / seconds,
            cores=max(0.0, sums["cpu"]) / seconds / count,
            fixed=self.runner.refusal(name, count + 1) or "",
        )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


KEPT_GAIN: Final = 0.03  # by which the rate must rise for more replicas to stay
LOST: Final = 0.05  # by which it may seem to fall after some have gone: the noise of a window


class Trial(Struct, frozen=True):
    """A change that the next window judges."""

    stage: str
    before: int
    to: int


class Autoscale:
    """Decides from windows; makes no change itself. No I/O, no clock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = dict(limits)
        self._trials: list[Trial] = []
        self._base = 0.0  # rate before the first of them
        self._useless: set[str] = set()  # more of these brought nothing
        self._least: dict[str, int] = {}  # of stages that were too small with fewer

    def users(self, stages: Mapping[str, int]) -> None:
        """The user scaled these stages: autoscaling leaves them alone, and drops its trials, which measured another
        run."""
        for stage in stages:
            self._limits.pop(stage, None)
        self.forget()

    def forget(self) -> None:
        """The run was changed in another way: trials stay, and are not judged."""
        self._trials.clear()

    def refused(self, counts: Mapping[str, int]) -> None:
        """A change could not be made."""
        self._useless |= counts.keys()
        self.forget()

    def decide(self, window: Window) -> tuple[dict[str, int], str]:
        """The new replicas of stages, and why; mostly empty. Called once for each whole window."""
        advice = advise(window, self.within(window))
        if self._trials:
            gained = window.rate / self._base - 1
            risen = gained >= KEPT_GAIN or (self._trials[0].to < self._trials[0].before and gained >= -LOST)
            if not risen:
                if advice is not None and advice.kind == "up" and self._joins(advice):
                    return self._try(advice)
                return self._take_back(gained)
            self._keep(gained)
            advice = advise(window, self.within(window))  # within the limits as narrowed now
        if advice is None or advice.kind not in ("up", "down"):
            return {}, ""
        self._base = window.rate
        return self._try(advice)

    def within(self, window: Window) -> dict[str, tuple[int, int]]:
        """The limits, narrowed by the results of trials."""
        now = {stage.name: stage.replicas for stage in window.stages}
        found = {}
        for stage, (least, most) in self._limits.items():
            here = now.get(stage, least)
            found[stage] = (max(least, self._least.get(stage, 1)), here if stage in self._useless else most)
        return found

    def _joins(self, advice: Advice) -> bool:
        """Whether a second change is worth a trial together with the changes that brought nothing alone."""
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
        """Measure, and advise; None until a window is whole. A run that ends keeps the last advice."""
        self.meter.look()
        window = self.meter.window()
        if window is not None:
            self._advice = advise(window, None if self.autoscale is None else self.autoscale.within(window))
        elif self.meter.steady:
            self._advice = None
        return self._advice

    def change(self) -> tuple[dict[str, int], str]:
        """The new replicas of stages now, and why. A window is used for one decision, and no batch is in two
        windows."""
        window = self.meter.window()
        if self.autoscale is None or window is None or not self.meter.steady:
            return {}, ""
        if window.step - window.batches < self._decided_step:
            return {}, ""
        self._decided_step = window.step
        return self.autoscale.decide(window)
