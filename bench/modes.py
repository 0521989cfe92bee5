"""Sync against async in one run, on the simulated engine with a long-tailed length distribution.

    python -m bench.modes [--quick] [--rounds N] [--output FILE]

The same graph, data and lengths in both modes; only the gate differs. Reported per mode, over the steps after warm-up:
seconds per rollout batch, the share of the bound, staleness beside Little's law, wasted tokens. Simulated: engines and
trainer take time by a model, everything else (streams, stages, HTTP, weights) is the production code.

    bound of a fixed split   T* = max(W_g, W_t)
                             W_g = generated tokens of a batch * (a + c S) / S / engines
    Little's law             mean staleness at the start of a rollout = (in flight + queued) / B
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from bench.report import Series, arguments, finish, machine
from configs.load import load
from configs.rules.validate import checked
from pipeline.observe.summary import read_summary
from pipeline.record.metrics import read_metrics
from pipeline.run import run

WARM_UP = 3  # rollout batches that are not counted
SLOTS = 32
A_MS, C_MS = 8.0, 0.1
SCALE = 0.1  # of real time
GROUPS, MEMBERS = 8, 8
LENGTH_MEAN, LENGTH_CAP = 400, 3200
ENGINES = 2
CONTENDERS = {  # name -> flags
    "sync": ("--mode", "sync"),
    "async N=2": ("--mode", "async", "--async-buffer-size", "2"),
    "async N=6": ("--mode", "async", "--async-buffer-size", "6"),
}


@dataclass(frozen=True)
class Outcome:
    """One run. Times in (scaled) seconds."""

    step_s: float
    bound_s: float
    staleness: float
    little: float
    staleness_max: float
    wasted: float

    @property
    def of_bound(self) -> float:
        return self.bound_s / self.step_s


def token_s() -> float:
    """Engine seconds per token at full slots, all engines together."""
    return SCALE * (A_MS + C_MS * SLOTS) / SLOTS / 1000 / ENGINES


def flags(mode: str, ratio: float, steps: int, seed: int, run_dir: Path) -> list[str]:
    step_s = ratio * GROUPS * MEMBERS * LENGTH_MEAN * token_s()
    simulated = {
        "a_ms": A_MS, "c_ms": C_MS, "length_mean": LENGTH_MEAN, "length_sigma": 1.0, "length_cap": LENGTH_CAP,
        "update_s": 0.2, "time_scale": SCALE, "vocab_size": 250,
    }  # fmt: skip
    return [
        *CONTENDERS[mode], "--hf-checkpoint", "tiny", "--prompt-data", "arithmetic", "--label-key", "label",
        "--engine", "simulated", "--engine-slots", str(SLOTS), "--scale", f"engine={ENGINES}",
        "--train-backend", "simulated", "--simulated-step-s", f"{step_s:.3f}", "--rm-type", "random:0.5",
        "--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(MEMBERS), "--num-rollout", str(steps),
        "--rollout-max-response-len", str(LENGTH_CAP), "--rollout-max-context-len", str(2 * LENGTH_CAP),
        "--server-concurrency", str(SLOTS * 2), "--seed", str(seed), "--rollout-seed", str(seed), "--no-live",
        "--no-trace", "--no-use-tensorboard", "--log-interval", "1000", "--run-dir", str(run_dir),
        *[f"engine.simulated.{key}={value}" for key, value in simulated.items()],
    ]  # fmt: skip


def completed(name: str, flags: list[str], run_dir: Path) -> list[dict[str, float]]:
    """The rows of all batches of a run in this process. Its output is shown if it fails, which ends the benchmark."""
    loaded = load(flags)
    config, _ = checked(loaded.config, loaded.given)
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = run(config)
    if code != 0:
        sys.exit(f"{name}: exit code {code}\n{output.getvalue()}")
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "perf/step_time" in row]


def measure(mode: str, ratio: float, steps: int, seed: int) -> Outcome:
    """One run in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        run_dir = Path(home) / "run"
        rows = completed(mode, flags(mode, ratio, steps, seed, run_dir), run_dir)
        summary = read_summary(run_dir / "summary.json")
    counted = rows[WARM_UP:]
    tokens = (counted[-1]["trained_tokens"] - counted[0]["trained_tokens"]) / (len(counted) - 1)
    return Outcome(
        step_s=(counted[-1]["wall_s"] - counted[0]["wall_s"]) / (len(counted) - 1),
        bound_s=max(tokens * token_s(), ratio * GROUPS * MEMBERS * LENGTH_MEAN * token_s()),
        staleness=statistics.mean(row["staleness/start_mean"] for row in counted),
        little=statistics.mean(row["ledger/open"] for row in counted) / GROUPS,
        staleness_max=max(row["staleness/max"] for row in counted),
        wasted=summary.wasted_share,
    )


def report(results: dict[tuple[float, str], list[Outcome]]) -> list[Series]:
    """Print the table; return what the JSON file holds."""
    heading = f"{'W_t / W_g':>9} {'mode':>9} {'s/batch':>17} {'of bound':>9}"
    print(f"\n{heading} {'staleness':>10} {'Little':>7} {'max':>4} {'wasted':>7} {'speed-up':>9}")
    series: list[Series] = []
    for (ratio, mode), outcomes in results.items():
        times = [o.step_s for o in outcomes]
        mean = {name: statistics.median(getattr(o, name) for o in outcomes) for name in Outcome.__annotations__}
        share = statistics.median(o.of_bound for o in outcomes)
        base = statistics.median(o.step_s for o in results[ratio, "sync"])
        spread = f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
        print(
            f"{ratio:9.2f} {mode:>9} {spread:>17} {share:9.0%} {mean['staleness']:10.2f} {mean['little']:7.2f} "
            f"{mean['staleness_max']:4.0f} {mean['wasted']:7.1%} {base / statistics.median(times):8.2f}x"
        )
        setting = f"W_t/W_g={ratio:g}"
        series.append(Series(setting, mode, "s/batch", times))
        for name in ("staleness", "little", "staleness_max", "wasted"):
            series.append(Series(setting, mode, name, [float(getattr(o, name)) for o in outcomes]))
        series.append(Series(setting, mode, "share of bound", [o.of_bound for o in outcomes]))
    return series


def main() -> None:
    options = arguments(__doc__, "modes", "1 round with fewer batches").parse_args()
    rounds, steps = options.rounds or (1 if options.quick else 5), 12 if options.quick else 24
    about = machine(["pyzmq", "msgspec", "torch", "aiohttp"])
    results: dict[tuple[float, str], list[Outcome]] = {}
    for number in range(rounds):
        for ratio in (1.0, 0.25):
            for mode in CONTENDERS:
                print(f"round {number + 1} of {rounds}: W_t/W_g = {ratio:g}, {mode}", flush=True)
                results.setdefault((ratio, mode), []).append(measure(mode, ratio, steps, seed=100 + number))
    series = report(results)
    remarks = [
        f"simulated engines and trainer at {SCALE:g} of real time; {ENGINES} engines of {SLOTS} slots, "
        f"{GROUPS} groups of {MEMBERS}, lognormal lengths (mean {LENGTH_MEAN}, sigma 1, cap {LENGTH_CAP})",
        f"{rounds} rounds of {steps} batches, modes alternate, the first {WARM_UP} batches are not counted",
        about.load,
        "speed-up: against sync of the same split (engines and trainer on devices of their own)",
    ]
    finish(options.output, about, remarks, series)


if __name__ == "__main__":
    main()
