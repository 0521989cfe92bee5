"""Spans of every sample in every stage: written per process, merged into one file for Perfetto or chrome://tracing.

Each process appends to `trace/<replica>.jsonl`, one record per line. `merge` makes one Chrome trace of them, with a
process per replica, ordered by stage as groups first reach the stages. Spans are nestable async events: the viewer
draws overlapping spans in lanes of their own. A span inside another span of the same sample shares its `id` and is
drawn below it. Arrows link the spans of one sample from replica to replica. A group-level span (prompt, training)
belongs to every sample of its group, and the arrow of each sample begins and ends there.

Invariants:
- times are unix seconds, so processes of one machine agree; the merged trace counts microseconds from its first
  record;
- a killed process loses at most what was in its buffer; a torn last line is skipped;
- both sides are bounded: a writer stops at `max_bytes` and counts what it dropped, a merge over `max_events` keeps
  every k-th group whole, so that its arrows are complete.

Source: "Trace Event Format" (Chromium): phases M, b/n/e, and flows by `bind_id`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

from models.disk import open_file
from pipeline.errors import UsageError
from stages.messages import EVAL_BASE

NO_GROUP: Final = -1
NO_SAMPLE: Final = -1
_FLUSH_BYTES: Final = 64 * 1024
_FLUSH_S: Final = 1.0


class Span(Struct, frozen=True, tag="span", omit_defaults=True):
    """One piece of work. `sample` is -1 for work on the whole group, `group_id` -1 for work on none."""

    name: str
    stage: str
    replica: str
    start_s: float  # unix time
    dur_s: float
    group_id: int = NO_GROUP
    sample: int = NO_SAMPLE
    detail: str = ""


class Dropped(Struct, frozen=True, tag="dropped", omit_defaults=True):
    """Last record of a writer that reached its size: how many records it did not write."""

    replica: str
    records: int


Record = Span | Dropped


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Appends the spans of one replica to its file; buffered, so a span costs about a microsecond. A context manager.

    It is what a stage calls `Spans` (stages/base.py).

    Args:
        directory: the run's trace directory.
        replica: names the file and the process in the merged trace.
        max_bytes: size at which writing stops.
        enabled: without it nothing is written, not even a file.
        exporter: gets every span too, and None at the end.
    """

    def __init__(
        self,
        directory: Path,
        replica: str,
        *,
        stage: str = "",
        max_bytes: int = 32 << 20,
        enabled: bool = True,
        exporter: Callable[[Span | None], None] | None = None,
    ) -> None:
        self.path = directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', replica)}.jsonl"
        self._replica, self._stage, self._exporter = replica, stage, exporter
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        if enabled:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        self._written = self._file.tell() if self._file is not None else 0
        self._buffer = bytearray()
        self._flushed_s = time.monotonic()
        self._encoder = msgspec.json.Encoder()
        self.dropped = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self,
        name: str,
        start_s: float,
        dur_s: float,
        *,
        group: int = NO_GROUP,
        sample: int = NO_SAMPLE,
        detail: str = "",
    ) -> None:
        """Record finished work. `start_s` is unix time."""
        span = Span(name, self._stage, self._replica, start_s, dur_s, group, sample, detail)
        if self._exporter is not None:
            self._exporter(span)
        if self._file is None:
            return
        line = self._encoder.encode(span)
        if self._written + len(self._buffer) + len(line) + 1 > self._max_bytes:
            self.dropped += 1
            return
        self._buffer += line
        self._buffer += b"\n"
        if len(self._buffer) >= _FLUSH_BYTES or time.monotonic() - self._flushed_s >= _FLUSH_S:
            self.flush()

    def export(self, name: str, start_s: float, *, group: int = NO_GROUP, detail: str = "") -> None:
        """Work until now that contains other spans: for the exporter alone, since the viewer of the file nests none."""
        if self._exporter is not None:
            self._exporter(Span(name, self._stage, self._replica, start_s, time.time() - start_s, group, -1, detail))

    def flush(self) -> None:
        """Hand the buffer to the kernel. A disk that fails ends the trace, not the run: the rest counts as dropped."""
        if self._buffer and self._file is not None:
            try:
                self._file.write(self._buffer)
                self._written += len(self._buffer)
            except OSError:
                self.dropped += self._buffer.count(b"\n")
                self._max_bytes = 0
            self._buffer.clear()
        self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Flush, note what was dropped, close. May be called twice."""
        if self._exporter is not None:
            self._exporter(None)
        if self._file is None:
            return
        if self.dropped and self._max_bytes:
            self._buffer += self._encoder.encode(Dropped(self._replica, self.dropped)) + b"\n"
        self.flush()
        self._file.close()
        self._file = None


def read_records(directory: Path) -> Iterator[Record]:
    """All records of a trace directory, file by file. Lines that do not decode (torn by a kill) are skipped, and so is
    a file that cannot be read."""
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
    for path in sorted(directory.glob("*.jsonl")):
        with contextlib.suppress(OSError), open_file(path) as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # torn, as documented
                    yield decoder.decode(line)


class MergeReport(Struct, frozen=True):
    """What a merge wrote into its file, and what it left out."""

    spans: int
    arrows: int
    replicas: int
    kept_one_group_in: int  # 1 = all
    dropped_by_writers: int


class _Event(Struct, omit_defaults=True):
    name: str
    ph: str
    pid: int
    ts: float = 0.0  # microseconds
    tid: int | None = None
    cat: str = ""
    id: int | None = None
    bind_id: int | None = None  # the arrow that passes here
    flow_in: bool = False
    flow_out: bool = False
    args: dict[str, int | str] = {}


class _Placed(Struct):
    span: Span
    pid: int
    id: int  # of the outermost span around it
    arrows: list[tuple[int, bool, bool]]  # number, whether it comes in, whether it goes out


def merge(trace_dir: Path, out: Path, *, max_events: int = 400_000) -> MergeReport:
    """Write the merged trace to `out`, whole or not at all. Raises UsageError if there is nothing to merge.

    With more than `max_events` spans, only every k-th group is kept (and all spans that belong to no group).
    """
    stride, kept = _select(trace_dir, max_events)
    spans, dropped = list[Span](), 0
    for record in read_records(trace_dir):
        if isinstance(record, Dropped):
            dropped += record.records
        elif record.group_id == NO_GROUP or record.group_id in kept:
            spans.append(record)
    origin_s = min(span.start_s for span in spans)
    processes = _processes(spans)
    placed = _nested(spans, processes)
    report = MergeReport(len(spans), _link(placed), len(processes), stride, dropped)
    _write(out, _events(placed, processes, origin_s), report)
    return report


def _select(trace_dir: Path, max_events: int) -> tuple[int, set[int]]:
    """(k, ids of the kept groups): the first group and every k-th after it, in order of ids."""
    spans = Counter(record.group_id for record in read_records(trace_dir) if isinstance(record, Span))
    if not spans:
        raise UsageError(f"{trace_dir} holds no trace records; was the run started with tracing off?")
    stride = max(1, math.ceil(spans.total() / max_events))
    return stride, set(sorted(spans.keys() - {NO_GROUP})[::stride])


def _processes(spans: list[Span]) -> dict[str, tuple[int, str]]:
    """Process number and title of each replica: stages in order of their first span of a group, replicas by name."""
    first: dict[str, float] = {}
    stage_of: dict[str, str] = {}
    for span in spans:
        if span.group_id != NO_GROUP:
            first[span.stage] = min(first.get(span.stage, span.start_s), span.start_s)
        stage_of.setdefault(span.replica, span.stage)
    order = sorted(stage_of, key=lambda replica: (first.get(stage_of[replica], float("inf")), replica))
    return {replica: (number, f"{stage_of[replica]}: {replica}") for number, replica in enumerate(order, start=1)}


def _nested(spans: list[Span], processes: dict[str, tuple[int, str]]) -> list[_Placed]:
    """Give a span the id of the span of its sample that encloses it, else a new one; in order of replica and start."""
    placed: list[_Placed] = []
    enclosing: dict[tuple[str, int, int], tuple[int, list[float]]] = {}  # sample -> id, ends of its open spans
    for span in sorted(spans, key=lambda span: (processes[span.replica], span.start_s, -span.dur_s)):
        key, end = (span.replica, span.group_id, span.sample), span.start_s + span.dur_s
        number, ends = enclosing.get(key, (0, []))
        while ends and ends[-1] <= span.start_s:
            ends.pop()
        if ends and end <= ends[-1] and span.group_id != NO_GROUP:
            ends.append(end)
        else:
            number = len(placed) + 1
            enclosing[key] = (number, [end])
        placed.append(_Placed(span, processes[span.replica][0], number, []))
    return placed


def _link(placed: list[_Placed]) -> int:
    """Lay an arrow along each sample: spans of its group at group level before, its own, group level after. Returns the
    number of arrow ends."""
    groups: defaultdict[int, list[_Placed]] = defaultdict(list)
    for item in placed:
        if item.span.group_id != NO_GROUP:
            groups[item.span.group_id].append(item)
    arrow = ends = 0
    for items in groups.values():
        items.sort(key=lambda item: item.span.start_s)
        for sample in sorted({item.span.sample for item in items} - {NO_SAMPLE}) or [NO_SAMPLE]:
            visits = groupby((item for item in items if item.span.sample in (sample, NO_SAMPLE)), attrgetter("pid"))
            chain = [next(visit) for _, visit in visits]
            if len(chain) > 1:
                arrow += 1
                ends += len(chain)
                for i, item in enumerate(chain):
                    item.arrows.append((arrow, i > 0, i < len(chain) - 1))
    return ends


def _events(placed: list[_Placed], processes: dict[str, tuple[int, str]], origin_s: float) -> Iterator[_Event]:
    for pid, title in processes.values():
        yield _Event(name="process_name", ph="M", pid=pid, args={"name": title})
        yield _Event(name="process_sort_index", ph="M", pid=pid, args={"sort_index": pid})
    open_spans: defaultdict[int, list[_Event]] = defaultdict(list)  # id -> the ends to come, the innermost last
    for item in placed:
        ends, ts = open_spans[item.id], _us(item.span.start_s - origin_s)
        while ends and ends[-1].ts <= ts:
            yield ends.pop()
        yield from _begin(item, ts)
        end_ts = _us(item.span.start_s + item.span.dur_s - origin_s)
        ends.append(_Event(item.span.name, "e", item.pid, end_ts, item.pid, item.span.stage, item.id))
    for ends in open_spans.values():
        yield from reversed(ends)


def _begin(item: _Placed, ts: float) -> Iterator[_Event]:
    """The begin of a span. It carries one arrow; those of the other samples of a group have a mark of their own."""
    span = item.span
    args: dict[str, int | str] = {"detail": span.detail} if span.detail else {}
    if span.group_id != NO_GROUP:
        args["group_id"] = span.group_id
        if span.group_id >= EVAL_BASE:
            args["evaluates"] = _title(span.group_id)
    if span.sample != NO_SAMPLE:
        args["sample"] = span.sample
    begin = _Event(span.name, "b", item.pid, ts, item.pid, span.stage, item.id, args=args)
    for i, (arrow, flow_in, flow_out) in enumerate(item.arrows or [(None, False, False)]):
        event = begin if i == 0 else _Event(_title(span.group_id), "n", item.pid, ts, item.pid, span.stage, item.id)
        event.bind_id, event.flow_in, event.flow_out = arrow, flow_in, flow_out
        yield event


def _title(group_id: int) -> str:
    """Groups of an evaluation have numbers of their own."""
    return f"group {group_id}" if group_id < EVAL_BASE else f"evaluation prompt {group_id - EVAL_BASE}"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _write(out: Path, events: Iterable[_Event], report: MergeReport) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    encoder = msgspec.json.Encoder()
    with draft.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encoder.encode(report) + b',"traceEvents":[\n')
        for i, event in enumerate(events):
            file.write((b",\n" if i else b"") + encoder.encode(event))
        file.write(b"\n]}\n")
    draft.replace(out)
