"""Sluice beside TRL's GRPOTrainer on the same cores, from the same weights, on the same prompts and batches.

    python -m bench.peers [--trl DIRECTORY] [--quick] [--rounds N] [--output FILE]

Two-digit sums with the quickstart's model (3 layers, width 96) after its warm start: 32 prompts x 8 rollouts, one
update per batch, learning rate 2e-4, no filter. The contenders take turns, a seed per round. TRL has its best settings
for a CPU: plain generate, no gradient checkpointing, no bfloat16, as many threads as cores. It is installed into the
directory by pip, without its dependencies, which this project's environment has.

Reported: seconds per batch after the first ten, and the share of right answers over the last quarter of the batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.report import Series, arguments, finish, machine
from models.checkpoint import latest_checkpoint
from pipeline.record.metrics import read_metrics

ROOT: Final = Path(__file__).resolve().parent.parent
PROMPTS, MEMBERS, LR, LONGEST, WARM_UP = 32, 8, 2e-4, 8, 10
OURS: Final = ("sluice, sync", "sluice, async N=1")
FLAGS: Final = [
    "--config", "quickstart", "--no-live", "--no-trace", "--no-use-tensorboard", "--no-use-plot",
]  # fmt: skip
BATCH: Final = [
    "--warm-start-steps", "0", "--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(MEMBERS), "--lr",
    str(LR), "--num-steps-per-rollout", "1", "filter.dynamic_sampling_filter=[]", "eval.eval_prompt_data=[]",
    "--eval-interval", "none",
]  # fmt: skip


def start(home: Path) -> tuple[Path, Path]:
    """The model after the warm start, and the file of prompts."""
    run = home / "start"
    _launch(["--mode", "sync", *FLAGS, "--num-rollout", "0", "--run-dir", str(run)])
    checkpoint = latest_checkpoint(run / "warm_start" / "checkpoints")
    assert checkpoint is not None, "the warm start saves its model"
    return checkpoint / "hf", next((run / "assets" / "data").glob("*-train.jsonl"))


def _launch(flags: list[str]) -> None:
    done = subprocess.run([sys.executable, "launch.py", *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"launch.py {' '.join(flags)}: exit code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )


def ours(mode: str, model: Path, batches: int, seed: int, home: Path) -> tuple[list[float], list[float]]:
    """Seconds and share of right answers of each batch."""
    run = home / f"{mode.partition(', ')[2].partition(' ')[0]}-{seed}"
    flags = ["--mode", "sync"] if mode.endswith("sync") and "async" not in mode else ["--mode", "async"]
    flags += [*FLAGS, *BATCH, "--hf-checkpoint", str(model), "--num-rollout", str(batches), "--seed", str(seed)]
    _launch([*flags, "--rollout-seed", str(seed), "--run-dir", str(run)])
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "perf/step_time" in row]
    ends = [0.0, *(row["wall_s"] for row in rows)]
    return [end - begin for begin, end in pairwise(ends)], [row["reward/mean"] for row in rows]


def trl(site: Path, model: Path, prompts: Path, batches: int, seed: int, home: Path) -> tuple[list[float], list[float]]:
    """The same of TRL, in a process of its own."""
    result = home / f"trl-{seed}.json"
    given = {"model": str(model), "prompts": str(prompts), "batches": batches, "seed": seed, "result": str(result)}
    environment = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": str(os.cpu_count())}
    command = [sys.executable, "-m", "bench.peers", "--child", json.dumps(given)]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"TRL: exit code {done.returncode}\n{done.stderr[-3000:]}")
    seconds, rewards = json.loads(result.read_text())
    return seconds, rewards


def train_with_trl(given: dict[str, Any]) -> None:
    """In TRL's process."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in Path(given["prompts"]).read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["input"], "label": str(row["label"])} for row in rows])
    ends, rewards = list[float](), list[float]()

    def exact(completions: list[str], label: list[str], **_: Any) -> list[float]:
        ends.append(time.perf_counter())  # it is called once for each step
        found = [float(text.strip() == wanted) for text, wanted in zip(completions, label, strict=True)]
        rewards.append(statistics.fmean(found))
        return found

    config = GRPOConfig(
        output_dir="trl", per_device_train_batch_size=PROMPTS * MEMBERS, num_generations=MEMBERS, learning_rate=LR,
        max_completion_length=LONGEST, max_steps=given["batches"], temperature=1.0, beta=0.0, bf16=False, use_cpu=True,
        gradient_checkpointing=False, seed=given["seed"], report_to=[], save_strategy="no", logging_steps=1000,
        lr_scheduler_type="constant", disable_tqdm=True, scale_rewards="none", loss_type="dapo",
    )  # fmt: skip
    trainer = GRPOTrainer(given["model"], reward_funcs=[exact], args=config, train_dataset=data)
    trainer.train()
    seconds = [end - begin for begin, end in pairwise(ends)]
    Path(given["result"]).write_text(json.dumps([seconds, rewards]))


def main() -> None:
    parser = arguments(__doc__, "peers", "one round of 30 batches")
    parser.add_argument("--trl", type=Path, help="where TRL is, or is to be installed; without it TRL is left out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train_with_trl(json.loads(options.child))
        return
    rounds, batches = options.rounds or (1 if options.quick else 3), 30 if options.quick else 200
    if options.trl is not None and not (options.trl / "trl").is_dir():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(options.trl),
            "trl",
            "jinja2",
        ]
        subprocess.run(pip, check=True)
    about = machine(["torch", "transformers"])
    seconds: dict[str, list[float]] = {}
    right: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as place:
        home = Path(place)
        model, prompts = start(home)
        for seed in range(1, rounds + 1):
            for name in (*OURS, *(["TRL"] if options.trl is not None else [])):
                print(f"round {seed} of {rounds}: {name}", flush=True)
                if name == "TRL":
                    found = trl(options.trl.resolve(), model, prompts, batches, seed, home)
                else:
                    found = ours(name, model, batches, seed, home)
                seconds.setdefault(name, []).append(statistics.median(found[0][WARM_UP:]))
                right.setdefault(name, []).append(statistics.fmean(found[1][-batches // 4 :]))
    setting = f"{PROMPTS} x {MEMBERS} sums"
    series = [Series(setting, name, "s/batch", values) for name, values in seconds.items()]
    series += [Series(setting, name, "right, last quarter", values) for name, values in right.items()]
    remarks = [f"{rounds} rounds of {batches} batches, the first {WARM_UP} are not counted", about.load]
    finish(options.output, about, remarks, series, baseline="TRL" if options.trl is not None else OURS[0])


if __name__ == "__main__":
    main()
