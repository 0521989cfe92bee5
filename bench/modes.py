"""Goodput of sync and of async with several N, on simulated engines with a long-tailed length distribution.

    python -m bench.modes [--quick] [--rounds N] [--output FILE]

The same graph, data and lengths in all modes; only the gate differs. Engines and trainer take time by a model;
everything else (streams, stages, HTTP, weights) is the production code. Reported over the batches after the warm-up and
before the last admissions: seconds per batch, goodput beside what is attainable with this N, staleness, wasted tokens.

    goodput      trained tokens * (a + c S) / S / engines / time      share of what full slots make
    attainable   configs/plan/goodput.py: the same world without any overhead
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from msgspec.structs import replace

from bench.report import SIMULATED, Series, arguments, finish, machine
from configs.plan.goodput import attainable, planned_workload
from configs.rules.validate import checked_flags
from pipeline.observe.summary import read_summary
from pipeline.record.metrics import read_metrics
from pipeline.run import run

WARM_UP = 10  # rollout batches that are not counted: with N = 8 it takes so many to fill the buffer
SLOTS = 32
A_MS, C_MS = 8.0, 0.1
SCALE = 0.1  # of real time
GROUPS, MEMBERS = 8, 8
LENGTH_MEAN, LENGTH_CAP = 400, 3200
ENGINES = 2
RATIOS = (1.0, 0.5, 0.25)
BUFFERS = ("0", "1", "2", "4", "6", "8", "auto")


def token_s() -> float:
    """Engine seconds per token at full slots, all engines together."""
    return SCALE * (A_MS + C_MS * SLOTS) / SLOTS / 1000 / ENGINES


def flags(buffer: str, ratio: float, steps: int, seed: int, run_dir: Path) -> list[str]:
    step_s = ratio * GROUPS * MEMBERS * LENGTH_MEAN * token_s()
    mode = ["--mode", "sync"] if buffer == "0" else ["--mode", "async", "--async-buffer-size", buffer]
    simulated = {
        "a_ms": A_MS, "c_ms": C_MS, "length_mean": LENGTH_MEAN, "length_sigma": 1.0, "length_cap": LENGTH_CAP,
        "prepare_s": 0.2, "update_s": 0.002,  # as the embedded engine takes 1 GB
        "time_scale": SCALE, "vocab_size": 250,
    }  # fmt: skip
    return [
        *SIMULATED, *mode, "--hf-checkpoint", "tiny", "--engine-slots", str(SLOTS), "--scale", f"engine={ENGINES}",
        "--simulated-step-s", f"{step_s:.3f}",
        "--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(MEMBERS), "--num-rollout", str(steps),
        "--rollout-max-response-len", str(LENGTH_CAP), "--rollout-max-context-len", str(2 * LENGTH_CAP),
        "--server-concurrency", str(SLOTS * 2), "--seed", str(seed), "--rollout-seed", str(seed),
        "--no-trace", "--no-use-tensorboard", "--run-dir", str(run_dir),
        *[f"engine.simulated.{key}={value}" for key, value in simulated.items()],
    ]  # fmt: skip


def measure(buffer: str, ratio: float, steps: int, seed: int) -> dict[str, float]:
    """One run of `steps` counted batches, in this process. If it fails, its output is shown and the benchmark ends.

    Figures by name; times in (scaled) seconds.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        run_dir = Path(home) / "run"
        last = 8 if buffer == "auto" else int(buffer)  # batches for which nothing new is admitted
        config = checked_flags(flags(buffer, ratio, WARM_UP + steps + last, seed, run_dir))
        output = StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            code = run(config)
        if code != 0:
            sys.exit(f"N={buffer}: exit code {code}\n{output.getvalue()}")
        rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "perf/step_time" in row]
        summary = read_summary(run_dir / "summary.json")
    counted = rows[WARM_UP - 1 : WARM_UP + steps]
    seconds = counted[-1]["wall_s"] - counted[0]["wall_s"]
    tokens = counted[-1]["trained_tokens"] - counted[0]["trained_tokens"]
    work = planned_workload(config)
    work = replace(work, train_ratio=ratio * LENGTH_MEAN / statistics.fmean(work.lengths))
    bound = config.asynchrony.max_staleness or 0
    goodput, best = tokens * token_s() / seconds, attainable(work, bound).goodput
    return {
        "s/batch": seconds / (len(counted) - 1),
        "goodput": goodput,
        "attainable": best,
        "of attainable": goodput / best,
        "staleness": statistics.mean(row["staleness/mean"] for row in counted),
        "staleness, max": max(row["staleness/max"] for row in counted),
        "% wasted": 100 * summary.wasted_share,
    }


def main() -> None:
    options = arguments(__doc__, "modes", "1 round of fewer batches, sync, N = 4 and auto at one ratio").parse_args()
    rounds, steps = options.rounds or (1 if options.quick else 3), 8 if options.quick else 24
    about = machine(["pyzmq", "msgspec", "torch", "aiohttp"])
    results: dict[tuple[float, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        for ratio in RATIOS[:1] if options.quick else RATIOS:
            for buffer in BUFFERS[::3] if options.quick else BUFFERS:
                print(f"round {number + 1} of {rounds}: W_t/W_g = {ratio:g}, N = {buffer}", flush=True)
                results.setdefault((ratio, buffer), []).append(measure(buffer, ratio, steps, seed=100 + number))
    series: list[Series] = []
    for (ratio, buffer), outcomes in results.items():
        place, sync_s = (f"W_t/W_g={ratio:g}", f"N={buffer}"), [one["s/batch"] for one in results[ratio, "0"]]
        for one in outcomes:
            one["speed-up"] = statistics.median(sync_s) / one["s/batch"]
        series += [Series(*place, unit, [one[unit] for one in outcomes]) for unit in outcomes[0]]
    remarks = [
        f"simulated engines and trainer at {SCALE:g} of real time; {ENGINES} engines of {SLOTS} slots, "
        f"{GROUPS} groups of {MEMBERS}, lognormal lengths (mean {LENGTH_MEAN}, sigma 1, cap {LENGTH_CAP})",
        f"{rounds} rounds of {steps} batches, the modes alternate, the first {WARM_UP} batches are not counted",
        about.load,
        "speed-up in batches per second: against sync of the same split (engines and trainer on devices of their own)",
    ]
    finish(options.output, about, remarks, series)


if __name__ == "__main__":
    main()
