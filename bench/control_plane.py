"""CPU of each process and wake-ups per batch, a process for each stage and chained: `python -m bench.control_plane`.

The production graph with simulated engine and trainer, which compute nothing: what is left is messages, requests and
books. Batches of 32 groups of 8 rollouts. Both contenders alternate; the first tenth of the batches is not counted, and
neither are the starts of processes.
"""

from __future__ import annotations

import os

from bench.report import SIMULATED, Series, arguments, finish, machine
from bench.scale import by_name, watched

APART = "a process for each stage"
CONTENDERS = {APART: ["--chain", "none"], "chained": []}
FLAGS = [
    *SIMULATED, "--mode", "async", "--hf-checkpoint", "tiny-arithmetic", "--rollout-batch-size", "32",
    "--n-samples-per-prompt", "8", "--rollout-max-response-len", "32", "engine.simulated.vocab_size=32",
    "engine.simulated.length_mean=8", "--simulated-step-s", "0.05",
]  # fmt: skip


def measure(flags: list[str], batches: int) -> dict[tuple[str, str], float]:
    """By (process, unit): CPU-ms per batch, their sum as `all`, and how often their threads were woken."""
    looks = watched([*FLAGS, *flags, "--num-rollout", str(batches)], before=batches)
    (first, _, before), (last, _, after) = next(look for look in looks if look[0] >= batches // 10), looks[-1]
    spent = by_name(before, after, last - first)
    spent["all"] = sum(spent.values())
    woken = (after.wakeups - before.wakeups) / (last - first)
    return {(name, "CPU-ms/batch"): value for name, value in spent.items()} | {("threads", "wake-ups/batch"): woken}


def main() -> None:
    options = arguments(__doc__, "control_plane", "1 round of 40 batches").parse_args()
    rounds, batches = options.rounds or (1 if options.quick else 5), 40 if options.quick else 120
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    about = machine(["pyzmq", "msgspec", "aiohttp"])
    found: dict[tuple[str, str, str], list[float]] = {}
    for number in range(rounds):
        for name, flags in CONTENDERS.items():
            print(f"round {number + 1} of {rounds}: {name}", flush=True)
            for (process, unit), value in measure(flags, batches).items():
                found.setdefault((process, name, unit), []).append(value)
    series = [Series(process, name, unit, values) for (process, name, unit), values in sorted(found.items())]
    remarks = [f"{rounds} rounds of {batches} batches of 32 groups of 8 rollouts, alternating", about.load]
    finish(options.output, about, remarks, series, baseline=APART)


if __name__ == "__main__":
    main()
