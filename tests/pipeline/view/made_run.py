"""A small run directory with exact numbers, as a run would have left it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.disk import write_whole
from pipeline.facts.run_directory import RunDir
from pipeline.facts.stats import Changed
from pipeline.record.journal import Admitted, Ended, Event, Journal, Stepped

START_S = 1_000_000.0
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m"


def sample(**fields: Any) -> dict[str, Any]:
    """A line of samples.jsonl: two prompt tokens, then three of version 0 and two of version 1."""
    return {
        "step": 1,
        "outcome": "trained",
        "group": 0,
        "index": 0,
        "status": "completed",
        "reward": 1.0,
        "prompt": "1+2=",
        "turns": [{"role": "model", "tokens": 5, "text": "three"}],
        "prompt_tokens": 2,
        "response_tokens": 5,
        "loss_mask": [[0, 2], [1, 5]],
        "versions": [[-1, 2], [0, 3], [1, 2]],
        "ids": [5, 6, 7, 8, 9, 10, 11],
    } | fields


def span(name: str, start_s: float, dur_s: float, **fields: Any) -> dict[str, Any]:
    """A line of a trace; `start_s` after the start of the run."""
    found = {"type": "span", "name": name, "stage": name, "replica": f"{name}-0", "start_s": START_S + start_s}
    return found | {"dur_s": dur_s} | fields


def lines(path: Path, *rows: Any) -> None:
    """Append rows as JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def journalled(path: Path, *events: Event) -> None:
    """Append events to the journal."""
    with Journal(path) as journal:
        journal.write(*events)


def made_run(path: Path) -> RunDir:
    """A killed run of two steps and eight groups: three trained, three filtered for two reasons, one failed."""
    with RunDir(path).open(resume=False) as run:
        run.write_config('[run]\nmode = "async"\n[rollout]\nnum_rollout = 7\n')
        run.trace.mkdir(exist_ok=True)
    ends = [
        *(Ended(group, "trained", 1 + group // 2) for group in range(3)),
        *(Ended(group, "filtered", 1, "zero_std_0.0") for group in (3, 4)),
        Ended(5, "filtered", 1, "too_long"),
        Ended(6, "failed", 1, "insufficient_members: 0 of 4; ValueError: token 61"),
    ]
    admitted = [Admitted(group, group) for group in range(8)]
    journalled(run.ledger, *admitted, *ends, Stepped(1, "aa", 0), Stepped(2, "bb", 1), Changed(1, "set lr", "1e-6"))
    first = {"step": 1, "wall_s": 2.0, "train/loss": 0.5, "staleness/token_hist/0": 6.0}
    second = {"step": 2, "wall_s": 3.5, "train/loss": None, "nonfinite": {"train/loss": "nan"}}
    second |= {
        "staleness/token_hist/0": 4,
        "staleness/token_hist/1": 2,
        "goodput/share": 0.5,
        "goodput/lost_tail": 0.25,
    }
    second |= {"goodput/lost_starved": 0.125, "goodput/lost_no_variance": 0.125}
    lines(run.metrics, first, second, {"step": 2, "wall_s": 4.0, "eval/sums": 0.75, "eval/version": 2.0})
    other = sample(
        index=1, reward=0.0, versions=[[-1, 2], [1, 5]], turns=[{"role": "model", "tokens": 5, "text": HOSTILE}]
    )
    filtered = sample(group=3, outcome="filtered", detail="zero_std_0.0", reward=0.0, versions=[[-1, 2], [0, 5]])
    log_probs = [None, None, -0.1, -0.2, -0.3, -0.4, -0.5]
    known = sample(log_probs=log_probs, advantages=[[None, 2], [1.5, 5]])
    known["train_log_probs"] = [None, None, -0.1, -0.2, -0.3, -0.4, -0.25]
    lines(run.path / "samples.jsonl", known, other, filtered)
    lines(
        run.trace / "generate-0.jsonl",
        span("request", 0.0, 1.0, group_id=0, detail="engine-0, 2 tokens of version 0"),
        span("request", 1.5, 0.5, group_id=0, detail="engine-0, 1 tokens of version 0, 7 tokens of version 1"),
        span("generate", 0.0, 2.0, group_id=0, detail="turn 1, 10 tokens, version 1"),
        span("request", 2.0, 0.5, group_id=6, detail="engine-0, 8 tokens of version 1"),
    )
    lines(run.trace / "group-0.jsonl", span("group", 2.0, 0.1, group_id=0, detail="reward 0.5"))
    lines(run.trace / "agents-0.jsonl", span("tool", 1.0, 0.25, group_id=0, sample=0))
    lines(run.trace / "engines-0.jsonl", span("update_weights", 1.25, 0.25, detail="engine-0 version 1"))
    lines(
        run.trace / "train-0.jsonl",
        span("publish_weights", 1.0, 0.125, detail="version 1"),
        span("trained", 1.0, 0.0, group_id=0, detail="step 1"),
    )
    (run.path / ".seal-0").touch()  # a process that went without an end
    write_whole(
        run.path / "run.log",
        b"1970-01-12 13:46:41.500 controller: one\n  more of it\n1970-01-12 13:46:43.000 c: three\n",
    )
    write_whole(run.logs / "train-0.log", b"1970-01-12 13:46:42,250 INFO root: two\n0%\r100% done\nnot whole")
    return run
