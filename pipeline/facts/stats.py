"""What replicas report about themselves, and the form in which the run is shown.

A replica publishes cumulative `StageStats` as a topic value; `pipeline.observe.view` turns successive reports, ledger
counts and training steps into a `RunSnapshot`. The displays draw snapshots and know nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

STATS_PREFIX: Final = "stats/"  # of their keys; only the controller reads them, so they stay with the topic's server
CPU: Final = "cpu_s"  # figure of a replica that is a process: its CPU time, with that of its children
COUNTERS: Final = ("busy_s", "starved_s", "blocked_s", "stalled_s", "items_in", "items_out", "failures", "tokens")


class StageStats(Struct, frozen=True):
    """One replica's account of itself since it started. Times in seconds; published as topic value."""

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

    def encode(self) -> bytes:
        """The bytes of the topic value."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> StageStats:
        """Inverse of `encode`; raises msgspec.MsgspecError."""
        return msgspec.msgpack.decode(data, type=StageStats)


class Changed(Struct, frozen=True, tag="change"):
    """The user, or `--autoscale`, changed something while the run went on: after `step` batches `what` became `value`.
    Also a line of the journal."""

    step: int
    what: str
    value: str


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


@dataclass(frozen=True)
class RunSnapshot:
    """Everything that a display needs."""

    mode: str
    step: int
    total_steps: int | None
    elapsed_s: float
    eta_s: float | None  # None until two steps are done
    version: int
    in_flight: int  # groups that were admitted and have no outcome yet
    may_enter: int | None  # groups that the staleness gate lets in now
    stages: tuple[StageRow, ...]
    ledger: LedgerCounts
    reward_mean: float | None
    reward_recent: float | None  # mean of the last steps
    evals: Mapping[str, tuple[int, float]]  # newest (version, value) by data set
    staleness_mean: float | None  # of all trained tokens so far
    staleness_max: int | None
    staleness_bound: int | None
    trained_tokens: int
    trained_tokens_per_s: float
    wasted_tokens: int
    wasted_share: float  # of the tokens generated for settled groups
    busiest: tuple[str, float] | None  # stage with the largest busy share now, and that share
    engines: tuple[EngineRow, ...] = ()
    advice: str = ""  # which stage to scale; empty until enough was measured
    supervised: bool = False  # labels are learnt: there is a loss, and neither reward nor staleness
    loss: float | None = None
