"""What an advice is made of: how busy each stage was, what waited for it, and what the run trained, over a window.

Twice a second the meter adds up what the monitor sees; a window is the difference between two of these sums. It begins
after a round of all that was in flight, is at least so long and holds at least so many batches, and is begun anew
whenever replicas come or go, or somebody changes the run: two different runs are not averaged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from configs.graph import SINGLE, loops
from pipeline.control.advice import StageLoad, Window
from pipeline.control.run_parts import RunParts
from pipeline.facts.ring import Ring
from pipeline.facts.stats import CPU
from pipeline.hosts.machine import IdleCores
from pipeline.replica_specs import JOINERS
from stages.topic_values import POLICY, RUNNING, WAITING, entries

LEAST_BATCHES: Final = 4
LOOKS: Final = 20  # sums that are kept of a window
ENGINE: Final = "engine"


# Of one stage since the meter began: seconds, and replica or rollout seconds. `here` and `waiting` are messages
# times seconds,
# of the engines rollouts times seconds.
SUMS: Final = ("busy", "starved", "watched", "items", "cpu", "here", "waiting", "queued")


class Meter:
    """Of one phase of a run."""

    def __init__(self, parts: RunParts, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.graph, self.runner = parts.config, parts.graph, parts.runner
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
        """Add what was since the last look. Called after the view was brought up to date."""
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
        # What was in flight before a change is trained first, and faster than what follows where a queue is worked off.
        if step > self._began_step + self.stage.gate.max_staleness and self.steady:
            self._mark(now, step)

    @property
    def steady(self) -> bool:
        """Whether what is seen tells of the run: it trains, and prompts go on to enter."""
        total, stage = self.stage.gate.total, self.stage
        ends = total is not None and stage.ledger.trained + stage.ledger.open >= total * stage.gate.batch
        return self.recorder.training_started is not None and stage.draining is None and not stage.paused and not ends

    def _run_state(self) -> tuple[object, ...]:
        """What must stay as it is during a window."""
        serving = sorted(name for name, entry in entries(self.topic, POLICY).items() if entry.version >= 0)
        changes, restarts = len(self.recorder.changes), sum(self.recorder.restarts.values())
        return (self.recorder.view.alive(), tuple(serving), self.stage.paused, changes, restarts)

    def _look_at_engines(self, passed: float) -> bool:
        """Returns whether they are full: prompts that wait then wait for them."""
        view, known = self.recorder.view, entries(self.topic, POLICY)
        running = sum(view.extra("engines", f"{name}{RUNNING}") for name in known)
        waiting = sum(view.extra("engines", f"{name}{WAITING}") for name in known)
        full = waiting >= 1 or (bool(known) and running >= 0.9 * sum(entry.limit for entry in known.values()))
        prompts = self.hubs["generate"].stats().queued * self.config.rollout.n_samples_per_prompt if full else 0
        idle = [row.idle for row in view.engine_rows() if row.idle is not None]
        one = self._sums[ENGINE]
        one["starved"] += passed * sum(idle)
        one["busy"] += passed * (len(idle) - sum(idle))
        one["watched"] += passed * len(idle)
        one["here"] += passed * (running + waiting + prompts)
        one["waiting"] += passed * (waiting + prompts)
        one["queued"] += passed * full
        if self.config.engine.engine == "embedded":  # it computes on this machine, or keeps a core busy beside a GPU
            one["cpu"] += passed * (len(idle) - sum(idle))
        return full

    def _look_at(self, name: str, passed: float, engines_full: bool) -> None:
        view, one = self.recorder.view, self._sums[name]
        one["busy"], one["starved"] = view.total(name, "busy_s"), view.total(name, "starved_s")
        one["watched"] = one["busy"] + one["starved"] + view.total(name, "blocked_s") + view.total(name, "stalled_s")
        one["items"], one["cpu"] = view.total(name, "items_in"), view.extra(name, CPU)
        stats = [self.hubs[stream.name].stats() for stream in self.graph.inlets(name).values()]
        queued, leased = sum(s.queued for s in stats), sum(s.leased for s in stats)
        if name == "generate":  # what it has in work, engines do; what waits for full engines does not wait for it
            here = waiting = 0 if engines_full else queued
        elif name in JOINERS:  # holds parts of groups by its nature
            here = waiting = queued
        else:
            here = queued + leased
            waiting = max(0, here - view.in_flight(name))
        one["here"] += passed * here
        one["waiting"] += passed * waiting
        one["queued"] += passed * (waiting >= 1)

    def _mark(self, now: float, step: int) -> None:
        """Keep the sums of now."""
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
        """The newest one, None while it is too short, and when stages have ended, as they do one by one in the end."""
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
            stages=tuple(self._load(name, one, seconds, flow) for name, one in sums.items() if name != "train"),
            free_cores=None if self._idle is None else grown["idle_cores"] / seconds,
        )

    def _load(self, name: str, one: Mapping[str, float], seconds: float, flow: float) -> StageLoad:
        members = self.config.rollout.n_samples_per_prompt
        if name == ENGINE or name in loops(self.config):  # a rollout goes round a loop on its own
            rollouts = 1.0
        elif name == "generate":
            rollouts = float(members)
        else:  # in a message, mean
            rollouts = min(max(flow * seconds / one["items"], 1.0), float(members)) if one["items"] else 1.0
        count = max(1, len(self.runner.replicas(name)))
        return StageLoad(
            name=name,
            replicas=count,
            busy=_share(one["busy"], one["watched"]),
            starved=_share(one["starved"], one["watched"]),
            here=one["here"] / seconds * rollouts,
            waiting=one["waiting"] / seconds * rollouts,
            queued=one["queued"] / seconds,
            cores=max(0.0, one["cpu"]) / seconds / count,
            fixed=self.runner.refusal(name, count + 1) or "",
        )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
