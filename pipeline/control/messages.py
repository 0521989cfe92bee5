"""What is asked of a running run and what it answers: one JSON line each way.

Invariants: a request names one command and carries the token of the run; a reply says `ok`, or why nothing was done.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from pipeline.control.advice import Advice
from pipeline.facts.stats import Changed, RunSnapshot

CONTROL_FILE: Final = "control.json"  # in the run directory, for its owner alone: a `ControlAddress`
MOST_BYTES: Final = 64 << 10  # of a request


class ControlAddress(Struct, frozen=True):
    """Where a run is asked, and with which token."""

    socket: str
    token: str


class Status(Struct, frozen=True, tag="status"):
    pass


class Scale(Struct, frozen=True, tag="scale"):
    counts: dict[str, int]


class Pause(Struct, frozen=True, tag="pause"):
    pass


class Resume(Struct, frozen=True, tag="resume"):
    pass


class Drain(Struct, frozen=True, tag="drain"):
    pass


class Save(Struct, frozen=True, tag="save"):
    pass


class Set(Struct, frozen=True, tag="set"):
    changes: dict[str, str]


Command = Status | Scale | Pause | Resume | Drain | Save | Set


class Request(Struct, frozen=True):
    token: str
    command: Command


class EngineStatus(Struct, frozen=True):
    """One engine that generates."""

    name: str
    state: str  # starting, loading, serving, updating, away, leaving, left
    version: int | None  # of its weights
    running: int  # requests, as it said last
    waiting: int
    limit: int  # samples that may be in flight there
    idle: float | None  # share of the last seconds


class QueueStatus(Struct, frozen=True):
    """One stream: messages that wait, and those that replicas have in work."""

    stream: str
    queued: int
    leased: int
    consumers: int


class RunStatus(Struct, frozen=True):
    """All that `status` tells."""

    run: str  # directory
    state: str  # starting, running, paused, stopping
    snapshot: RunSnapshot
    engines: tuple[EngineStatus, ...] = ()
    queues: tuple[QueueStatus, ...] = ()
    replicas: dict[str, int] = {}  # by stage; those that are to stay
    changes: tuple[Changed, ...] = ()
    advice: Advice | None = None  # None until enough was measured


class Reply(Struct, frozen=True):
    """`lines`: what was done, or why nothing was, for people."""

    ok: bool
    lines: tuple[str, ...] = ()
    status: RunStatus | None = None
