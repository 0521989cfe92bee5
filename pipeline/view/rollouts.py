"""Rollouts of samples.jsonl: a list with filters, and one of them with all of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from pipeline.observe.samples import Decode, read_bound
from pipeline.view.run_files import BRIEF_CHARS, Brief, RunFiles
from stages.sample_log import SampleRow

T = TypeVar("T")

MOST_ROWS: Final = 1_000  # of an answer
UNFINISHED: Final = "\ufffd"  # what a tokenizer gives for the first bytes of a character


class Query(Struct, frozen=True):
    """What to list. Empty and None ask for nothing; `reward` is a bound such as ">0.5"."""

    outcome: str = ""
    step: int | None = None
    group: int | None = None
    reward: str = ""
    text: str = ""
    min_tokens: int = 0
    offset: int = 0
    limit: int = 100


def rollouts(files: RunFiles, query: Query) -> dict[str, Any]:
    """The rows from `offset` on, newest first; how many there are, and of how many. Raises UsageError for a bound that
    is none."""
    found = list(_matching(files, query))
    start = max(0, query.offset)
    rows = found[start : start + max(0, min(query.limit, MOST_ROWS))]
    return {"rows": msgspec.to_builtins(rows), "total": len(found), "read": len(files.rollouts)}


def _matching(files: RunFiles, query: Query) -> Iterator[Brief]:
    within = read_bound(query.reward) if query.reward else None
    for row in reversed(files.rollouts.values()):
        if (
            (not query.outcome or row.outcome == query.outcome)
            and (query.step is None or row.step == query.step)
            and (query.group is None or row.group == query.group)
            and (within is None or (row.reward is not None and within(row.reward)))
            and row.tokens >= query.min_tokens
            and (not query.text or _says(files, row, query.text.lower()))
        ):
            yield row


def _says(files: RunFiles, row: Brief, text: str) -> bool:
    """Whether the prompt or a turn has a text; the rows of the list have only their beginnings."""
    if text in f"{row.prompt}\n{row.text}".lower():
        return True
    if max(len(row.prompt), len(row.text)) < BRIEF_CHARS:  # they are whole
        return False
    whole = files.row(row.key)
    return whole is not None and any(text in part.lower() for part in (whole.prompt, *(t.text for t in whole.turns)))


def rollout(files: RunFiles, key: str, decode: Decode | None) -> dict[str, Any] | None:
    """One rollout: its row, its tokens, when its weights were published, the others of its group."""
    row = files.row(key)
    if row is None:
        return None
    versions = {version for version, _ in row.versions if version >= 0}
    group = (other for other in files.rollouts.values() if other.group == row.group and other.key != key)
    return {
        "row": msgspec.to_builtins(row),
        "tokens": _tokens(row, decode),
        "published": {str(version): files.published.get(version) for version in sorted(versions)},
        "siblings": msgspec.to_builtins(list(islice(group, MOST_ROWS))),
    }


def _tokens(row: SampleRow, decode: Decode | None) -> list[dict[str, Any]]:
    """Each token; null where the run did not write a value."""
    texts = repeat(None) if decode is None else _texts(row.ids, decode)
    log_probs, trainers = row.log_probs or repeat(None), row.train_log_probs or repeat(None)
    advantages = _each(row.advantages) if row.advantages else repeat(None)
    masks = _each(row.versions), _each(row.loss_mask)
    parts = zip(row.ids, texts, *masks, log_probs, trainers, advantages, strict=False)
    return [
        {
            "text": text,
            "id": number,
            "version": version if version >= 0 else None,
            "trained": bool(mask),
            "log_prob": log_prob,
            "train_log_prob": current,
            "ratio": None if log_prob is None or current is None else math.exp(current - log_prob),
            "advantage": advantage,
        }
        for number, text, version, mask, log_prob, current, advantage in parts
    ]


def _each(runs: Sequence[tuple[T, int]]) -> Iterator[T]:
    return (value for value, n in runs for _ in range(n))


def _texts(ids: Sequence[int], decode: Decode) -> Iterator[str]:
    """The text that each token adds. A character of several tokens stands with its last one."""
    start = shown = 0  # what is decoded again to know the text, and what of it was given out
    for end in range(1, len(ids) + 1):
        before, text = decode(ids[start:shown]), decode(ids[start:end])
        if text.endswith(UNFINISHED) and end < len(ids) and end - shown < 8:
            yield ""
            continue
        yield text[len(before) :]
        start, shown = shown, end
