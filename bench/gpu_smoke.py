"""Everything that a GPU can show within nine minutes: `make gpu-smoke`, or `python -m bench.gpu_smoke`.

Each check runs in a process of its own with a time limit; what fails or is missing is named, and the next check begins.
Written: gpu_smoke.json (all figures) and gpu_smoke.txt (one page of text, also printed), to send to us. Models have the
shapes of Qwen3 with random weights, so nothing is downloaded. Without a GPU the same checks run on small models, which
tests them and says nothing about speed.

    engine      the embedded engine on the device: tokens/s, log-probs against a float32 forward on the CPU
    log_probs   error of the trainer's log-probs from bfloat16 hidden states, against float64
    train       torch, FSDP and Megatron trainers: tokens/s, MFU, memory beside the planner's estimate (bench.train)
    quickstart  a short run on the device: seconds per batch, time of updates, difference between engine and trainer
    compare     sync against async on the same run (launch.py compare)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch

from bench.report import QUICKSTART, ROOT, Machine, launch, machine
from bench.rigs.sums import Row, Sampler
from bench.rigs.train_work import importable, make_checkpoint, model_config
from configs.load import load
from configs.plan.memory import trainer_memory
from configs.resolve import resolve
from configs.schema import EngineConfig
from configs.schema.model_shapes import read_shape
from models.engines.core import Completion
from pipeline.observe.summary import read_summary
from pipeline.record.metrics import read_metrics

LIMIT_S: Final = 520.0  # of all checks together
# In the order of their worth, with the seconds that each may take.
CHECKS: Final = {"engine": 90, "log_probs": 60, "train 0.6B": 110, "quickstart": 120, "compare": 130, "train 4B": 150}
OPTIONAL: Final = ("flash_attn", "transformer_engine", "megatron.core", "sglang", "ray")
# A model after so short a warm start is hardly ever right: the recipe's filter would throw away 19 of 20 groups.
SHORT: Final = ["--warm-start-steps", "60", "filter.dynamic_sampling_filter=[]"]


class Outcome(msgspec.Struct, frozen=True):
    """Of one check. `figures`: by name, with their unit in it; `failure`: why there are none."""

    check: str
    seconds: float
    figures: dict[str, Any] = {}
    failure: str = ""


class Document(msgspec.Struct, frozen=True):
    machine: Machine
    device: str
    missing: list[str]
    outcomes: list[Outcome]


def engine(device: str, home: Path) -> dict[str, Any]:
    """64 requests of 128 tokens, and the same tokens through the model of transformers."""
    from transformers import AutoModelForCausalLM

    from models.tiny import make_tiny_checkpoint

    size = "0.6B" if device == "cuda" else "quick"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if device == "cuda" else "float32"
    make_checkpoint(home / "model", size, device)
    for file in make_tiny_checkpoint(home / "tokenizer").glob("*token*"):
        (home / "model" / file.name).write_bytes(file.read_bytes())
    config = EngineConfig(engine_device=device, engine_dtype=dtype, engine_slots=64)
    rows = [Row(prompt, ()) for prompt in np.random.default_rng(1).integers(0, 1000, (64, 64), dtype=np.int32)]

    async def answers() -> tuple[list[Completion], float]:
        async with Sampler(config, home / "model", max_context=512) as sampler:
            started = time.perf_counter()
            return await sampler.sample(rows, range(64), 1, 1.0, exactly=128), time.perf_counter() - started

    requests, took_s = asyncio.run(answers())
    made = sum(len(one.output_ids) for one in requests)
    model = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32).eval()
    differences = []
    for request in requests[:8]:
        ids = torch.tensor([[*request.prompt.tolist(), *request.output_ids]])
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        wanted = scores.gather(-1, ids[0, 1:, None])[63:, 0].numpy()
        differences.append(np.abs(wanted - np.array(request.log_probs)))
    apart = np.concatenate(differences)
    return {
        "model": size,
        "dtype": dtype,
        "tokens/s, 64 requests": made / took_s,
        "log-prob difference to float32 on the CPU, mean": float(apart.mean()),
        "log-prob difference to float32 on the CPU, largest": float(apart.max()),
    }


def log_probs(device: str, home: Path) -> dict[str, Any]:
    """The trainer's own function on 512 tokens of the head's shape."""
    from models.algorithms.tokens import OutputLayer, token_log_probs

    config = model_config("0.6B" if device == "cuda" else "quick")
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(1)
    states = torch.randn((512, hidden), generator=generator)
    weight = torch.randn((vocabulary, hidden), generator=generator) * 3 / hidden**0.5
    ids = torch.randint(vocabulary, (512,), generator=generator)
    dtype = torch.bfloat16
    rounded = states.to(dtype).double(), weight.to(dtype).double()
    exact = (rounded[0] @ rounded[1].T).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    layer = OutputLayer(weight.to(device, dtype))
    found, _ = token_log_probs(states.to(device, dtype), layer, ids.to(device))
    apart = (found.cpu().double() - exact).abs()
    return {"tokens": 512, "error against float64, mean": float(apart.mean()), "largest": float(apart.max())}


def train(device: str, home: Path, size: str) -> dict[str, Any]:
    """`bench.train`, and what the planner expects."""
    options = ["--device", device, "--output", str(home / "train.json"), "--rounds", "3"]
    options += ["--size", size] if device == "cuda" else ["--quick"]
    subprocess.run([sys.executable, "-m", "bench.train", *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = json.loads((home / "train.json").read_text())
    figures: dict[str, Any] = {}
    for series in found["series"]:
        figures[f"{series['name']}: {series['unit']}"] = float(np.median(series["values"]))
    if device == "cuda":
        budget = ["--max-tokens-per-gpu", "16384", *(["--gradient-checkpointing"] if size == "4B" else [])]
        planned = resolve(load([*QUICKSTART, "--train-dtype", "bfloat16", *budget]).config)
        memory = trainer_memory(planned, read_shape(model_config(size)))
        figures["planner: GB of a GPU"] = memory.total / 1e9 if memory is not None else None
    figures["remarks"] = [remark for remark in found["remarks"] if "not " in remark]
    return figures


def quickstart(device: str, home: Path) -> dict[str, Any]:
    """40 batches after 60 steps of warm start."""
    placed = ["--train-device", device, "--engine-device", device, "--run-dir", str(home / "run")]
    short = [*SHORT, "--num-rollout", "40", "--eval-interval", "20"]
    launch(["--mode", "async", *QUICKSTART, *placed, *short])
    rows = [row for row in read_metrics(home / "run" / "metrics.jsonl") if "perf/step_time" in row][10:]
    names = {
        "s/batch": "perf/step_time", "publish of weights, s": "perf/publish_weights_time",
        "update of an engine, s": "perf/update_weights_time",
        "engine against trainer, nats": "train/policy_proof_max_diff",
        "old log-probs against the engine's, nats": "train/train_rollout_logprob_abs_diff",
    }  # fmt: skip
    figures = {title: float(np.median([row.get(name, np.nan) for row in rows])) for title, name in names.items()}
    summary = read_summary(home / "run" / "summary.json")
    return figures | {"reward, first and last": [summary.reward.first, summary.reward.last]}


def compare(device: str, home: Path) -> dict[str, Any]:
    """What `launch.py compare` prints."""
    flags = [*QUICKSTART[:2], *SHORT, "--train-device", device, "--engine-device", device]
    printed = launch(["compare", "--batches", "10", "--rounds", "1", "--buffers", "1", "2", *flags])
    return {"text": [line for line in printed.splitlines() if line and not line.startswith(("round", "warm"))]}


def run_check(name: str, device: str, limit_s: float) -> Outcome:
    """One check in a process of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as home:
        command = [sys.executable, "-m", "bench.gpu_smoke", "--device", device, "--check", name, "--home", home]
        # With its own processes it is a process group, of which nothing may hold the GPU in the next check.
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            _, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Outcome(name, time.monotonic() - started, failure=f"not done within {limit_s:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds, result = time.monotonic() - started, Path(home) / "figures.json"
        if process.returncode == 0 and result.exists():
            return Outcome(name, seconds, json.loads(result.read_text()))
    last = [line for line in errors.splitlines() if line.strip()][-12:]
    return Outcome(name, seconds, failure="\n".join(last) or f"exit code {process.returncode}")


def text_of(found: Document) -> str:
    """The page."""
    about = found.machine
    lines = [f"Sluice on {found.device}; {about.cores} cores, Python {about.python}, {about.system}"]
    lines.append(", ".join(f"{name} {version}" for name, version in about.versions.items()))
    lines += [f"not installed, so not tried: {', '.join(found.missing)}"] if found.missing else []
    for outcome in found.outcomes:
        lines.append(f"\n{outcome.check} ({outcome.seconds:.0f} s)" + (": FAILED" if outcome.failure else ""))
        lines += [f"    {line}" for line in outcome.failure.splitlines()]
        for name, value in outcome.figures.items():
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                lines += [f"    {item}" for item in value]
            else:
                lines.append(f"    {name}: {value:.4g}" if isinstance(value, float) else f"    {name}: {value}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("bench_results"), help="directory of the two files")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check is not None:
        kind, _, size = options.check.partition(" ")
        checks = {"engine": engine, "log_probs": log_probs, "quickstart": quickstart, "compare": compare}
        checks["train"] = partial(train, size=size)
        figures = checks[kind](options.device, options.home)
        (options.home / "figures.json").write_text(json.dumps(figures))
        return 0
    started, outcomes = time.monotonic(), []
    for name in options.only:
        limit_s = min(CHECKS[name], LIMIT_S - (time.monotonic() - started))
        if limit_s < 10 or (name == "train 4B" and options.device == "cpu"):
            continue
        outcomes.append(run_check(name, options.device, limit_s))
        print(f"{name}: {outcomes[-1].failure.splitlines()[-1] if outcomes[-1].failure else 'done'}", flush=True)
    missing = [name for name in OPTIONAL if not importable(name)]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    about = machine(["torch", "transformers", "megatron-core", "flash-attn", "transformer-engine"])
    found = Document(about, device, missing, outcomes)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "gpu_smoke.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    (options.output / "gpu_smoke.txt").write_text(text_of(found))
    print(f"\n{text_of(found)}\n{options.output}/gpu_smoke.json and gpu_smoke.txt hold this")
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
