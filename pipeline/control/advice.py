"""Which stage a run should scale, from the figures of a window. No I/O, no clock.

The rollouts of a run circulate in a closed loop: the staleness gate keeps about as many in flight as it admits. So, by
Little's law, a round takes `open / rate` seconds, and a stage's part of the round is the rollouts it holds, divided by
the rate. A stage that always has work waiting is the bottleneck: its rate grows with its replicas, until no work waits
or the trainer is always busy. A stage that holds many rollouts without a queue may not finish a message sooner with
more replicas: its part of the round is the most that they could save, and only a trial shows the gain.

Invariants: no advice leaves the limits; none adds replicas to a stage that mostly waits for work or cannot be scaled,
replicas that compute where no core is free, or engines where no GPU is free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from pipeline.facts.run_log import PROGRAM

LEAST_GAIN: Final = 0.05  # a smaller gain is within the noise of a window
FULL: Final = 0.85  # share of the time from which a stage counts as always at work, or as always having a queue
STARVED: Final = 0.5
# A replica that uses less of a core waits for something else. The bound is low, because on a saturated machine a
# replica that computes gets little of a core as well.
WAITS_CORES: Final = 0.1
RELAXED: Final = 0.7  # share of the time that replicas may be at work after one of them was removed

Limits = Mapping[str, tuple[int, int]]


class StageLoad(Struct, frozen=True, kw_only=True):
    """One stage, or the engines, over a window. Shares of the replicas' time, means, rollouts."""

    name: str
    replicas: int
    busy: float
    starved: float
    here: float = 0.0  # rollouts that wait for the stage or are in work there
    waiting: float = 0.0  # rollouts of `here` that no replica has begun
    queued: float = 0.0  # share of the window in which something waited
    cores: float = 0.0  # used by one replica
    fixed: str = ""  # why it cannot be scaled up, empty if it can


class Window(Struct, frozen=True, kw_only=True):
    """A run over some seconds."""

    batches: int
    step: int  # of the last of them
    rate: float  # trained rollouts per second
    open: float  # rollouts in flight, mean
    train: float  # busy share of the trainer
    stages: tuple[StageLoad, ...]
    free_cores: float | None = None  # of this machine; None where replicas are elsewhere


class Advice(Struct, frozen=True, kw_only=True):
    """What to do: bring `stage` from `now` to `to` replicas. `gain`: of the rate, as a share; None where none is
    expected."""

    kind: Literal["up", "down", "train", "held", "balanced"]
    sentence: str
    stage: str = ""
    now: int = 0
    to: int = 0
    gain: float | None = None
    next: str = ""  # the bottleneck after the change
    tried: bool = False  # whether only a trial shows the gain


def advise(window: Window, limits: Limits | None = None) -> Advice | None:
    """The advice, None if nothing was trained. `limits`: of the stages that may be scaled, None for all stages."""
    if window.rate <= 0 or window.open <= 0:
        return None
    held: Advice | None = None
    # Stages that more replicas may make faster; twice as many are the most to consider.
    candidates = [one for one in window.stages if one.starved < STARVED and one.busy >= FULL and one.here > 0]
    for stage in sorted(candidates, key=lambda one: -_gain(window, one, 2 * one.replicas)):
        if _gain(window, stage, 2 * stage.replicas) < LEAST_GAIN:
            break
        found = _more(window, stage, 2 * stage.replicas, limits)
        if found.kind == "up":
            return found
        held = held or found
        if _saturated(stage):  # all other stages wait for it, so scaling them brings nothing
            return held
    if window.train >= 1 / (1 + 2 * LEAST_GAIN):
        busy = f"train is the bottleneck: it computes {window.train:.0%} of the time"
        most = f"so that nothing to scale would add more than {1 / window.train - 1:.0%}"
        held = Advice(kind="train", sentence=f"{busy}, {most}", stage="train")
    surplus = next((less for stage in window.stages if (less := _fewer(stage, limits))), None)
    if surplus is not None:
        return replace(surplus, sentence=f"{held.sentence}; {surplus.sentence}") if held else surplus
    sentence = f"nothing to scale: for no stage does work wait all the time, and train is busy {window.train:.0%}"
    return held or Advice(kind="balanced", sentence=sentence)


def _saturated(stage: StageLoad) -> bool:
    return stage.queued >= FULL and stage.waiting > 0


def _gain(window: Window, stage: StageLoad, to: int) -> float:
    """The gain of the rate with `to` replicas, as a share, at most what the trainer has time for."""
    here, waiting = min(stage.here, window.open), min(stage.waiting, window.open)
    if _saturated(stage):
        faster = min(to / stage.replicas, window.open / max(window.open - waiting, 1e-9))
    else:
        faster = window.open / max(window.open - here * (1 - stage.replicas / to), 1e-9)
    return min(faster, 1 / max(window.train, 1e-9)) - 1


def _more(window: Window, stage: StageLoad, most: int, limits: Limits | None) -> Advice:
    """More replicas of a stage, or why not: the smallest number with nearly the gain of the largest."""
    limit = most if limits is None else limits.get(stage.name, (1, stage.replicas))[1]
    room = _room(window, stage)
    allowed = min(most, limit, stage.replicas + room)
    engines = stage.name == "engine"
    called, share = "engines" if engines else stage.name, min(1.0, stage.here / window.open)
    what = f"{called} {'are' if engines else 'is'} the bottleneck"
    if not _saturated(stage):
        verb = "hold" if engines else "holds"
        what = f"{called} {verb} {share:.0%} of the rollouts in flight, though not always with a queue"
    if stage.fixed or allowed <= stage.replicas or _gain(window, stage, allowed) < LEAST_GAIN:
        if stage.fixed:
            why = f"no more can be added: {stage.fixed}"
        elif stage.replicas + room < min(most, limit):
            why = (
                f"one replica uses {stage.cores:.1f} of a core and {window.free_cores or 0:.1f} are free, so that "
                "more would only share them"
            )
        elif limits is not None and stage.name not in limits:
            why = f"it is not among --autoscale; {PROGRAM} scale RUN {stage.name}={most} would add some"
        else:
            why = f"--autoscale stops at {stage.replicas}: its limit, or the most that was of use"
        return Advice(kind="held", sentence=f"{what}, but {why}", stage=stage.name, now=stage.replicas)
    whole = _gain(window, stage, allowed)
    to = next(n for n in range(stage.replicas + 1, allowed + 1) if _gain(window, stage, n) >= 0.95 * whole)
    gain, then = _gain(window, stage, to), _next(window, stage, to)
    sure = _saturated(stage)
    would = (
        f"{stage.name} {stage.replicas} -> {to} would make about {window.rate * (1 + gain):.3g} rollouts/s of "
        f"{window.rate:.3g} (+{gain:.0%})"
        if sure
        else f"{stage.name} {stage.replicas} -> {to} may add up to {gain:.0%} to {window.rate:.3g} rollouts/s; only a "
        "trial can tell"
    )
    follows = f", then {then} is next" if then and sure else ""
    return Advice(
        kind="up",
        sentence=f"{what}; {would}{follows}",
        stage=stage.name,
        now=stage.replicas,
        to=to,
        gain=round(gain, 4),
        next=then,
        tried=not sure,
    )


def _room(window: Window, stage: StageLoad) -> int:
    """Replicas for which there are cores. One that waits for a service or a clock needs none."""
    if window.free_cores is None or stage.cores < WAITS_CORES:
        return stage.replicas
    return math.floor(window.free_cores / stage.cores)


def _next(window: Window, stage: StageLoad, to: int) -> str:
    """What bounds the run with `to` replicas: the trainer where it gets busy, else the stage that holds most."""
    if window.train * (1 + _gain(window, stage, to)) >= 0.95:
        return "train"
    others = [other for other in window.stages if other.name != stage.name]
    return max(others, key=lambda other: other.here).name if others else ""


def _fewer(stage: StageLoad, limits: Limits | None) -> Advice | None:
    """A stage of which fewer replicas would do, half of them at least. They are used for no more than they are busy."""
    least = 1 if limits is None else limits.get(stage.name, (stage.replicas, 0))[0]
    to = max(math.ceil(stage.replicas * stage.busy / RELAXED), math.ceil(stage.replicas / 2), least, 1)
    if to >= stage.replicas or stage.queued >= 1 - FULL:
        return None
    return Advice(
        kind="down",
        sentence=(
            f"{stage.name} is oversized: its {stage.replicas} are busy {stage.busy:.0%} of the time, {to} would do"
        ),
        stage=stage.name,
        now=stage.replicas,
        to=to,
    )
