"""What the page shows of a run, as JSON documents: of a running run and of one that has ended alike.

Figures of a running run come from its control socket; all others from its files. Unknown values are null, never 0.
`RunDocuments` may be used from several threads; each call waits for the disk, and some for the control socket.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from configs.graph import replicas, streams
from configs.layers import ConfigError
from configs.load import load, read_recipe
from configs.schema import Config
from models.checkpoint import manifests
from pipeline.control.client import ENDED, PHASES, ask, from_files, with_files
from pipeline.control.endpoint import CONTROL_FILE, RunStatus, Status
from pipeline.errors import NotRunning, UsageError
from pipeline.facts.stats import GoodputFigures, LedgerCounts
from pipeline.observe.samples import Decode, decoder_of
from pipeline.observe.summary import RunSummary, read_summary
from pipeline.record.health import CURES
from pipeline.view.lanes import lanes
from pipeline.view.log_lines import log_lines
from pipeline.view.rollouts import Query, rollout, rollouts
from pipeline.view.run_files import RunFiles, finite, thinned

Document = dict[str, Any]

LIVE_S: Final = 0.5  # so long an answer of the control socket is shown, however many ask
ENDED_S: Final = 5.0
MOST_POINTS: Final = 2_000
LOST: Final = {"starved": "starvation", "no_variance": "variance"}  # goodput's names -> those of the page
CAUSES: Final = ("tail", "update", "starvation", "trainer", "stale", "variance")  # always there
OUTCOMES: Final = ("trained", "filtered", "stale", "failed", "discarded")


class RunDocuments:
    """The documents of the run in a directory. Raises UsageError where the path holds no run."""

    def __init__(self, run: Path) -> None:
        self.path, self._files = run.absolute(), RunFiles(run)
        self._reading, self._asking = threading.Lock(), threading.Lock()
        self._status, self._live, self._until_s = _with_files(from_files(run)), False, 0.0
        if not self._files.dir.config.is_file() and self._status.state == "no run":
            raise UsageError(str(self._status.exit_reason))
        self._settings: Document = {}
        self._config: Config | None = None
        self._read_s = -1.0

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[RunFiles]:
        """One caller at a time, after what is new in the files was read."""
        with self._reading:
            self._files.refresh()
            yield self._files

    def run(self, *, may_steer: bool = False) -> Document:
        """The state of the run: stages, streams, engines, ledger, goodput, alarms, settings."""
        with self._asking:  # a run that hangs holds up no other document
            status, live = self._asked()
        with self._fresh():
            return self._run(status, live, may_steer)

    def _run(self, status: RunStatus, live: bool, may_steer: bool) -> Document:
        config, now = self._configured(), status.snapshot
        summary = self._summary() if status.state in ENDED else None
        rows = self._files.metrics
        last = {name: n for row in list(rows.values())[-20:] for name, x in row.items() if (n := finite(x)) is not None}
        mode = now.mode if now else (summary.mode if summary else (config.run.mode if config else None))
        changes = status.changes or (summary.changes if summary else tuple(self._files.changes))
        step = now.step if now else max(status.step, max(rows, default=0))
        kept = manifests(self._files.dir.checkpoints) if live else []
        return {
            "run": str(self.path),
            "name": self.path.name,
            "state": status.state,
            "exit_reason": status.exit_reason,
            "live": live,
            "may_steer": may_steer,
            "now_s": time.time(),
            "step": step,
            "total_steps": now.total_steps if now else (config.rollout.num_rollout if config else None),
            "elapsed_s": now.elapsed_s if now else (summary.wall_s if summary else last.get("wall_s")),
            "eta_s": now.eta_s if now else None,
            "mode": mode,
            "version": now.version if now else (summary.weight_versions.last if summary else step),
            "bound": now.staleness_bound if now else (config.asynchrony.max_staleness if config else None),
            "waits": status.waits,
            "advice": now.advice if now else (summary.advice if summary else ""),
            "stages": _stages(status, config),
            "streams": _streams(status, config),
            "engines": msgspec.to_builtins(list(status.engines)),
            "bottleneck": _bottleneck(status, summary),
            "staleness": sorted([lag, tokens] for lag, tokens in self._files.staleness.items() if tokens),
            "goodput": _goodput(now.goodput if now else (summary.goodput if summary else None), last),
            "ledger": self._ledger(now.ledger if now else (summary.groups if summary else None)),
            "dropped": [
                {"outcome": outcome, "detail": detail, "groups": groups}
                for (outcome, detail), groups in self._files.dropped.most_common()
                if outcome != "trained" and groups > 0
            ],
            "alarms": [
                _alarm(text)
                for text in (now.alarms if now else (a.sentence for a in summary.alarms) if summary else ())
            ],
            "changes": [{"step": one.step, "what": one.what, "value": one.value} for one in changes],
            "settings": self._settings,
            "checkpoint": status.checkpoint,
            "checkpoints": sorted({one.step for one in kept}, reverse=True),  # to which the run can go back
            "resume": status.resume,
        }

    def metrics(self, after: int = -1) -> Document:
        """The rows of metrics.jsonl of steps after `after`, one for each step, by column."""
        with self._fresh() as files:
            rows = thinned({step: row for step, row in files.metrics.items() if step > after}, MOST_POINTS)
        names = sorted({name for row in rows.values() for name in row} - {"step", "nonfinite"})
        return {
            "steps": list(rows),
            "columns": {name: [finite(row.get(name)) for row in rows.values()] for name in names},
        }

    def lanes(self, seconds: float = 60.0, until: float | None = None) -> Document:
        """What was generated when, by which weights, in the seconds before `until` (unix time; None: the newest)."""
        with self._fresh() as files:
            return lanes(files, seconds, until)

    def rollouts(self, query: Query) -> Document:
        """The rollouts of samples.jsonl that a query asks for, newest first."""
        with self._fresh() as files:
            return rollouts(files, query)

    def rollout(self, key: str) -> Document | None:
        """All of one rollout, with its tokens; None where there is none of this key."""
        with self._fresh() as files:
            known = files.row(key) is not None
        decode = self._decode if known else None  # takes seconds where the tokenizer is loaded
        with self._fresh() as files:
            return rollout(files, key, decode)

    @cached_property
    def _decode(self) -> Decode | None:
        return decoder_of(self.path)

    def logs(self, after: str = "", text: str = "") -> Document:
        """Lines of the logs that were written after a cursor, the newest ones."""
        return log_lines(self.path, after, text)

    def _asked(self) -> tuple[RunStatus, bool]:
        """The status, and whether the run itself gave it."""
        if time.monotonic() < self._until_s:
            return self._status, self._live
        try:
            if not any((self.path / phase / CONTROL_FILE).is_file() for phase in PHASES):
                raise NotRunning("it has ended")  # `ask` would read all metrics to say so
            reply = ask(self.path, Status())
            if reply.status is None:
                raise UsageError("; ".join(reply.lines))
            self._status, self._live = _with_files(reply.status), True
        except UsageError as error:
            found = from_files(self.path)
            if self._live or found.state != self._status.state:  # nothing of it changes but by another start
                self._status, self._live = _with_files(found), False
            waits = "" if isinstance(error, NotRunning) else str(error)
            self._status = msgspec.structs.replace(self._status, waits=waits)
        self._until_s = time.monotonic() + (LIVE_S if self._live else ENDED_S)
        return self._status, self._live

    def _configured(self) -> Config | None:
        """The configuration, read again where it was changed; None where it cannot be read, or not yet."""
        path = self._files.dir.config
        try:
            changed_s = path.stat().st_mtime
            if changed_s != self._read_s:
                self._settings = msgspec.to_builtins(read_recipe(str(path)).values)
                self._config, self._read_s = load(["--resume", str(self.path)]).config, changed_s
        except (OSError, ConfigError):
            self._config = None
        return self._config

    def _summary(self) -> RunSummary | None:
        """None for a run that was killed, or a file of another version."""
        try:
            return read_summary(self._files.dir.summary) if self._status.state != "killed" else None
        except UsageError:
            return None

    def _ledger(self, counts: LedgerCounts | None) -> Document:
        """Groups by state: those that the run counted, else those of its journal."""
        if counts is not None:
            ends = {name: getattr(counts, name) for name in OUTCOMES}
            return {"admitted": counts.admitted, **ends, "in_flight": counts.open}
        ends = dict.fromkeys(OUTCOMES, 0)
        for (outcome, _), groups in self._files.dropped.items():
            ends[outcome] += groups
        return {"admitted": self._files.admitted, **ends, "in_flight": self._files.admitted - sum(ends.values())}


def _with_files(status: RunStatus) -> RunStatus:
    try:
        return with_files(status)
    except UsageError:  # a line of the metrics that cannot be read
        return status


_FIGURES: Final = (
    *("replicas", "busy", "starved", "blocked", "stalled", "in_flight"),
    *("items_per_s", "tokens_per_s", "items_out", "failures", "restarts"),
)


def _stages(status: RunStatus, config: Config | None) -> list[Document]:
    """The rows of the table; of a run that does not answer the stages that it has."""
    if status.snapshot is not None:
        return [
            {"name": row.stage, "queue": row.queue_depth, **{name: getattr(row, name) for name in _FIGURES}}
            for row in status.snapshot.stages
        ]
    counts = replicas(config) if config is not None else {}
    unknown: Document = dict.fromkeys(("queue", *_FIGURES))
    return [{**unknown, "name": name, "replicas": count} for name, count in counts.items() if name != "engine"]


def _streams(status: RunStatus, config: Config | None) -> list[Document]:
    """One edge for each stage that puts messages in."""
    now = {queue.stream: {"queued": queue.queued, "leased": queue.leased} for queue in status.queues}
    ends: Document = {"queued": None, "leased": None}
    return [
        {**ends, "name": stream.name, "source": source, "target": stream.consumer[0], **now.get(stream.name, {})}
        for stream in (streams(config) if config is not None else ())
        for source, _ in stream.producers
    ]


def _bottleneck(status: RunStatus, summary: RunSummary | None) -> Document:
    """What bounds the run, in a sentence."""
    if status.waits:
        return {"stage": None, "why": status.waits}
    if status.advice is not None:
        return {"stage": status.advice.stage or None, "why": status.advice.sentence}
    if status.snapshot is not None and (busiest := status.snapshot.busiest) is not None:
        stage, share = busiest
        return {"stage": stage, "why": f"{stage} is busy {share:.0%} of the time, more than any other stage"}
    if summary is not None and summary.busiest_stage:
        of_time = f" ({summary.efficiency_vs_bound:.0%} of the time)" if summary.efficiency_vs_bound is not None else ""
        return {"stage": summary.busiest_stage, "why": f"{summary.busiest_stage} was the busiest stage{of_time}"}
    return {"stage": None, "why": "nothing was measured yet" if status.state not in ENDED else "nothing was measured"}


def _goodput(figures: GoodputFigures | None, last: Mapping[str, float]) -> Document:
    """Shares of the engines' slot time; they add up to 1. Without `figures` those of the newest metrics."""
    if figures is None:
        lost = {name.removeprefix("goodput/lost_"): x for name, x in last.items() if name.startswith("goodput/lost_")}
        figures = GoodputFigures(last.get("goodput/share"), last.get("goodput/attainable"), lost)
    found = {LOST.get(name, name): share for name, share in figures.lost.items()}
    return {"goodput": figures.goodput, "attainable": figures.attainable, "lost": dict.fromkeys(CAUSES, 0.0) | found}


def _alarm(sentence: str) -> Document:
    """An alarm's parts; `sentence` is that of `pipeline.record.health`."""
    name, _, text = sentence.partition(": ")
    cure = CURES.get(name.partition(" ")[0], "")
    return {"name": name, "text": text.removesuffix(f"; {cure}"), "cure": cure}
