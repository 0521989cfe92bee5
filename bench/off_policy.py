"""Do off-policy corrections matter? Contenders on one task, one staleness, one engine precision, several seeds.

    python -m bench.off_policy                     5 seeds x all contenders, about half an hour on 2 cores
    python -m bench.off_policy --quick             1 seed, few batches: whether everything runs

Each contender is a list of flags as a user would write them, and trains the tiny arithmetic model from the same warm
start of its seed, with tokens exactly `--staleness` versions old, sampled by an engine that computes in bfloat16 while
the trainer computes in float32. Every batch is trained in two optimizer steps, so that ratio and weight differ.
Reward is what the newest weights earn at temperature 1 on 32 prompts x 8 rollouts; held-out is greedy on 256 prompts.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench.off_policy_run import Curves, Task, measure
from bench.report import Series, arguments, finish, machine, print_table

COMMON = (
    "--num-steps-per-rollout", "2", "--lr", "6e-5", "--lr-warmup-iters", "20", "--engine-dtype", "bfloat16",
)  # fmt: skip
CONTENDERS: dict[str, tuple[str, ...]] = {
    "none (forced)": ("--allow-uncorrected",),
    "TIS": ("--use-tis", "--tis-clip", "2"),
    "IcePop": ("--use-tis", "--tis-mode", "icepop", "--tis-clip-low", "0.5", "--tis-clip", "2"),
    "decoupled PPO": ("--use-tis", "--tis-clip", "5"),
    "decoupled, log-linear": ("--use-tis", "--tis-clip", "5", "--prox", "loglinear"),
    "bypass PPO": ("--use-rollout-logprobs",),
    "GSPO": ("--advantage-estimator", "gspo", "--use-rollout-logprobs", "--eps-clip", "0.2"),
    "CISPO": ("--advantage-estimator", "cispo", "--use-rollout-logprobs", "--eps-clip", "1", "--eps-clip-high", "4"),
}
NO_STALENESS = "on-policy TIS"  # what the same flags reach without any staleness: the ceiling
LAST = 20  # batches whose mean reward is a run's result


def one_seed(seed: int, batches: int, staleness: int, names: Sequence[str]) -> dict[str, Curves]:
    """All contenders from the warm start of one seed, one after the other, on one core."""
    curves = {}
    with tempfile.TemporaryDirectory(prefix="sluice-off-policy-") as home:
        task = Task(Path(home), seed)
        for name in names:
            age = 0 if name == NO_STALENESS else staleness
            flags = (*COMMON, *CONTENDERS.get(name, CONTENDERS["TIS"]))
            curves[name] = measure(task, flags, batches=batches, staleness=age, seed=seed)
            last = statistics.mean(curves[name].reward[-LAST:])
            print(f"seed {seed}: {name}: reward of the last {LAST} batches {last:.3f}", flush=True)
    return curves


def series_of(results: dict[str, list[Curves]], staleness: int) -> list[Series]:
    """Results per run, in per cent so that a table of whole numbers shows them."""
    setting = f"staleness {staleness}, bfloat16 engine"
    out = []
    for name, runs in results.items():
        out.append(Series(f"{setting}: reward, last {LAST} batches", name, "%", [100 * last(run) for run in runs]))
    for name, runs in results.items():
        best = [100 * run.held_out[-1][1] for run in runs]
        out.append(Series(f"{setting}: held-out greedy accuracy at the end", name, "%", best))
    for name, runs in results.items():
        share = [100 * tail(run.ess) for run in runs]
        out.append(Series(f"{setting}: effective sample size of theta / mu, second half", name, "%", share))
    for name, runs in results.items():
        kl = [1e4 * tail(run.kl) for run in runs]
        out.append(Series(f"{setting}: KL of mu to theta (k3), second half", name, "1e-4 nats", kl))
    return out


def last(run: Curves) -> float:
    return statistics.mean(run.reward[-LAST:])


def tail(values: Sequence[float]) -> float:
    """Median over the second half of a run."""
    return statistics.median(values[len(values) // 2 :])


def smooth(values: Sequence[float], width: int = 10) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Mean of the last `width` entries at each place."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, dtype=np.float64)]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    means: np.ndarray[tuple[int], np.dtype[np.float64]] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def draw(results: dict[str, list[Curves]], path: Path, title: str) -> None:
    """Mean over the seeds with the range between the worst and the best, in three panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), constrained_layout=True)
    colours = dict(zip(results, plt.get_cmap("tab10").colors, strict=False))
    for name, runs in results.items():
        for axis, values in (
            (axes[0], [smooth(run.reward) for run in runs]),
            (axes[1], [smooth(run.ess) for run in runs]),
            (axes[2], [smooth(run.kl) for run in runs]),
        ):
            stacked = np.stack(values)
            style = "--" if name == NO_STALENESS else "-"
            axis.plot(stacked.mean(axis=0), style, color=colours[name], label=name, linewidth=1.6)
            axis.fill_between(
                range(stacked.shape[1]), stacked.min(axis=0), stacked.max(axis=0), color=colours[name], alpha=0.08
            )
    for axis, label in zip(
        axes,
        ("reward of the newest weights", "effective sample size of theta / mu", "KL(mu, theta), k3, nats"),
        strict=True,
    ):
        axis.set_xlabel("rollout batch")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.25)
    axes[2].set_yscale("log")
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = arguments(__doc__, "off_policy", "1 seed and few batches", rounds="")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=None, help="names of contenders")
    parser.add_argument("--workers", type=int, default=2, help="seeds at one time")
    parser.add_argument("--plot", type=Path, default=Path("bench_results/off_policy.png"))
    options = parser.parse_args()
    seeds, batches = options.seeds or (1 if options.quick else 5), options.batches or (30 if options.quick else 200)
    names = options.only or [*CONTENDERS, NO_STALENESS]
    about = machine(["torch", "transformers"])
    with ProcessPoolExecutor(min(options.workers, seeds), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(one_seed, seed, batches, options.staleness, names) for seed in range(1, seeds + 1)]
        per_seed = [job.result() for job in jobs]
    results = {name: [found[name] for found in per_seed] for name in names}
    series = series_of(results, options.staleness)
    print_table(series, baseline="none (forced)")
    remarks = [
        f"{seeds} seeds, {batches} batches of 32 prompts x 8 rollouts, two optimizer steps each",
        f"all: {' '.join(COMMON)}",
        *[f"{name}: {' '.join(CONTENDERS.get(name, CONTENDERS['TIS']))}" for name in names],
        "a seed fixes warm start, prompts and sampling noise, and is the same for all contenders",
    ]
    finish(options.output, about, remarks, series)
    title = f"Staleness {options.staleness}, engine in bfloat16, trainer in float32; mean and range of {seeds} seeds"
    draw(results, options.plot, title)
    print(f"and {options.plot}")


if __name__ == "__main__":
    main()
