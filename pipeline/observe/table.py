"""Drawing a run while it goes: a live table on a terminal, plain lines elsewhere. Both take the same snapshots.

Invariants: drawing is a pure function of a `RunSnapshot`; the display owns the terminal between `start` and `stop` and
gives it back whatever happens; a narrow terminal loses columns, never the step, the reward or the errors.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from statistics import fmean
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.facts.run_log import log_line
from pipeline.facts.stats import EngineRow, GoodputFigures, RunSnapshot, StageRow, visible

_WIDE: Final = 108  # columns from which the table shows everything
_MEDIUM: Final = 78  # here no heading is cut
_COLUMNS: Final = {  # of the stages' table: from how wide a terminal on
    **{"n": 0, "busy": 0, "starved": _MEDIUM, "blocked": _MEDIUM, "stalled": _WIDE, "queue": 0, "flight": 0},
    **{"items/s": 0, "tok/s": _MEDIUM, "fail": _MEDIUM, "restarts": _WIDE},
}
_NOTES: Final = 5
_MOST_ENGINES: Final = 4  # that are shown one by one


class LiveTable:
    """The table, redrawn in place."""

    def __init__(self, console: Console | None = None, *, refresh_per_s: float = 4.0) -> None:
        self._console = console or Console()
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._snapshot: RunSnapshot | None = None
        self._live = Live(console=self._console, refresh_per_second=refresh_per_s, transient=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, snapshot: RunSnapshot) -> None:
        """Show the newest state. Called a few times per second; cheap."""
        self._snapshot = snapshot
        self._draw()

    def note(self, message: str) -> None:
        """Show one line about something that happened: an evaluation, a checkpoint, a restart."""
        self._notes.append(f"{clock()} {message}")
        self._draw()

    def _draw(self) -> None:
        run, notes = self._snapshot, tuple(self._notes)
        self._live.update(_noted(notes) if run is None else render(run, self._console.width, notes))


def clock() -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S")


class PlainLog(AbstractContextManager["PlainLog"]):
    """One line per `every` steps, for files and pipes."""

    def __init__(self, console: Console | None = None, *, every: int = 1) -> None:
        self._console = console or Console(soft_wrap=True)
        self._every = every
        self._shown = 0  # step of the newest line; a snapshot may skip the exact multiple

    def __exit__(self, *_: object) -> None:
        """The terminal was never taken."""

    def update(self, snapshot: RunSnapshot) -> None:
        if snapshot.step < self._shown:  # another phase of the run, or it was resumed
            self._shown = 0
        due = snapshot.step // self._every > self._shown // self._every or snapshot.step == snapshot.total_steps
        if (due or not self._shown) and snapshot.step != self._shown:  # the first step too, long before the next line
            self._shown = snapshot.step
            log_line(line := plain_line(snapshot))
            self.note(line)

    def note(self, message: str) -> None:
        self._console.print(f"{clock()} {message}", markup=False, highlight=False, soft_wrap=True)


Display = LiveTable | PlainLog


def open_display(live: bool | None, *, log_interval: int, console: Console | None = None) -> Display:
    """The live table if `live` is true, or if it is None and the output is a terminal; else plain lines."""
    console = console or Console()
    if live if live is not None else console.is_terminal:
        return LiveTable(console)
    return PlainLog(console, every=log_interval)


def plain_line(snapshot: RunSnapshot) -> str:
    """The run in one line of at most a few hundred characters, the most important first."""
    label = f"{snapshot.mode} step" if snapshot.supervised else "step"
    parts = [f"{label} {snapshot.step}" + (f"/{snapshot.total_steps}" if snapshot.total_steps else "")]
    if snapshot.supervised:
        parts.append(f"loss {number(snapshot.loss)}")
        parts.append(f"{quantity(snapshot.trained_tokens_per_s)} trained tok/s")
        return " | ".join([*parts, *_times(snapshot)])
    parts += [] if snapshot.reward_mean is None else [f"reward {number(snapshot.reward_mean)}"]
    parts += [f"eval {name} {number(value)} (v{version})" for name, (version, value) in snapshot.evals.items()]
    parts += [] if snapshot.staleness_mean is None else [f"staleness {_staleness(snapshot)}"]
    parts += [f"v{snapshot.version}"] if snapshot.version >= 0 else []
    parts.append(f"{quantity(snapshot.trained_tokens_per_s)} trained tok/s")
    parts.append(_in_flight(snapshot))
    if snapshot.goodput.goodput is not None:
        parts.append(f"goodput {snapshot.goodput.goodput:.2f}")
    parts.append(f"wasted {snapshot.wasted_share:.1%}")
    if snapshot.failed_rollouts:
        parts.append(f"failed rollouts {sum(snapshot.failed_rollouts.values())}")
    if snapshot.ledger.failed:
        parts.append(f"failed {snapshot.ledger.failed}")
    if snapshot.alarms:
        parts.append(f"alarm {', '.join(alarm.partition(':')[0] for alarm in snapshot.alarms)}")
    return " | ".join([*parts, *_times(snapshot)])


def _times(snapshot: RunSnapshot) -> list[str]:
    eta = [] if snapshot.eta_s is None else [f"ETA {duration(snapshot.eta_s)}"]
    return [duration(snapshot.elapsed_s), *eta]


def render(snapshot: RunSnapshot, width: int, notes: tuple[str, ...] = ()) -> RenderableType:
    """The table for a terminal of `width` columns."""
    blank = Text("")
    lines = [_header(snapshot), _progress(snapshot, width), blank, _stages(snapshot, width), blank]
    if snapshot.engines:
        lines += [_engines(snapshot.engines, width), blank]
    lines += _footer(snapshot)
    return Group(*lines, _noted(notes))


def _noted(notes: tuple[str, ...]) -> Group:
    return Group(*(Text(f"  {note}", style="dim", overflow="fold") for note in notes))


def _header(snapshot: RunSnapshot) -> Text:
    total = "" if snapshot.total_steps is None else f"/{snapshot.total_steps}"
    mode, step = (f" {snapshot.mode}", "bold cyan"), (f"{snapshot.step}{total}", "bold")
    text = Text.assemble((" sluice ", "bold reverse"), mode, "  step ", step, overflow="fold")
    if snapshot.supervised:
        return text
    text.append("  version ").append(str(snapshot.version), style="bold")
    return text.append(f"  {_in_flight(snapshot)}", style="bold")


def _in_flight(snapshot: RunSnapshot) -> str:
    """Groups, and how many more the staleness gate lets in now."""
    return f"in flight {snapshot.in_flight}" + (f", may enter {snapshot.may_enter}" if snapshot.may_enter else "")


def _progress(snapshot: RunSnapshot, width: int) -> RenderableType:
    eta = "" if snapshot.eta_s is None else f"  ETA {duration(snapshot.eta_s)}"
    line = Table.grid(padding=(0, 1))
    if snapshot.total_steps:
        bar = ProgressBar(total=snapshot.total_steps, completed=snapshot.step, width=max(10, min(60, width - 34)))
        share = Text(f"{snapshot.step / snapshot.total_steps:>4.0%}", style="bold")
        line.add_row(bar, share, Text(f"{duration(snapshot.elapsed_s)}{eta}", no_wrap=True))
    else:
        line.add_row(Text(duration(snapshot.elapsed_s)))
    return line


def _stages(snapshot: RunSnapshot, width: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", expand=False)
    table.add_column("stage", no_wrap=True, overflow="ellipsis", max_width=14)
    columns = [column for column, least in _COLUMNS.items() if width >= least]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in snapshot.stages:
        cells = _cells(row)
        style = "" if row.replicas else "dim"
        table.add_row(Text(row.stage, style="bold"), *(cells[column] for column in columns), style=style)
    return table


def _cells(row: StageRow) -> dict[str, Text]:
    return {
        "n": Text(str(row.replicas), style="" if row.replicas else "dim"),
        "busy": Text(f"{row.busy:.0%}", style="bold green" if row.busy >= 0.8 else "green"),
        "starved": Text(f"{row.starved:.0%}", style="yellow" if row.starved >= 0.5 else "dim"),
        "blocked": Text(f"{row.blocked:.0%}", style="red" if row.blocked >= 0.5 else "dim"),
        "stalled": Text(f"{row.stalled:.0%}", style="magenta" if row.stalled >= 0.1 else "dim"),
        "queue": Text(quantity(row.queue_depth)),
        "flight": Text(quantity(row.in_flight)),
        "items/s": Text(quantity(row.items_per_s)),
        "tok/s": Text(quantity(row.tokens_per_s)),
        "fail": Text(quantity(row.failures), style="red" if row.failures else "dim"),
        "restarts": Text(str(row.restarts), style="bold red" if row.restarts else "dim"),
    }


def _engines(engines: Sequence[EngineRow], width: int) -> Text:
    """Each engine where they are few, else their number and the extremes."""
    text = Text("engines ", overflow="fold")
    if len(engines) <= (_MOST_ENGINES if width >= _MEDIUM else 2):
        for index, row in enumerate(engines):
            text.append("   " if index else "").append(row.name, style="bold")
            if not row.up:
                text.append(" lost", style="bold red")
                continue
            text.append(" no weights" if row.version is None else f" v{row.version}")
            text.append(f" idle {_share(row.idle)}", style="yellow" if (row.idle or 0.0) >= 0.5 else "")
            text.append(f" update {_seconds(row.update_s)}")
        return text
    up = [row for row in engines if row.up]
    idle = [row.idle for row in up if row.idle is not None]
    updates = [row.update_s for row in up if row.update_s is not None]
    text.append(f"{len(up)}", style="bold").append(f" of {len(engines)} up")
    text.append(f"   idle {_share(fmean(idle) if idle else None)}, most {_share(max(idle, default=None))}")
    mean_s, most_s = fmean(updates) if updates else None, max(updates, default=None)
    text.append(f"   update {_seconds(mean_s)}, most {_seconds(most_s)}")
    return text


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{quantity(value)} s"


def _footer(snapshot: RunSnapshot) -> list[RenderableType]:
    if snapshot.supervised:
        loss = Text("loss ", overflow="fold").append(number(snapshot.loss), style="bold green")
        return [loss.append(f"   trained {quantity(snapshot.trained_tokens_per_s)} tok/s")]
    reward = Text("reward ", overflow="fold").append(number(snapshot.reward_mean), style="bold green")
    if snapshot.reward_recent is not None:
        reward.append(f" (last 20: {number(snapshot.reward_recent)})")
    for name, (version, value) in snapshot.evals.items():
        reward.append(f"   eval {name} ").append(number(value), style="bold green").append(f" at v{version}")
    rate, wasted = f"{quantity(snapshot.trained_tokens_per_s)} tok/s", f"{snapshot.wasted_share:.1%}"
    flow = Text("staleness ", overflow="fold").append(_staleness(snapshot), style="bold")
    flow.append("   trained ").append(rate, style="bold").append("   wasted ").append(wasted, style="bold")
    flow.append(" of tokens")
    if snapshot.busiest is not None:
        stage, share = snapshot.busiest
        flow.append(f"   busiest stage ({stage}) busy ").append(f"{share:.0%}", style="bold")
    counts = snapshot.ledger
    groups = Text("groups ", overflow="fold").append(f"{counts.trained} trained", style="bold")
    groups.append(f", {counts.filtered} filtered, {counts.stale} stale, ")
    groups.append(f"{counts.failed} failed", style="bold red" if counts.failed else "")
    groups.append(f", {counts.discarded} discarded, {counts.open} in flight")
    advice = [Text(f"advice {snapshot.advice}", overflow="fold")] if snapshot.advice else []
    alarms = [Text(f"alarm {alarm}", style="bold red", overflow="fold") for alarm in snapshot.alarms]
    failed = [Text(f"failed rollouts {failed_text(found)}")] if (found := snapshot.failed_rollouts) else []
    goodput = [] if snapshot.goodput.goodput is None else [Text(f"goodput {goodput_text(snapshot.goodput)}")]
    return [reward, flow, groups, *failed, *goodput, *alarms, *advice]


def goodput_text(found: GoodputFigures) -> str:
    """The share of the slot time that made trained tokens, and what took the rest, the largest first."""
    attainable = "" if found.attainable is None else f", attainable {found.attainable:.2f}"
    lost = ", ".join(f"{cause.replace('_', ' ')} {share:.2f}" for cause, share in largest(found.lost) if share >= 0.005)
    return f"{number(found.goodput)} of the slot time{attainable}" + (f"; lost to {lost}" if lost else "")


def failed_text(rollouts: Mapping[str, int]) -> str:
    """How many, and the commonest reason, in one line."""
    reason, n = largest(rollouts)[0]
    total = sum(rollouts.values())
    return f"{total}" + (f", most often ({n})" if len(rollouts) > 1 else "") + f": {visible(' '.join(reason.split()))}"


def largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: -part[1])


def _staleness(snapshot: RunSnapshot) -> str:
    if snapshot.staleness_mean is None:
        return "-"
    bound = "" if snapshot.staleness_bound is None else f" (bound {snapshot.staleness_bound})"
    return f"mean {snapshot.staleness_mean:.2f} max {snapshot.staleness_max}{bound}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: its first cell to the left of the column, the others to the right. Rows may be short."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=False))])
        for row in rows
    ]


def number(value: float | None) -> str:
    """Three decimals, or a dash for nothing."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def quantity(value: float) -> str:
    """A count or a rate in at most five characters: 0.42, 7.5, 312, 4.1k, 2.3M."""
    if not value < math.inf:
        return "-"
    scaled, unit = (value, "") if value < 999.5 else (value / 1e3, "k") if value < 999_500 else (value / 1e6, "M")
    if float(scaled).is_integer() and not unit:
        return f"{int(scaled)}"
    return f"{scaled:.{2 if scaled < 1 else 1 if scaled < 100 else 0}f}{unit}"


def duration(seconds: float) -> str:
    """0:07, 12:03, 3:04:05."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"
