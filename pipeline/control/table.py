"""What `status` shows: plain text of at most 80 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from pipeline.control.messages import EngineStatus, QueueStatus, RunStatus
from pipeline.facts.stats import LedgerCounts, StageRow
from pipeline.observe.table import duration, number, quantity

COLUMNS: Final = 80


def table(status: RunStatus) -> str:
    """The status of a run for people."""
    run = status.snapshot
    total = f"/{run.total_steps}" if run.total_steps else ""
    eta = "" if run.eta_s is None else f", ETA {duration(run.eta_s)}"
    bound = "" if run.staleness_bound is None else f", bound {run.staleness_bound}"
    more = "" if run.may_enter is None else f", {run.may_enter} more may enter"
    stale = "-" if run.staleness_mean is None else f"mean {run.staleness_mean:.2f}, max {run.staleness_max}{bound}"
    rows = [
        ("run", status.run),
        ("state", f"{status.state}, {run.mode}, {duration(run.elapsed_s)}{eta}"),
        ("step", f"{run.step}{total}, reward {number(run.reward_mean)}, engines carry version {run.version}"),
        ("in flight", f"{run.in_flight} groups{more}"),
        ("staleness", stale),
        ("groups", _groups(run.ledger)),
    ]
    lines = [_cut(f"{name:<10} {value}") for name, value in rows]
    if run.advice:
        lines += textwrap.wrap(run.advice, COLUMNS, initial_indent=f"{'advice':<11}", subsequent_indent=" " * 11)
    lines += ["", *_columns(_STAGES, [_stage(row, status.replicas.get(row.stage)) for row in run.stages])]
    if status.engines:
        lines += ["", *_columns(_ENGINES, [_engine(engine) for engine in status.engines])]
    lines += ["", *_columns(_QUEUES, [_queue(queue) for queue in status.queues])]
    if status.changes:
        lines.append("")
        lines += [_cut(f"step {change.step}: {change.what} {change.value}".rstrip()) for change in status.changes[-5:]]
    return "\n".join(lines)


_STAGES: Final = ("stage", "repl.", "busy", "starved", "blocked", "stalled", "queue", "work", "items/s", "failed")
_ENGINES: Final = ("engine", "state", "version", "running", "waiting", "limit", "idle")
_QUEUES: Final = ("stream", "queued", "in work", "consumers")


def _groups(counts: LedgerCounts) -> str:
    ends = ("trained", "filtered", "stale", "failed", "discarded")
    return f"{counts.admitted} admitted: {', '.join(f'{getattr(counts, name)} {name}' for name in ends)}"


def _stage(row: StageRow, wanted: int | None) -> tuple[str, ...]:
    """`wanted`: replicas that are to stay; the others finish what they hold."""
    replicas = str(row.replicas) if wanted in (None, row.replicas) else f"{row.replicas}>{wanted}"
    shares = tuple(f"{share:.0%}" for share in (row.busy, row.starved, row.blocked, row.stalled))
    counts = (str(row.queue_depth), str(row.in_flight), quantity(row.items_per_s), str(row.failures))
    return (row.stage, replicas, *shares, *counts)


def _engine(engine: EngineStatus) -> tuple[str, ...]:
    version = "-" if engine.version is None else str(engine.version)
    idle = "-" if engine.idle is None else f"{engine.idle:.0%}"
    load = (str(engine.running), str(engine.waiting), str(engine.limit or "-"))
    return (engine.name, engine.state, version, *load, idle)


def _queue(queue: QueueStatus) -> tuple[str, ...]:
    return (queue.stream, str(queue.queued), str(queue.leased), str(queue.consumers))


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned; numbers to the right of their column, names to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    return [
        _cut("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]))
        for row in (heads, *rows)
    ]


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..."
