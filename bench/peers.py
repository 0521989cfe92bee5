"""Sluice beside TRL's GRPOTrainer on the same cores, from the same weights, on the same prompts and batches.

    python -m bench.peers [--trl DIRECTORY] [--quick] [--rounds N] [--output FILE]
    python -m bench.peers --plot FILE.png [--rounds N]      accuracy over time of sync and of async with several N

Two-digit sums with the quickstart's model (3 layers, width 96) after its warm start: 32 prompts x 8 rollouts, one
update per batch, learning rate 2e-4, no filter. The contenders take turns, a seed per round. TRL has its best settings
for a CPU: plain generate, no gradient checkpointing, no bfloat16, as many threads as cores. It is installed into the
directory by pip, without its dependencies, which this project's environment has. The bare loop is the floor: our engine
and our trainer in one process on all cores, with a loop around them and nothing between them.

Reported: time per batch after the first ten, and the share of right answers over the last quarter of the batches. With
`--plot`, all of ours and no other: right answers to held-out sums by the weights of every twentieth batch, over the
time at which these weights were there.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.report import QUICKSTART, Series, arguments, finish, launch, machine
from bench.rigs.sums import Sampler, graded, rows_of
from configs.rules.validate import checked_flags
from models.checkpoint import latest_checkpoint
from models.engines.text import TextCodec
from models.train.build import build_backend
from pipeline.record.metrics import read_metrics

PROMPTS, MEMBERS, LR, LONGEST, WARM_UP = 32, 8, 2e-4, 8, 10
SYNC: Final = "sluice, sync"
OURS: Final = {SYNC: ["--mode", "sync"]} | {
    f"sluice, async N={n}": ["--mode", "async", "--async-buffer-size", n] for n in ("1", "2", "4", "8", "auto")
}
TIMED: Final = (SYNC, "sluice, async N=1")
BARE: Final = "bare loop"
HELD_OUT: Final = ["--eval-interval", "20"]  # the recipe names the sums
BATCH: Final = [
    "--warm-start-steps", "0", "--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(MEMBERS), "--lr",
    str(LR), "--num-steps-per-rollout", "1", "filter.dynamic_sampling_filter=[]",
]  # fmt: skip
NOT_HELD_OUT: Final = ["eval.eval_prompt_data=[]", "--eval-interval", "none"]
Figures = tuple[list[float], list[float]]
Curve = list[tuple[float, float]]  # (seconds, accuracy)


def start(home: Path) -> tuple[Path, Path]:
    """The model after the warm start, and the file of prompts."""
    run = home / "start"
    launch(["--mode", "sync", *QUICKSTART, "--num-rollout", "0", "--run-dir", str(run)])
    checkpoint = latest_checkpoint(run / "warm_start" / "checkpoints")
    assert checkpoint is not None, "the warm start saves its model"
    return checkpoint / "hf", next((run / "assets" / "data").glob("*-train.jsonl"))


def ours(name: str, flags: list[str], model: Path, batches: int, seed: int, home: Path) -> tuple[Figures, Curve]:
    """Seconds and share of right answers of each batch; accuracy over time, where it is evaluated."""
    run = home / f"{name.replace(' ', '')}-{seed}"
    flags = [*OURS[name], *QUICKSTART, *BATCH, *flags, "--hf-checkpoint", str(model), "--num-rollout", str(batches)]
    launch([*flags, "--seed", str(seed), "--rollout-seed", str(seed), "--run-dir", str(run)])
    rows = list(read_metrics(run / "metrics.jsonl"))
    steps = [row for row in rows if "perf/step_time" in row]
    ends = [0.0, *(row["wall_s"] for row in steps)]
    curve = [(ends[int(row["eval/version"])], row["eval/sums"]) for row in rows if "eval/sums" in row]
    return ([end - begin for begin, end in pairwise(ends)], [row["reward/mean"] for row in steps]), curve


def train_in_a_bare_loop(model: Path, prompts: Path, batches: int, seed: int) -> Figures:
    """In a process of its own: sample, grade, train, write the weights, load them."""
    flags = ["--mode", "sync", "--config", "quickstart", *BATCH, *NOT_HELD_OUT, "--hf-checkpoint", str(model)]
    config = checked_flags([*flags, "--num-rollout", str(batches), "--seed", str(seed)])
    backend = build_backend(config, batches)
    backend.setup()
    torch.set_num_threads(os.cpu_count() or 1)
    rows = rows_of(prompts, TextCodec.load(model))
    order = np.random.default_rng(seed).integers(0, len(rows), (batches, PROMPTS))

    async def loop() -> Figures:
        ends, right = [time.perf_counter()], list[float]()
        async with Sampler(config.engine, model) as sampler:
            for number, chosen in enumerate(order):
                batch = [rows[place] for place in chosen]
                answers = await sampler.sample(batch, [number * PROMPTS + i for i in range(PROMPTS)], MEMBERS, 1.0)
                sequences, reward = graded(config, batch, answers, number * PROMPTS, number)
                await sampler.train(backend, sequences, number, steps=1)
                right.append(reward)
                ends.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(ends)], right

    return asyncio.run(loop())


def train_with_trl(trl: Path, model: Path, prompts: Path, batches: int, seed: int) -> Figures:
    """In a process of its own, which finds TRL in the directory."""
    sys.path.insert(0, str(trl.resolve()))
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["input"], "label": str(row["label"])} for row in rows])
    ends, rewards = list[float](), list[float]()

    def exact(completions: list[str], label: list[str], **_: Any) -> list[float]:
        ends.append(time.perf_counter())  # it is called once for each step
        found = [float(text.strip() == wanted) for text, wanted in zip(completions, label, strict=True)]
        rewards.append(statistics.fmean(found))
        return found

    config = GRPOConfig(
        output_dir=str(prompts.with_name("trl")), per_device_train_batch_size=PROMPTS * MEMBERS,
        num_generations=MEMBERS, learning_rate=LR, max_completion_length=LONGEST, max_steps=batches, temperature=1.0,
        beta=0.0, bf16=False, use_cpu=True, gradient_checkpointing=False, seed=seed, report_to=[], save_strategy="no",
        logging_steps=1000, lr_scheduler_type="constant", disable_tqdm=True, scale_rewards="none", loss_type="dapo",
    )  # fmt: skip
    trainer = GRPOTrainer(str(model), reward_funcs=[exact], args=config, train_dataset=data)
    trainer.train()
    return [end - begin for begin, end in pairwise(ends)], rewards


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Mean over the seeds of accuracy and of the time at which it was reached, each seed as thin lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5), constrained_layout=True)
    for place, (name, seeds) in enumerate(curves.items()):
        points = np.array([curve[: min(map(len, seeds))] for curve in seeds])  # [seeds, evaluations, 2]
        axis.plot(*points.mean(axis=0).T, color=f"C{place}", label=name, linewidth=1.8)
        for curve in points:
            axis.plot(*curve.T, color=f"C{place}", alpha=0.2, linewidth=0.8)
    axis.set(xlabel="seconds", ylabel="right answers to held-out sums", title=f"{PROMPTS} x {MEMBERS} rollouts a batch")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = arguments(__doc__, "peers", "one round of 30 batches")
    parser.add_argument("--trl", type=Path, help="where TRL is, or is to be installed; without it TRL is left out")
    parser.add_argument(
        "--plot", type=Path, help="accuracy over time of sync and of async with several N, as a picture"
    )
    options = parser.parse_args()
    rounds, batches = options.rounds or (1 if options.quick else 3), 30 if options.quick else 200
    contenders = list(OURS) if options.plot else [*TIMED, BARE, *(["TRL"] if options.trl is not None else [])]
    if options.trl is not None and not (options.trl / "trl").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(options.trl)]
        subprocess.run([*pip, "trl", "jinja2"], check=True)
    about = machine(["torch", "transformers"])
    seconds: dict[str, list[float]] = {}
    right: dict[str, list[float]] = {}
    curves: dict[str, list[Curve]] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as place:
        home = Path(place)
        model, prompts = start(home)
        for seed in range(1, rounds + 1):
            for name in contenders:
                print(f"round {seed} of {rounds}: {name}", flush=True)
                if name in OURS:
                    found, curve = ours(name, HELD_OUT if options.plot else NOT_HELD_OUT, model, batches, seed, home)
                    curves.setdefault(name, []).append(curve)
                else:
                    train = partial(train_with_trl, options.trl) if name == "TRL" else train_in_a_bare_loop
                    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                        found = pool.submit(train, model, prompts, batches, seed).result()
                seconds.setdefault(name, []).append(statistics.median(found[0][WARM_UP:]))
                right.setdefault(name, []).append(statistics.fmean(found[1][-batches // 4 :]))
    setting = f"{PROMPTS} x {MEMBERS} sums"
    series = [Series(setting, name, "ms/batch", [1e3 * value for value in values]) for name, values in seconds.items()]
    series += [
        Series(f"{setting}, last quarter", name, "% right", [100 * value for value in values])
        for name, values in right.items()
    ]
    remarks = [f"{rounds} rounds of {batches} batches, the first {WARM_UP} are not counted", about.load]
    finish(options.output, about, remarks, series, baseline=contenders[0] if options.plot else contenders[-1])
    if options.plot:
        draw(curves, options.plot)


if __name__ == "__main__":
    main()
