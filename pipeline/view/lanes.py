"""When each group was generated, by which weights, and when weights and steps came: one document from the trace.

A bar is one group in one replica of the generate stage, from the start of its first turn to the end of its last one. A
run with one engine has one lane, of this engine; with several, the trace does not say which one served a group, so
replicas of generate have the bars and each engine has its weight updates.
"""

from __future__ import annotations

import re
from statistics import fmean
from typing import Any, Final

from pipeline.facts.trace import NO_GROUP, Span
from pipeline.view.run_files import RunFiles
from stages.messages import EVAL_BASE

MOST_BARS: Final = 4_000
_TOKENS: Final = re.compile(r"(\d+) tokens(?:, version (\d+)(?: to (\d+))?)?")
_UPDATE: Final = re.compile(r"(\S+) version (\d+)")


def lanes(files: RunFiles, seconds: float, until: float | None) -> dict[str, Any]:
    """Bars, updates and steps of the seconds before `until`, unix time; None is the newest span."""
    newest = max((span.start_s + span.dur_s for span in files.spans), default=0.0)
    end_s = newest if until is None else until
    start_s = end_s - seconds
    seen = [span for span in files.spans if span.start_s <= end_s and span.start_s + span.dur_s >= start_s]
    updates = [
        (found, span) for span in seen if span.name == "update_weights" and (found := _UPDATE.match(span.detail))
    ]
    engines = {found[1] for s in files.spans if s.name == "update_weights" and (found := _UPDATE.match(s.detail))}
    groups: dict[tuple[str, int], list[Span]] = {}
    tools: dict[int, list[list[float]]] = {}
    for span in seen:
        if span.name == "generate" and span.group_id != NO_GROUP:
            lane = next(iter(engines)) if len(engines) == 1 else span.replica
            groups.setdefault((lane, span.group_id), []).append(span)
        elif span.name == "tool":
            tools.setdefault(span.group_id, []).append([span.start_s, span.start_s + span.dur_s])
    bars = sorted(((lane, _bar(files, group, spans)) for (lane, group), spans in groups.items()), key=_newest_first)
    for _, bar in bars[:MOST_BARS]:
        bar["tools"] = sorted(tools.get(bar["group"], []))
    drawn: dict[str, dict[str, Any]] = {}
    for name in sorted({lane for lane, _ in bars} | {match[1] for match, _ in updates}, key=lambda n: (len(n), n)):
        drawn[name] = {"name": name, "bars": [], "updates": []}
    for lane, bar in reversed(bars[:MOST_BARS]):
        drawn[lane]["bars"].append(bar)
    for match, span in updates:
        update = {"start_s": span.start_s, "end_s": span.start_s + span.dur_s, "version": int(match[2])}
        drawn[match[1]]["updates"].append(update)
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
    """A group. Its tokens by version are those of samples.jsonl; of a group that is not there the trace tells the
    tokens of each turn and their versions, and null where a turn has two."""
    tokens, versions = 0, dict[int, int | None]()
    for span in spans:
        if (found := _TOKENS.search(span.detail)) is None:
            continue
        made, first, last = int(found[1]), found[2], found[3]
        tokens += made
        for version in {int(name) for name in (first, last) if name is not None}:
            before = versions.get(version, 0)
            versions[version] = None if last is not None or before is None else before + made
    if group in files.versions_of and group < EVAL_BASE:
        versions = dict(files.versions_of[group])
        tokens = files.versions_of[group].total()
    end, rewards = files.ended.get(group), files.rewards_of.get(group)
    return {
        "group": group,
        "start_s": min(span.start_s for span in spans),
        "end_s": max(span.start_s + span.dur_s for span in spans),
        "versions": [[version, n] for version, n in sorted(versions.items())],
        "tokens": tokens,
        "reward": fmean(rewards) if rewards else None,
        "outcome": "evaluation" if group >= EVAL_BASE else (end.outcome if end is not None else None),
        "tools": [],
    }
