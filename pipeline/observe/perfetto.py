"""Merge the trace records of all replicas into one file in Chrome's trace format, which Perfetto opens.

Layout: one process per replica, ordered by stage as groups first reach the stages; inside, spans in lanes such that
spans of a lane never overlap unless one encloses the other (the format requires it). Arrows link the spans of one
sample from replica to replica; a group-level span (prompt, training) belongs to every sample of its group, and the
arrow of each sample begins and ends there.

Source: "Trace Event Format" (Chromium): phases X, M and s/t/f.
"""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from pipeline.observe.errors import TraceError
from pipeline.observe.trace import NO_GROUP, NO_SAMPLE, Span, read_records
from stages.evaluate import EVAL_BASE


class MergeReport(Struct, frozen=True):
    """What a merge put into its file and what it left out."""

    spans: int
    arrows: int
    replicas: int
    kept_one_group_in: int  # 1 = all
    dropped_by_writers: int


class _Event(Struct, omit_defaults=True):
    name: str
    ph: str
    pid: int
    ts: float = 0.0
    tid: int = 0
    dur: float | None = None
    cat: str = ""
    id: int | None = None
    bp: str = ""
    args: dict[str, int | str] = {}


class _Placed(Struct):
    span: Span
    pid: int
    tid: int


def merge(trace_dir: Path, out: Path, *, max_events: int = 400_000) -> MergeReport:
    """Write the merged trace to `out`, whole or not at all. Raises TraceError if there is nothing to merge.

    With more than `max_events` spans, only every k-th group is kept (and all spans that belong to no group).
    """
    stride, kept = _select(trace_dir, max_events)
    spans: list[Span] = []
    dropped = 0
    for record in read_records(trace_dir):
        if isinstance(record, Span):
            if record.group_id == NO_GROUP or record.group_id in kept:
                spans.append(record)
        else:
            dropped += record.records
    origin_s = min(span.start_s for span in spans)
    pids, names = _processes(spans)
    placed = _lanes(spans, pids)
    arrows = list(_arrows(placed, origin_s))
    report = MergeReport(len(spans), len(arrows), len(pids), stride, dropped)
    events = _events(placed, arrows, pids, names, origin_s)
    _write(out, events, report)
    return report


def _select(trace_dir: Path, max_events: int) -> tuple[int, set[int]]:
    """Every which group is kept, and the ids of those: the first, and from there every k-th in order of ids."""
    total = 0
    groups: set[int] = set()
    for record in read_records(trace_dir):
        if isinstance(record, Span):
            total += 1
            groups.add(record.group_id)
    if total == 0:
        raise TraceError(f"{trace_dir} holds no trace records; was the run started with tracing off?")
    groups.discard(NO_GROUP)
    stride = max(1, -(-total // max_events))
    return stride, set(sorted(groups)[::stride])


def _processes(spans: list[Span]) -> tuple[dict[str, int], dict[str, str]]:
    """Process number and title of each replica: stages in order of their first span of a group, replicas by name."""
    first: dict[str, float] = {}
    stage_of: dict[str, str] = {}
    for span in spans:
        if span.group_id != NO_GROUP:
            first[span.stage] = min(first.get(span.stage, span.start_s), span.start_s)
        stage_of.setdefault(span.replica, span.stage)
    order = sorted(stage_of, key=lambda replica: (first.get(stage_of[replica], float("inf")), replica))
    titles = {replica: f"{stage_of[replica]}: {replica}" for replica in order}
    return {replica: index + 1 for index, replica in enumerate(order)}, titles


def _lanes(spans: list[Span], pids: dict[str, int]) -> list[_Placed]:
    """Give each span a lane of its process: the one of its enclosing span of the same sample, else the lowest free."""
    by_replica: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_replica[span.replica].append(span)
    placed: list[_Placed] = []
    for replica, own in by_replica.items():
        own.sort(key=lambda span: (span.start_s, -span.dur_s))
        free: list[int] = []  # heap of lane numbers without a running span
        running: list[tuple[float, int]] = []  # heap of (end, lane)
        open_in: dict[tuple[int, int], tuple[int, list[float]]] = {}  # sample -> lane, ends of its open spans
        used = 0
        for span in own:
            end = span.start_s + span.dur_s
            while running and running[0][0] <= span.start_s:
                heapq.heappush(free, heapq.heappop(running)[1])
            key = (span.group_id, span.sample)
            lane, ends = open_in.get(key, (0, []))
            while ends and ends[-1] <= span.start_s:
                ends.pop()
            if ends and end <= ends[-1] and span.group_id != NO_GROUP:
                ends.append(end)
            else:
                used += not free
                lane = heapq.heappop(free) if free else used
                heapq.heappush(running, (end, lane))
                open_in[key] = (lane, [end])
            placed.append(_Placed(span, pids[replica], lane))
    return placed


def _arrows(placed: list[_Placed], origin_s: float) -> Iterator[_Event]:
    """Flow events along each sample: spans of its group at group level before, its own, group level after."""
    groups: defaultdict[int, list[_Placed]] = defaultdict(list)
    for item in placed:
        if item.span.group_id != NO_GROUP:
            groups[item.span.group_id].append(item)
    flow = 0
    for group_id, items in groups.items():
        items.sort(key=lambda item: item.span.start_s)
        samples = sorted({item.span.sample for item in items} - {NO_SAMPLE}) or [NO_SAMPLE]
        for sample in samples:
            chain = [item for item in items if item.span.sample in (sample, NO_SAMPLE)]
            chain = [item for i, item in enumerate(chain) if i == 0 or item.pid != chain[i - 1].pid]
            if len(chain) < 2:
                continue
            flow += 1
            name = _title(group_id) + (f" sample {sample}" if sample != NO_SAMPLE else "")
            for i, item in enumerate(chain):
                last = i == len(chain) - 1
                yield _Event(
                    name=name,
                    ph="s" if i == 0 else "f" if last else "t",
                    cat="sample",
                    id=flow,
                    pid=item.pid,
                    tid=item.tid,
                    ts=_us(item.span.start_s - origin_s),
                    bp="e" if last else "",
                )


def _events(
    placed: list[_Placed],
    arrows: list[_Event],
    pids: dict[str, int],
    titles: dict[str, str],
    origin_s: float,
) -> Iterator[_Event]:
    for replica, pid in pids.items():
        yield _Event(name="process_name", ph="M", pid=pid, args={"name": titles[replica]})
        yield _Event(name="process_sort_index", ph="M", pid=pid, args={"sort_index": pid})
    for pid, tid in sorted({(item.pid, item.tid) for item in placed}):
        yield _Event(name="thread_name", ph="M", pid=pid, tid=tid, args={"name": f"lane {tid}"})
    for item in placed:
        span = item.span
        args: dict[str, int | str] = {"detail": span.detail} if span.detail else {}
        if span.group_id != NO_GROUP:
            args["group_id"] = span.group_id
            if span.group_id >= EVAL_BASE:
                args["evaluates"] = _title(span.group_id)
        if span.sample != NO_SAMPLE:
            args["sample"] = span.sample
        yield _Event(
            name=span.name,
            ph="X",
            cat=span.stage,
            pid=item.pid,
            tid=item.tid,
            ts=_us(span.start_s - origin_s),
            dur=_us(span.dur_s),
            args=args,
        )
    yield from arrows


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
