"""What replicas report about themselves, and the form in which the run is shown. No I/O, no clock.

A replica publishes cumulative `StageStats` as a topic value; `pipeline.record.view` turns successive reports, ledger
counts and training steps into a `RunSnapshot`, over windows that a `Ring` keeps. Displays draw snapshots and know
nothing else. Text of models, programs and peers goes through `visible` before a terminal shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from configs.graph import engine_count, replicas
from configs.schema import Config

STATS_PREFIX: Final = "stats/"  # of their keys; only the controller reads them, so they stay with the topic's server
CPU: Final = "cpu_s"  # figure of a replica that is a process: its CPU time, with that of its children and its chain
QUEUED: Final = "chain_queued"  # figure of a replica in a chain: messages that wait for it
COUNTERS: Final = ("busy_s", "starved_s", "blocked_s", "stalled_s", "items_in", "items_out", "failures", "tokens")


class StageStats(Struct, frozen=True):
    """One replica's counters since its start. Times in seconds; published as topic value."""

    stage: str
    replica: str
    unix_s: float
    busy_s: float = 0.0
    starved_s: float = 0.0  # waiting for input
    blocked_s: float = 0.0  # waiting for room at the output
    stalled_s: float = 0.0  # standing still for a weight update
    items_in: int = 0
    items_out: int = 0
    failures: int = 0
    tokens: int = 0
    in_flight: int = 0  # now
    extra: dict[str, float] = {}
    held: dict[str, float] = {}  # in a chain: groups that wait for it or are in its care, with the seconds since


class Changed(Struct, frozen=True, tag="change"):
    """The user, or `--autoscale`, changed the running run: after `step` batches `what` became `value`.
    Also a line of the journal."""

    step: int
    what: str
    value: str


class GoodputFigures(Struct, frozen=True):
    """What became of the engines' slot time. `lost`: shares by cause, of empty slots and of wasted work."""

    goodput: float | None = None  # share that made trained tokens; None before anything was measured
    attainable: float | None = None  # by a perfect scheduler with this N; None until enough was measured
    lost: dict[str, float] = {}
    waste: dict[str, int] = {}  # tokens by cause
    recomputed_tokens: int = 0  # read again by an engine that continued a response


class LedgerCounts(Struct, frozen=True):
    """Groups by state. admitted == the sum of all others."""

    admitted: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    discarded: int = 0
    open: int = 0


@dataclass(frozen=True)
class StageRow:
    """One line of the table: all replicas of a stage together. Shares are of the replicas' time in the window."""

    stage: str
    replicas: int
    busy: float
    starved: float
    blocked: float
    stalled: float
    queue_depth: int
    in_flight: int
    items_per_s: float
    tokens_per_s: float
    items_out: int
    failures: int
    restarts: int


@dataclass(frozen=True)
class EngineRow:
    """One engine that generates."""

    name: str
    up: bool
    version: int | None  # of the weights that it carries
    idle: float | None  # share of its time, over the last seconds
    update_s: float | None  # length of its newest weight update


@dataclass
class RunSnapshot:
    """Everything that a display needs. The run's own is brought up to date in place; displays get a copy."""

    mode: str
    step: int = 0
    total_steps: int | None = None
    elapsed_s: float = 0.0
    eta_s: float | None = None  # None until two steps are done
    version: int = 0  # of the weights that all engines carry
    in_flight: int = 0  # groups that were admitted and have no outcome yet
    may_enter: int | None = None  # groups that the staleness gate lets in now
    stages: tuple[StageRow, ...] = ()
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    reward_mean: float | None = None
    reward_recent: float | None = None  # mean of the last steps
    evals: dict[str, tuple[int, float]] = field(default_factory=dict)  # newest (version, value) by data set
    staleness_mean: float | None = None  # of all trained tokens so far
    staleness_max: int | None = None
    staleness_bound: int | None = None
    trained_tokens: int = 0
    trained_tokens_per_s: float = 0.0
    wasted_tokens: int = 0
    wasted_share: float = 0.0  # of the tokens generated for settled groups
    failed_rollouts: dict[str, int] = field(default_factory=dict)  # by reason, in this start of the run
    busiest: tuple[str, float] | None = None  # stage with the largest busy share now, and that share
    engines: tuple[EngineRow, ...] = ()
    advice: str = ""  # which stage to scale; empty until enough was measured
    alarms: tuple[str, ...] = ()  # what goes wrong with the training: its name, a colon, the sentence
    supervised: bool = False  # labels are learnt: there is a loss, and neither reward nor staleness
    loss: float | None = None
    goodput: GoodputFigures = field(default_factory=GoodputFigures)


class Ring:
    """Marks of growing counters, oldest first. The change over a window is the newest mark less the oldest.

    A mark is dropped once the next mark covers the window as well, so the ring spans a little more than the window.

    Args:
        window_s: seconds that a window has at least.
        least: counter -> how much it grows at least within a window.
    """

    def __init__(self, window_s: float, **least: float) -> None:
        self._window_s, self._least = window_s, least
        self._marks: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, at_s: float, counters: Mapping[str, float]) -> None:
        """Keep the counters as they are at `at_s`; times do not fall."""
        self._marks.append((at_s, counters))
        while len(self._marks) > 2 and self._covers(1):
            self._marks.popleft()

    def clear(self) -> None:
        self._marks.clear()

    @property
    def newest(self) -> tuple[float, Mapping[str, float]] | None:
        return self._marks[-1] if self._marks else None

    @property
    def full(self) -> bool:
        """Whether the marks cover a whole window."""
        return len(self._marks) > 1 and self._covers(0)

    def change(self) -> tuple[float, dict[str, float]]:
        """(seconds, growth of each counter) from the oldest mark to the newest; seconds are 0 with less than two."""
        if len(self._marks) < 2:
            return 0.0, {}
        (start_s, first), (end_s, last) = self._marks[0], self._marks[-1]
        return end_s - start_s, {name: last[name] - first[name] for name in last}

    def _covers(self, oldest: int) -> bool:
        (start_s, first), (end_s, last) = self._marks[oldest], self._marks[-1]
        grown = all(last[name] - first[name] >= least for name, least in self._least.items())
        return end_s - start_s >= self._window_s and grown


# Control characters as their Unicode pictures; characters without a picture as the replacement character.
_PICTURES: Final = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    code: 0xFFFD for code in range(127, 160)
}


def visible(text: str) -> str:
    """The text with visible control characters, so that a terminal does not obey them; line breaks and tabs stay.

    For text that models, programs and peers write.
    """
    return text.translate(_PICTURES)


OUTAGES: Final = {
    "router": "new requests wait for it, its pending requests continue at the engines directly",
    "engines": "the engines keep their weights until it is back",
    "fetcher": "the engines of its node keep their weights until it is back",
    "frozen": "its requests wait until it is back",
    "evaluation": "its requests go to other engines of the evaluation, or wait until it is back",
}


def outage_text(config: Config, kind: str) -> str:
    """What happens to the work of a process while it is down. `kind`: engine, evaluation, frozen, router, or the name
    of a stage."""
    if kind in OUTAGES:
        return OUTAGES[kind]
    count = engine_count(config) if kind == "engine" else replicas(config).get(kind, 1)
    return "its work goes to others" if count > 1 else "its work waits until it is back"
