"""What a run has written so far, read again and again: only what is new each time, and no more than a bound is kept.

Invariants: a line that is not whole yet is read when it is; a line that cannot be read is skipped; a file that was
replaced or cut, as a resumed run does, is read from its beginning and what came of it is forgotten; nothing is written
and nothing of the run waits.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from models.disk import open_file
from pipeline.facts.run_directory import RunDir
from pipeline.facts.stats import Changed
from pipeline.facts.trace import Record, Span
from pipeline.record.journal import Admitted, Ended, Event, RolledBack
from stages.sample_log import SAMPLES_FILE, SampleRow

MOST_ROLLOUTS: Final = 100_000
MOST_GROUPS: Final = 100_000  # outcomes that are kept
MOST_SPANS: Final = 60_000
MOST_REASONS: Final = 100
MOST_STEPS: Final = 4_000  # rows of metrics; beyond it every other one is dropped
FIRST_TRACE_BYTES: Final = 8 << 20  # of each file of a trace that has grown before it is first read
BRIEF_CHARS: Final = 200
BLOCK_BYTES: Final = 1 << 20
MARK_BYTES: Final = 64
DRAWN: Final = ("request", "tool", "update_weights")  # spans that are kept

_HISTOGRAM: Final = re.compile(r"staleness/token_hist/(\d+)")
_FIGURE: Final = re.compile(r"(?:version|step|reward) (\S+)$")
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError)

MetricsRow = dict[str, float | dict[str, str] | None]
T = TypeVar("T")

_ROWS: Final[msgspec.json.Decoder[MetricsRow]] = msgspec.json.Decoder(MetricsRow)
_EVENTS: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)
_SAMPLES: Final = msgspec.json.Decoder(SampleRow)
_SPANS: Final[msgspec.json.Decoder[Record]] = msgspec.json.Decoder(Record)


class Tail:
    """The lines that were added to a file since it was last read. `skip_to`: of a longer file, its last bytes first."""

    def __init__(self, path: Path, skip_to: int | None = None) -> None:
        self.path, self._skip_to = path, skip_to
        self._offset, self._mark = 0, b""

    def again(self) -> bool:
        """Whether the file is no longer the one that was read, so that it is read from its beginning."""
        if not self._offset:
            return False
        try:
            with open_file(self.path) as file:
                file.seek(self._offset - len(self._mark))
                same = file.read(len(self._mark)) == self._mark
        except OSError:
            same = False
        if not same:
            self._offset, self._mark = 0, b""
        return not same

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(place in the file, line) of each whole line. A file that is not there, or cannot be read, has none."""
        with contextlib.suppress(OSError), open_file(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if not self._offset and self._skip_to is not None and size > self._skip_to:
                file.seek(size - self._skip_to)
                self._offset = file.tell() + len(file.readline())
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                place = self._offset
                self._offset, self._mark = place + len(line), line[-MARK_BYTES:]
                yield place, line


class Brief(Struct, frozen=True):
    """A rollout in a list. `key` is its place in samples.jsonl."""

    key: str
    step: int
    outcome: str
    detail: str
    group: int
    index: int
    sequence: int
    status: str
    reward: float | None
    prompt: str
    text: str
    tokens: int
    versions: tuple[int, int] | None  # of the weights that made it; None where they made nothing


def brief(place: int, row: SampleRow) -> Brief:
    """The row of a list for a row of samples.jsonl."""
    made = [version for version, _ in row.versions if version >= 0]
    text = "".join(turn.text for turn in row.turns)[:BRIEF_CHARS]
    first = (str(place), row.step, row.outcome, row.detail[:BRIEF_CHARS], row.group, row.index, row.sequence)
    between = (min(made), max(made)) if made else None
    return Brief(*first, row.status, row.reward, row.prompt[:BRIEF_CHARS], text, row.response_tokens, between)


class RunFiles:
    """The files of one run. `refresh` reads what is new; not for several threads at a time."""

    def __init__(self, run: Path) -> None:
        self.dir = RunDir(run)
        self._metrics, self._ledger = Tail(self.dir.metrics), Tail(self.dir.ledger)
        self._samples = Tail(self.dir.path / SAMPLES_FILE)
        self._traces: dict[Path, Tail] = {}
        self.forget_metrics()
        self.forget_ledger()
        self.forget_samples()
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.trained_at: dict[int, float] = {}  # step -> unix time
        self.published: dict[int, float] = {}  # version -> unix time
        self.rewards: dict[int, float] = {}  # group -> mean

    def forget_metrics(self) -> None:
        self.metrics: dict[int, MetricsRow] = {}  # by step
        self.staleness = Counter[int]()  # trained tokens by staleness, all steps

    def forget_ledger(self) -> None:
        self.admitted = 0
        self.ended: dict[int, Ended] = {}  # the newest groups
        self.dropped = Counter[tuple[str, str]]()  # groups by outcome and detail
        self.changes: list[Changed] = []

    def forget_samples(self) -> None:
        self.rollouts: dict[str, Brief] = {}  # by key, oldest first

    def refresh(self) -> None:
        """Read what was written since the last call."""
        for _, row in _news(self._metrics, _ROWS, self.forget_metrics):
            self._row(row)
        for _, event in _news(self._ledger, _EVENTS, self.forget_ledger):
            self._event(event)
        for place, sample in _news(self._samples, _SAMPLES, self.forget_samples):
            self._sample(place, sample)
        for path in sorted(self.dir.trace.glob("*.jsonl")):
            tail = self._traces.setdefault(path, Tail(path, FIRST_TRACE_BYTES))
            for _, span in _news(tail, _SPANS):
                if isinstance(span, Span):
                    self._span(span)

    def _row(self, row: MetricsRow) -> None:
        if (step := finite(row.get("step"))) is None:
            return
        self.metrics[int(step)] = self.metrics.get(int(step), {}) | row  # an evaluation is a row of its own
        for name, tokens in row.items():
            if isinstance(tokens, float) and (lag := _HISTOGRAM.fullmatch(name)) is not None:
                self.staleness[int(lag[1])] += int(tokens)
        if len(self.metrics) > MOST_STEPS:
            self.metrics = thinned(self.metrics, MOST_STEPS // 2)

    def _event(self, event: Event) -> None:
        match event:
            case Admitted():
                self.admitted += 1
            case Ended() if event.group not in self.ended:
                self.ended[event.group] = event
                self.dropped[self._reason(event)] += 1
                _shorten(self.ended, MOST_GROUPS)
            case RolledBack():
                again = set(event.reopened)
                for group, end in list(self.ended.items()):
                    kept = end.step <= event.step and (end.outcome == "trained" or group not in again)
                    if group >= event.next_group or not kept:
                        del self.ended[group]
                        self.dropped[self._reason(end)] -= 1
                self.admitted = event.next_group  # groups are numbered from 0 without a gap
            case Changed():
                self.changes.append(event)
            case _:
                pass

    def _sample(self, place: int, row: SampleRow) -> None:
        self.rollouts[str(place)] = brief(place, row)
        _shorten(self.rollouts, MOST_ROLLOUTS)

    def row(self, key: str) -> SampleRow | None:
        """All of a rollout that is in the list; None if it is not, or not any more."""
        if key not in self.rollouts:
            return None
        with contextlib.suppress(OSError, *UNREADABLE), open_file(self._samples.path) as file:
            file.seek(int(key))
            return _SAMPLES.decode(file.readline())
        return None

    def _span(self, span: Span) -> None:
        if span.name in DRAWN:
            self.spans.append(span)
            return
        with contextlib.suppress(ValueError):
            number = float(found[1]) if (found := _FIGURE.search(span.detail)) else math.nan
            match span.name:
                case "trained":
                    self.trained_at[int(number)] = span.start_s + span.dur_s
                case "publish_weights":
                    self.published[int(number)] = span.start_s + span.dur_s
                case "group" if math.isfinite(number):
                    self.rewards[span.group_id] = number
        for kept in (self.trained_at, self.published, self.rewards):
            _shorten(kept, MOST_ROLLOUTS)

    def _reason(self, end: Ended) -> tuple[str, str]:
        """What groups are counted by: the figures of one group stand behind a semicolon."""
        reason = end.outcome, end.detail.partition(";")[0][:BRIEF_CHARS]
        return reason if reason in self.dropped or len(self.dropped) < MOST_REASONS else (end.outcome, "other")


def _news(
    tail: Tail, decoder: msgspec.json.Decoder[T], forget: Callable[[], None] | None = None
) -> Iterator[tuple[int, T]]:
    """(place, value) of each new line that can be read. `forget`: called first where the file begins again."""
    if tail.again() and forget is not None:
        forget()
    for place, line in tail.lines():
        with contextlib.suppress(*UNREADABLE):
            yield place, decoder.decode(line)


def _shorten(kept: dict[Any, Any], most: int) -> None:
    """Forget the oldest entry of too many."""
    if len(kept) > most:
        del kept[next(iter(kept))]


def thinned(rows: dict[int, MetricsRow], most: int) -> dict[int, MetricsRow]:
    """At most so many rows (two at least), one for each so many steps: the newest with an evaluation, else the newest.
    The last one stays."""
    steps, stride = sorted(rows), 1
    while len(steps) > max(most, 2):
        stride, chosen = 2 * stride, dict[int, int]()
        for step in steps:
            before = chosen.setdefault(step // stride, step)
            if "eval/version" in rows[step] or "eval/version" not in rows[before]:
                chosen[step // stride] = step
        steps = sorted({*chosen.values(), steps[-1]})
    return {step: rows[step] for step in steps}


def finite(value: object) -> float | None:
    """A number of a row; None for one that is missing or not finite."""
    return float(value) if isinstance(value, float | int) and math.isfinite(value) else None
