"""Does a run that scales itself find the planner's split? A production run with simulated engines and trainer.

    python -m bench.autobalance [--quick] [--reward-s S] [--output FILE]

The planner (`bench/plan_cluster.py`, virtual time) is asked for the best number of engines and of reward replicas for
set times: of a decode step, of grading a rollout (the grader waits, so that it needs no core) and of a trainer's step.
Then the same graph is run three times: from one of each, from one of each with `--autoscale`, and at the planner's
split. Compared are trained rollouts per second over the last batches, when the run that scales itself has stopped.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.plan_stages import Split, best_split, stage_steps
from bench.plan_types import Cluster
from bench.report import Series, arguments, finish, machine
from pipeline.observe.metrics import read_metrics
from pipeline.observe.summary import read_summary

ROOT: Final = Path(__file__).resolve().parent.parent
MOST: Final = {"engine": 6, "reward": 8}
STEP_S: Final = 2.4  # of the trainer
# Times in seconds, lengths in tokens. One engine has 8 slots; a batch is 8 groups of 4 rollouts.
JOB: Final = Cluster(
    engines=1, slots=8, a_s=0.02, c_s=0.0005, prefill_s=0.00002, groups=8, members=4, mean=64.0, sigma=0.5, cap=256,
    staleness=2, update_s=0.05, graders=1, reward_s=0.2, batches=40, warm_up=8,
)  # fmt: skip


class Outcome(msgspec.Struct, frozen=True):
    """Of one run: rollouts per second at its end, what it had then, the changes that it made, and when the last was."""

    rate: float
    split: Split
    changes: int = 0
    settled_step: int = 0


def planned(job: Cluster) -> Cluster:
    """The simulated trainer takes its time by rollouts; the planner's by tokens."""
    return msgspec.structs.replace(job, token_s=STEP_S / (job.groups * job.members * job.mean))


def flags(job: Cluster, batches: int, split: Split, run_dir: Path, window_s: float | None = None) -> list[str]:
    """Of one run. `window_s`: of `--autoscale`, None without it."""
    simulated = {
        "a_ms": 1e3 * job.a_s, "c_ms": 1e3 * job.c_s, "prefill_ms_per_token": 1e3 * job.prefill_s,
        "length_mean": job.mean, "length_sigma": job.sigma, "length_cap": job.cap, "update_s": job.update_s,
        "vocab_size": 250,
    }  # fmt: skip
    scaled = [] if window_s is None else [
        "--autoscale", *(f"{stage}=1..{most}" for stage, most in MOST.items()), "--autoscale-window-s", str(window_s)
    ]  # fmt: skip
    return [
        "--mode", "async", "--async-buffer-size", str(job.staleness), "--hf-checkpoint", "tiny", "--prompt-data",
        "arithmetic", "--label-key", "label", "--engine", "simulated", "--engine-slots", str(job.slots),
        "--scale", f"engine={split[0]}", f"reward={split[1]}", *scaled,
        "--train-backend", "simulated", "--simulated-step-s", str(STEP_S), "--rm-type", f"sleep:{job.reward_s}",
        "--rollout-batch-size", str(job.groups), "--n-samples-per-prompt", str(job.members),
        "--num-rollout", str(batches), "--rollout-max-response-len", str(job.cap),
        "--rollout-max-context-len", str(4 * job.cap), "--seed", "1", "--rollout-seed", "1", "--samples-interval", "0",
        "--no-live", "--no-trace", "--no-use-tensorboard", "--log-interval", "100000", "--run-dir", str(run_dir),
        *[f"engine.simulated.{key}={value:g}" for key, value in simulated.items()],
    ]  # fmt: skip


def measure(job: Cluster, batches: int, counted: int, split: Split, window_s: float | None = None) -> Outcome:
    """One run; its rate over the last `counted` batches. Raises RuntimeError with the end of its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        run_dir = Path(home) / "run"
        command = [sys.executable, "launch.py", *flags(job, batches, split, run_dir, window_s)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
        for line in done.stdout.splitlines():
            if line.startswith("autoscale:"):
                print(f"    {line}", flush=True)
        rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "ledger/trained" in row]
        summary = read_summary(run_dir / "summary.json")
    first, last = rows[-counted - 1], rows[-1]
    groups = last["ledger/trained"] - first["ledger/trained"]
    scaled = {"engine": split[0], "reward": split[1]}
    for change in summary.changes:
        scaled[change.what.rpartition(" ")[2]] = int(change.value)
    return Outcome(
        rate=groups * job.members / (last["wall_s"] - first["wall_s"]),
        split=(scaled["engine"], scaled["reward"]),
        changes=len(summary.changes),
        settled_step=max((change.step for change in summary.changes), default=0),
    )


def report(plan_rate: float, outcomes: Mapping[str, Outcome]) -> list[Series]:
    """Print the table; return what the JSON file holds. `plan_rate`: what the planner says of its split."""
    base = outcomes["the planner's split"].rate
    print(
        f"\n{'':28} {'engines':>7} {'reward':>6} {'rollouts/s':>10} {'of the split':>12} {'changes':>7} {'last at':>8}"
    )
    print(f"{'planner, in virtual time':28} {'':7} {'':6} {plan_rate:10.2f} {plan_rate / base:12.0%}")
    series = [Series("autobalance", "planner", "rollouts/s", [plan_rate])]
    for name, one in outcomes.items():
        when = f"batch {one.settled_step}" if one.changes else ""
        print(
            f"{name:28} {one.split[0]:7} {one.split[1]:6} {one.rate:10.2f} {one.rate / base:12.0%} {one.changes:7} "
            f"{when:>8}"
        )
        note = f"engine={one.split[0]} reward={one.split[1]}"
        series.append(Series("autobalance", name, "rollouts/s", [one.rate], note))
    return series


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "autobalance", "fewer batches, a smaller grid of the planner", rounds="")
    parser.add_argument("--reward-s", type=float, default=JOB.reward_s, help="seconds that grading a rollout takes")
    options = parser.parse_args(argv)
    job = planned(msgspec.structs.replace(JOB, reward_s=options.reward_s))
    about = machine(["pyzmq", "msgspec", "aiohttp"])
    quick = options.quick
    plan = msgspec.structs.replace(job, batches=16) if quick else job
    steps = stage_steps(plan, range(1, MOST["engine"] + 1), range(1, MOST["reward"] + 1))
    split = best_split(steps)
    plan_rate = job.groups * job.members / steps[split]
    print(f"the planner's split: {split[0]} engines, {split[1]} reward replicas", flush=True)
    counted, batches = (12, 24) if quick else (30, 45)
    outcomes = {}
    for name, start, own, window_s in (
        ("the planner's split", split, batches, None),
        ("one of each", (1, 1), counted // 3 + 4, None),
        ("one of each, --autoscale", (1, 1), (45 if quick else 90) + counted, 10.0),
    ):
        print(f"{name}: {own} batches", flush=True)
        outcomes[name] = measure(job, own, min(counted, own - 4), start, window_s)
    remarks = [
        f"job: {msgspec.json.encode(job).decode()}, a trainer's step of {STEP_S} s; limits 1..6 engines, 1..8 replicas",
        "one run for each line (indicative); engines, trainer and grader take set times, all else is what runs",
        about.load,
    ]
    finish(options.output, about, remarks, report(plan_rate, outcomes))


if __name__ == "__main__":
    main()
