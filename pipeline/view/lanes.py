"""When each group was generated, by which weights, and when weights and steps came: one document from the trace.

A lane is an engine. A bar is one group there, from the start of its first request to the end of its last one; a group
that several engines served has a bar in each of their lanes.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

from pipeline.facts.trace import Span
from pipeline.view.run_files import RunFiles
from stages.messages import EVAL_BASE

MOST_BARS: Final = 4_000
_MADE: Final = re.compile(r"(\d+) tokens of version (\d+)")
_UPDATE: Final = re.compile(r"(\S+) version (\d+)")


def lanes(files: RunFiles, seconds: float, until: float | None) -> dict[str, Any]:
    """Bars, updates and steps of the seconds before `until`, unix time; None is the newest span."""
    newest = max((span.start_s + span.dur_s for span in files.spans), default=0.0)
    end_s = newest if until is None else until
    start_s = end_s - seconds
    updates: list[tuple[str, dict[str, float]]] = []
    groups: dict[tuple[str, int], list[Span]] = {}
    tools: dict[int, list[list[float]]] = {}
    for span in files.spans:
        if span.start_s > end_s or span.start_s + span.dur_s < start_s:
            continue
        if span.name == "request":
            groups.setdefault((span.detail.partition(",")[0], span.group_id), []).append(span)
        elif span.name == "tool":
            tools.setdefault(span.group_id, []).append([span.start_s, span.start_s + span.dur_s])
        elif (found := _UPDATE.match(span.detail)) is not None:
            update = {"start_s": span.start_s, "end_s": span.start_s + span.dur_s, "version": int(found[2])}
            updates.append((found[1], update))
    bars = sorted(((lane, _bar(files, group, spans)) for (lane, group), spans in groups.items()), key=_newest_first)
    names = sorted({lane for lane, _ in bars} | {engine for engine, _ in updates}, key=lambda n: (len(n), n))
    drawn: dict[str, dict[str, Any]] = {name: {"name": name, "bars": [], "updates": []} for name in names}
    for lane, bar in reversed(bars[:MOST_BARS]):
        drawn[lane]["bars"].append(bar | {"tools": sorted(tools.get(bar["group"], []))})
    for engine, update in updates:
        drawn[engine]["updates"].append(update)
    return {
        "from_s": start_s,
        "to_s": end_s,
        "lanes": list(drawn.values()),
        "steps": [{"step": n, "at_s": at} for n, at in sorted(files.trained_at.items()) if start_s <= at <= end_s],
        "cut": max(0, len(bars) - MOST_BARS),
    }


def _newest_first(item: tuple[str, dict[str, Any]]) -> float:
    return -float(item[1]["start_s"])


def _bar(files: RunFiles, group: int, spans: list[Span]) -> dict[str, Any]:
    """A group at one engine, with its tokens by version."""
    made = Counter[int]()
    for span in spans:
        for tokens, version in _MADE.findall(span.detail):
            made[int(version)] += int(tokens)
    end = files.ended.get(group)
    return {
        "group": group,
        "start_s": min(span.start_s for span in spans),
        "end_s": max(span.start_s + span.dur_s for span in spans),
        "versions": [[version, n] for version, n in sorted(made.items())],
        "tokens": made.total(),
        "reward": files.rewards.get(group),
        "outcome": "evaluation" if group >= EVAL_BASE else (end.outcome if end is not None else None),
    }
