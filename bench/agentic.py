"""A thousand trajectories that wait for tools: how busy engines stay, and who should go first.

    python -m bench.agentic [--quick] [--rounds N] [--output FILE]

Rollouts of several turns in the agents stage, with a lognormal wait for a tool behind each turn, on simulated engines.
Contenders, in one run and with the same waits: no waits at all; a thousand trajectories whose slots are free while
their tools run, with the turns of the oldest group first and in the order in which they come; and as many trajectories
as there are slots, which is what an engine sees when generation and tools run in one function that keeps its slot.
Everything but engines, trainer and tools is the production code.

Reported: groups that ended per second beside those of the run without waits (the share of what the engines can do that
they do), the share of groups that were trained and not too old by then, seconds per rollout batch, and how old a batch
is. Counted is the middle of a run, for as long as all that is in flight takes to be replaced once: at the start all
trajectories begin at once and end in a crowd, and at the end, when nothing is left to admit, fewer are in flight.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.modes import completed
from bench.report import Series, arguments, finish, machine

ENGINES, SLOTS = 2, 32
GROUPS, MEMBERS = 4, 8  # of a rollout batch: as many rollouts as one half of all slots
TURNS, TURN_TOKENS = 4, 60
WAIT_S, SIGMA = 5.0, 1.2
A_MS, C_MS = 8.0, 0.1
SCALE = 1.4  # of real time
AHEAD = 1024 // (GROUPS * MEMBERS) - 1  # batches beyond the one in training: a thousand trajectories


@dataclass(frozen=True)
class Contender:
    """One way to run."""

    name: str
    ahead: int
    priority: str
    wait_s: float


CONTENDERS = (
    Contender("no waits", AHEAD, "oldest_group", 0.0),
    Contender("oldest group first", AHEAD, "oldest_group", WAIT_S),
    Contender("first come", AHEAD, "fifo", WAIT_S),
    Contender("slots kept in tools", ENGINES * SLOTS // (GROUPS * MEMBERS) - 1, "oldest_group", WAIT_S),
)


@dataclass(frozen=True)
class Outcome:
    groups_s: float  # that ended, in whichever way: what engines made
    trained: float  # share of them
    step_s: float
    staleness: float
    staleness_max: float


RECIPE = """
[[environment]]
name = "slow_tools"
path = "bench.slow_tools:SlowTools"
options = {{ turns = {turns}, wait_s = {wait_s}, sigma = {sigma} }}
"""


def flags(contender: Contender, steps: int, seed: int, home: Path) -> list[str]:
    recipe = home / "slow_tools.toml"
    recipe.write_text(RECIPE.format(turns=TURNS, wait_s=contender.wait_s, sigma=SIGMA))
    simulated = {
        "a_ms": A_MS, "c_ms": C_MS, "length_mean": TURN_TOKENS, "length_sigma": 0.5, "length_cap": 4 * TURN_TOKENS,
        "update_s": 0.05, "time_scale": SCALE, "vocab_size": 250,
    }  # fmt: skip
    return [
        "--config", str(recipe), "--mode", "async", "--async-buffer-size", str(contender.ahead),
        "--rollout-priority", contender.priority, "--hf-checkpoint", "tiny", "--prompt-data", "slow_tools",
        "--engine", "simulated", "--engine-slots", str(SLOTS), "--server-concurrency", str(SLOTS),
        "--scale", f"engine={ENGINES}", "--train-backend", "simulated", "--simulated-step-s", "0.1",
        "--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(MEMBERS), "--num-rollout", str(steps),
        "--max-turns", str(TURNS), "--rollout-max-response-len", str(TURNS * (4 * TURN_TOKENS + 40)),
        "--rollout-max-context-len", "4096", "--seed", str(seed), "--rollout-seed", str(seed),
        "--no-live", "--no-trace", "--no-use-tensorboard", "--log-interval", "1000", "--run-dir", str(home / "run"),
        *[f"engine.simulated.{key}={value}" for key, value in simulated.items()],
    ]  # fmt: skip


def measure(contender: Contender, steps: int, warm_up: int, seed: int) -> Outcome:
    """One run in a directory of its own; `steps` batches are counted, behind the first and before the last ones."""
    begins = contender.ahead + warm_up
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        given = flags(contender, begins + steps + contender.ahead, seed, Path(home))
        rows = completed(contender.name, given, Path(home) / "run")
    first, last, counted = rows[begins - 1], rows[begins + steps - 1], rows[begins : begins + steps]
    seconds = last["wall_s"] - first["wall_s"]
    ended = _ended(last) - _ended(first)
    return Outcome(
        groups_s=ended / seconds,
        trained=(last["ledger/trained"] - first["ledger/trained"]) / ended,
        step_s=seconds / steps,
        staleness=statistics.mean(row["staleness/start_mean"] for row in counted),
        staleness_max=max(row["staleness/max"] for row in counted),
    )


def _ended(row: dict[str, Any]) -> float:
    """Groups by the end of a batch."""
    return float(sum(row[f"ledger/{name}"] for name in ("trained", "filtered", "stale", "failed", "discarded")))


def report(results: dict[str, list[Outcome]]) -> list[Series]:
    """Print the table; return what the JSON file holds."""
    print(f"\n{'':>20} {'groups/s':>9} {'engines busy':>13} {'trained':>8} {'s/batch':>8} {'staleness':>10} {'max':>4}")
    series: list[Series] = []
    for name, outcomes in results.items():
        busy = [o.groups_s / base.groups_s for o, base in zip(outcomes, results["no waits"], strict=True)]
        mean = {field: statistics.median(getattr(o, field) for o in outcomes) for field in Outcome.__annotations__}
        print(
            f"{name:>20} {mean['groups_s']:9.2f} {statistics.median(busy):13.2f} {mean['trained']:8.2f} "
            f"{mean['step_s']:8.2f} {mean['staleness']:10.2f} {mean['staleness_max']:4.0f}"
        )
        series.append(Series("tools", name, "busy share", busy))
        series += [Series("tools", name, field, [getattr(o, field) for o in outcomes]) for field in mean]
    return series


def main() -> None:
    options = arguments(__doc__, "agentic", "1 round with fewer batches").parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    warm_up = 1 if options.quick else 2
    steps = {one.name: 4 if options.quick else max(6, one.ahead + 1) for one in CONTENDERS}
    about = machine(["pyzmq", "msgspec", "torch", "aiohttp"])
    results: dict[str, list[Outcome]] = {}
    for number in range(rounds):
        for contender in CONTENDERS:
            print(f"round {number + 1} of {rounds}: {contender.name}", flush=True)
            results.setdefault(contender.name, []).append(
                measure(contender, steps[contender.name], warm_up, 100 + number)
            )
    series = report(results)
    remarks = [
        f"{(AHEAD + 1) * GROUPS * MEMBERS} trajectories in flight, {TURNS} turns of {TURN_TOKENS} tokens on average, "
        f"waits lognormal, mean {WAIT_S:g} s, sigma {SIGMA:g}",
        f"{ENGINES} simulated engines of {SLOTS} slots, a turn takes "
        f"{TURN_TOKENS * SCALE * (A_MS + C_MS * SLOTS) / 1000:.1f} s",
        f"{rounds} rounds of {max(steps.values())} batches of {GROUPS} x {MEMBERS} that are counted "
        f"({min(steps.values())} where slots are kept)",
        about.load,
    ]
    finish(options.output, about, remarks, series)


if __name__ == "__main__":
    main()
