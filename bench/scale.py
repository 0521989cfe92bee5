"""What the control plane costs per rollout as a run grows: more in flight, and more replicas of its stages.

    python -m bench.scale [--quick] [--in-flight 100 1000 10000] [--replicas 1 4 16]

Whole production runs (controller, stages, hubs, HTTP, journal) on the simulated engine and trainer, whose time is set
and which compute nothing. Over the batches behind the warm-up it counts, in all processes of the run together: CPU
seconds, wake-ups (voluntary context switches of all threads) and rollouts that ended. Each is given per rollout, and as
a ratio to the smallest run of its series. `--in-flight 100000` and `--replicas 64` want minutes and GB of memory.

CPU seconds include the simulated engine and the bookkeeping of tokens, a fixed cost of each rollout.
A replica also costs CPU while it waits (figures twice a second, beats), so a run that takes longer for its
rollouts costs more of it.

CPU seconds and wake-ups are those of a process and all its descendants.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from bench.report import ROOT, SIMULATED, Series, arguments, finish, machine


class Usage(msgspec.Struct, frozen=True):
    """Of a tree of processes at one moment, since each of them began; what has ended is not in it."""

    at_s: float
    cpu_s: float
    wakeups: int  # voluntary context switches of all threads: each ended a wait
    by_process: dict[int, tuple[str, float]]  # process -> its name and CPU seconds


def usage(root: int) -> Usage:
    """Of `root` and all its descendants, as they are now."""
    parent = psutil.Process(root)
    by_process, wakeups = dict[int, tuple[str, float]](), 0
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it has just ended
            times = process.cpu_times()
            by_process[process.pid] = (_name(process.cmdline()), times.user + times.system)
            wakeups += sum(_waits(thread) for thread in Path("/proc", str(process.pid), "task").iterdir())
    return Usage(time.monotonic(), sum(seconds for _, seconds in by_process.values()), wakeups, by_process)


def _waits(thread: Path) -> int:
    """Voluntary context switches of one thread: psutil counts those of a process's first thread only."""
    lines = (thread / "status").read_text().splitlines()
    return next(int(line.rpartition(":")[2]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def _name(words: Sequence[str]) -> str:
    """A stage's name, `engine`, or `controller`, from a command line."""
    for word in reversed(words):
        stage, dash, number = word.rpartition("-")
        if dash and number.isdigit() and stage.isalpha():
            return stage
    if any("models.engines.serve" in word for word in words):
        return "engine"
    return "controller" if "launch.py" in words else "other"


MEMBERS: Final = 8
WARM_UP, COUNTED = 2, 4  # batches
LEAST_ROLLOUTS: Final = 1500
LENGTH: Final = 64
STAGES: Final = ("generate", "reward", "group")
CPU, WOKEN = "CPU ms a rollout", "wake-ups a rollout"
POLL_S: Final = 0.1


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `in_flight`: rollouts, by the gate; `replicas`: of generate, reward and group each."""

    in_flight: int
    replicas: int

    @property
    def groups(self) -> int:
        """Of a batch: twice as many are in flight."""
        return max(1, self.in_flight // MEMBERS // 2)

    @property
    def batches(self) -> int:
        """Small batches are many, so that there is something to count."""
        return max(3 if self.in_flight > 50_000 else COUNTED, LEAST_ROLLOUTS // (self.groups * MEMBERS))


def flags(point: Point) -> list[str]:
    """The engine is never short of slots, and takes a third of a second for a rollout."""
    simulated = {
        "a_ms": 5, "c_ms": 0, "length_mean": LENGTH, "length_sigma": 0.5, "length_cap": 4 * LENGTH, "update_s": 0.05,
        "vocab_size": 250,
    }  # fmt: skip
    scale = [f"{stage}={point.replicas}" for stage in STAGES]
    return [
        *SIMULATED, "--mode", "async", "--async-buffer-size", "1", "--hf-checkpoint", "tiny",
        "--engine-slots", str(point.in_flight), "--server-concurrency", str(point.in_flight),
        *(part for text in ("engine=1", *scale) for part in ("--scale", text)), "--simulated-step-s", "0.01",
        "--rollout-batch-size", str(point.groups), "--n-samples-per-prompt", str(MEMBERS),
        "--num-rollout", str(WARM_UP + point.batches), "--rollout-max-response-len", str(4 * LENGTH),
        "--rollout-max-context-len", str(8 * LENGTH), "--seed", "1", "--rollout-seed", "1", "--samples-interval", "0",
        "--no-trace", "--no-use-tensorboard",
        *[f"engine.simulated.{key}={value}" for key, value in simulated.items()],
    ]  # fmt: skip


def measure(point: Point) -> dict[str, float]:
    """By unit, and by process: CPU milliseconds for each rollout."""
    looks = watched(flags(point), before=WARM_UP + point.batches)
    (_, began, before), (_, ended, after) = next(look for look in looks if look[0] >= WARM_UP), looks[-1]
    rollouts = ended - began
    return {
        CPU: 1e3 * (after.cpu_s - before.cpu_s) / rollouts,
        WOKEN: (after.wakeups - before.wakeups) / rollouts,
        "rollouts": rollouts,
        "seconds": after.at_s - before.at_s,
        **by_name(before, after, rollouts),
    }


def watched(flags: Sequence[str], before: int) -> list[tuple[int, int, Usage]]:
    """(Step, rollouts that have ended, usage) of a run as it writes its rows, up to the step `before`.

    Ends the benchmark with the end of the run's output if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as home:
        run_dir, log = Path(home) / "run", Path(home) / "log"
        argv = [sys.executable, "launch.py", *flags, "--run-dir", str(run_dir)]
        with log.open("wb") as output:
            child = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output)
        try:
            rows = steps(run_dir / "metrics.jsonl", child)
            looks = [(step, ended, usage(child.pid)) for step, ended in rows if step < before]
        finally:
            child.terminate()  # of no effect on a run that has ended
            child.wait()
        if child.returncode != 0 or len(looks) < 2:
            sys.exit(f"exit code {child.returncode}\n{log.read_text()[-4000:]}")
    return looks


def by_name(before: Usage, after: Usage, pieces: int) -> dict[str, float]:
    """CPU milliseconds for each of so many pieces of work, of the processes of one name together."""
    found: dict[str, float] = {}
    for pid, (name, cpu_s) in after.by_process.items():
        spent = cpu_s - before.by_process.get(pid, (name, 0.0))[1]
        found[name] = found.get(name, 0.0) + 1e3 * spent / pieces
    return found


def steps(metrics: Path, child: subprocess.Popen[bytes]) -> Iterator[tuple[int, int]]:
    """(step, rollouts that have ended) as the run writes its rows; ends with the run."""
    seen = 0
    while True:
        over = child.poll() is not None
        lines = metrics.read_bytes().splitlines() if metrics.exists() else []
        if len(lines) > seen:
            seen = len(lines)
            row: Mapping[str, float] = msgspec.json.decode(lines[-1])
            ended = sum(row.get(f"ledger/{end}", 0) for end in ("trained", "stale", "filtered", "failed", "discarded"))
            yield int(row["step"]), int(ended) * MEMBERS
        if over:
            return
        time.sleep(POLL_S)


def report(costs: Mapping[Point, Mapping[str, float]]) -> list[Series]:
    """By rollouts in flight with the fewest replicas, and by replicas with as many in flight; ratios are to the
    smallest run of each."""
    series: list[Series] = []
    least = min(point.replicas for point in costs)
    narrow = [point for point in costs if point.replicas == least]
    common = max((point.in_flight for point in costs if point.replicas != least), default=0)
    wide = [point for point in costs if point.in_flight == common]
    for title, points in (("in flight", narrow), ("replicas of generate, reward and group each", wide)):
        for point in points if len(points) > 1 else ():
            ratios = {f"{unit}, by the smallest": costs[point][unit] / costs[points[0]][unit] for unit in (CPU, WOKEN)}
            name = f"{point.in_flight:,} x {point.replicas}"
            series += [Series(title, name, unit, [value]) for unit, value in {**ratios, **costs[point]}.items()]
    return series


def points(in_flight: Sequence[int], replicas: Sequence[int], wide: int) -> list[Point]:
    """Each number in flight with the fewest replicas, and each number of replicas with `wide` in flight."""
    least = min(replicas)
    found = [Point(in_flight=n, replicas=least) for n in sorted(in_flight)]
    found += [Point(in_flight=wide, replicas=r) for r in sorted(replicas) if len(replicas) > 1]
    return list(dict.fromkeys(found))


def main() -> None:
    parser = arguments(__doc__, "scale", "100 and 1,000 in flight, 1 and 2 replicas", rounds="")
    parser.add_argument("--in-flight", type=int, nargs="+", default=None, help="default 100 1000 10000")
    parser.add_argument("--replicas", type=int, nargs="+", default=None, help="default 1 4 16")
    parser.add_argument("--wide", type=int, default=1000, help="rollouts in flight where replicas are compared")
    options = parser.parse_args()
    in_flight = options.in_flight or ([100, 1000] if options.quick else [100, 1000, 10_000])
    replicas = options.replicas or ([1, 2] if options.quick else [1, 4, 16])
    about = machine(["pyzmq", "msgspec", "aiohttp"])
    costs: dict[Point, dict[str, float]] = {}
    for point in points(in_flight, replicas, options.wide):
        print(f"{point.in_flight:,} in flight, {point.replicas} replicas of each stage", flush=True)
        costs[point] = measure(point)
    series = report(costs)
    remarks = [
        f"groups of {MEMBERS}, {LENGTH} tokens each on average; {WARM_UP} batches of warm-up are not counted; one run "
        "for each figure (indicative)",
        about.load,
    ]
    finish(options.output, about, remarks, series)


if __name__ == "__main__":
    main()
