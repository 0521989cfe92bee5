"""Documents of a run as the server of the page gives them, made by hand, with hostile text in the answers."""

from __future__ import annotations

import math
from typing import Any, Final

NOW: Final = 1_795_762_800.0
HOSTILE: Final = (
    "<script>window.hacked=1</script><img src=x onerror=hacked=2> \x1b[31mred\x1b[0m \u202egnirts\u2069 \x00"
)
LONG: Final = "9" * 5000
RUNS: Final = ((-1, 6), (41, 20), (42, 9), (43, 5))  # version, tokens


def stage(name: str, replicas: int, shares: tuple[float, ...], **more: Any) -> dict[str, Any]:
    names = ("busy", "starved", "blocked", "stalled")
    figures = {"queue": 0, "in_flight": 2, "items_per_s": 60.5, "tokens_per_s": 0.0, "items_out": 4200}
    rest = {"failures": 0, "restarts": 0}
    return {"name": name, "replicas": replicas, **dict(zip(names, shares, strict=True)), **figures, **rest, **more}


def stream(name: str, source: str, target: str, queued: int) -> dict[str, Any]:
    return {"name": name, "source": source, "target": target, "queued": queued, "leased": 2}


def run_document(**more: Any) -> dict[str, Any]:
    counts = {"trained": 3200, "filtered": 910, "stale": 4, "failed": 2, "discarded": 0, "in_flight": 84}
    lost = {"tail": 0.22, "update": 0.031, "starvation": 0.04, "trainer": 0.11, "stale": 0.004, "variance": 0.085}
    return {
        "run": "/home/me/runs/sums",
        "name": "sums",
        "state": "running",
        "exit_reason": None,
        "live": True,
        "may_steer": True,
        "now_s": NOW,
        "step": 270,
        "total_steps": 4000,
        "elapsed_s": 822.0,
        "eta_s": 11400.0,
        "mode": "async",
        "version": 269,
        "bound": 2,
        "waits": "",
        "advice": "reward 2 -> 3 would make about 67.8 rollouts/s of 60.5 (+12%)",
        "stages": [
            stage("prompts", 1, (0.02, 0.0, 0.9, 0.0)),
            stage("generate", 2, (0.49, 0.1, 0.01, 0.26), tokens_per_s=18_400.0, in_flight=64),
            stage("reward", 2, (0.93, 0.03, 0.02, 0.0), queue=58, restarts=1),
            stage("group", 1, (0.02, 0.93, 0.05, 0.0)),
            stage("train", 1, (0.62, 0.33, 0.03, 0.0), tokens_per_s=9_100.0),
            stage("engines", 1, (0.0, 0.74, 0.0, 0.26), items_per_s=0.0),
        ],
        "streams": [
            stream("generate", "prompts", "generate", 12),
            stream("reward", "generate", "reward", 58),
            stream("group", "reward", "group", 3),
            stream("train", "group", "train", 4),
            stream("settle", "train", "prompts", 0),
        ],
        "engines": [
            {
                "name": f"engine-{i}",
                "state": "serving",
                "version": 269 - i,
                "running": 31 + i,
                "waiting": i,
                "limit": 512,
            }
            | {"idle": 0.29}
            for i in range(2)
        ]
        + [
            {"name": "eval-engine-0", "state": "updating", "version": 260, "running": 4, "waiting": 0, "limit": 512}
            | {"idle": None}
        ],
        "bottleneck": {
            "stage": "reward",
            "why": "reward is the bottleneck: it is busy 93% and 58 rollouts wait for it.",
        },
        "staleness": [[0, 41_000], [1, 88_000], [2, 31_500]],
        "goodput": {"goodput": 0.51, "attainable": 0.68, "lost": lost},
        "ledger": {"admitted": sum(counts.values()), **counts},
        "dropped": [
            {"outcome": "filtered", "detail": "zero_std_0.0", "groups": 812},
            {"outcome": "filtered", "detail": "zero_std_1.0", "groups": 98},
            {"outcome": "stale", "detail": "lag 3 over 2", "groups": 4},
        ],
        "alarms": [
            {"name": "low_ess", "text": "train/ess is 0.41 since step 262", "cure": "Lower asynchrony.max_staleness."}
        ],
        "changes": [{"step": 203, "what": "scale engine", "value": "2"}],
        "settings": {
            "train.lr": 2e-4,
            "rollout.num_rollout": 4000,
            "asynchrony.max_staleness": 2,
            "prompt_data": "sums",
        },
        "checkpoint": "checkpoints/step-00000260",
        "checkpoints": [],
        "resume": "python launch.py --resume runs/sums",
        **more,
    }


def metrics(rows: int = 270) -> dict[str, Any]:
    def wave(base: float, size: float, every: int = 1) -> list[float | None]:
        return [
            round(base + size * (1 - math.exp(-i / 80)) + 0.04 * size * math.sin(i * 1.7), 5)
            if i % every == 0
            else None
            for i in range(rows)
        ]

    columns = {
        "wall_s": [3.1 * i for i in range(rows)],
        "train/reward_mean": wave(0.1, 0.6),
        "eval/sums": wave(0.08, 0.5, 20),
        "eval/sums-ci_low": wave(0.04, 0.45, 20),
        "eval/sums-ci_high": wave(0.12, 0.55, 20),
        "rollout/response_len/mean": wave(200, 300),
        "train/entropy_loss": wave(1.2, -0.7),
        "train/ppo_kl": wave(0.001, 0.004),
        "train/ess": wave(0.99, -0.2),
        "staleness/mean": wave(0.2, 0.9),
        "staleness/max": [float(min(i, 2)) for i in range(rows)],
        "perf/step_time": wave(3, 0.4),
        "perf/wait_time": wave(1, 0.2),
        "perf/train_time": wave(1.8, 0.1),
        "train/trained_tokens": wave(9000, 8000),
        "goodput/share": wave(0.2, 0.3),
        "goodput/attainable": wave(0.6, 0.08),
        "train/grad_norm": wave(1.5, -0.5),
    }
    return {"steps": list(range(1, rows + 1)), "columns": columns}


def lanes(engines: int = 2, bars: int = 60) -> dict[str, Any]:
    """Each bar of three versions; each fourth has a tool call."""
    start = NOW - 60
    made = []
    for lane in range(engines):
        requests = []
        for i in range(bars):
            begin, length = start + (i * 0.93 + lane) % 55, 1.2 + (i * 7 % 11) / 2.5
            version = 240 + int(begin - start) // 3
            requests.append(
                {"group": 900 + i // 4, "start_s": begin, "end_s": begin + length, "tokens": 120}
                | {"versions": [[version, 70], [version + 1, 50]], "reward": float(i % 3 == 0)}
                | {"outcome": "trained", "tools": [[begin + 0.4, begin + 0.9]] if i % 4 == 0 else []}
            )
        updates = [{"start_s": start + 3 * i, "end_s": start + 3 * i + 0.2, "version": 240 + i} for i in range(20)]
        made.append({"name": f"engine-{lane}", "bars": requests, "updates": updates})
    steps = [{"step": 250 + i, "at_s": start + 3 * i + 1} for i in range(20)]
    return {"from_s": start, "to_s": NOW, "lanes": made, "steps": steps, "cut": 0}


def row(i: int) -> dict[str, Any]:
    """A row of the list. The first is hostile, the second long."""
    texts = {0: HOSTILE, 1: LONG}
    outcome = ("trained", "filtered", "stale")[i % 3]
    return {
        "key": f"k{i}",
        "step": 270 - i // 8,
        "outcome": outcome,
        "detail": "zero_std_0.0" if outcome == "filtered" else "",
        "group": 1000 + i // 4,
        "index": i % 4,
        "sequence": 0,
        "status": "completed",
        "reward": float(i % 2),
        "prompt": f"Add {i} and {i + 3}. Answer with the sum alone.",
        "text": texts.get(i, f"The sum of {i} and {i + 3} is {2 * i + 3}."),
        "tokens": 40,
        "versions": [41, 43],
    }


def rollouts(rows: int = 24) -> dict[str, Any]:
    return {"rows": [row(i) for i in range(rows)], "total": rows, "read": 400}


def rollout(i: int) -> dict[str, Any]:
    """One whole: 6 tokens of the prompt, then those of three versions, the second of which is an observation."""
    found = row(i)
    versions = [version for version, tokens in RUNS for _ in range(tokens)]
    words = ["Add", " 0", " and", " 3", ".", "\n"] + [f" t{j}" for j in range(len(versions) - 6)]
    words[8], words[9] = HOSTILE, "\u202e"
    tokens = [
        {"text": words[j], "id": 100 + j, "version": version, "trained": version >= 0}
        | {
            "log_prob": -0.5 if version >= 0 else None,
            "train_log_prob": -0.5 + 0.01 * (j % 5) if version >= 0 else None,
        }
        | {"ratio": math.exp(0.01 * (j % 5)) if version >= 0 else None, "advantage": 0.7 if version >= 0 else None}
        for j, version in enumerate(versions)
    ]
    turns = [
        {"role": "model", "tokens": 20, "text": found["text"]},
        {"role": "observation", "tokens": 9, "text": "tool: 42"},
        {"role": "model", "tokens": 5, "text": "So the answer is 42."},
    ]
    full = {**found, "turns": turns, "label": "3", "error": None, "prompt_tokens": 6, "response_tokens": 34}
    full |= {"versions": [list(run) for run in RUNS], "loss_mask": [[0, 6], [1, 34]], "ids": [t["id"] for t in tokens]}
    siblings = [row(j) for j in range(i - i % 4, i - i % 4 + 4) if j != i]
    published = {"41": NOW - 40, "42": NOW - 37, "43": None}
    return {"row": full, "tokens": tokens, "published": published, "siblings": siblings}


def logs() -> dict[str, Any]:
    lines = [
        {"at_s": NOW + i, "process": "controller" if i % 3 else "engine-0", "text": f"step {i}/4000 | reward 0.{i:03d}"}
        for i in range(200)
    ]
    lines.append({"at_s": None, "process": "train-0", "text": f"Traceback: {HOSTILE} {LONG[:600]}"})
    return {"lines": lines, "cursor": "201"}
