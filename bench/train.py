"""Training: speed and weight export of every backend: `python -m bench.train [--quick] [--size 0.6B]`.

One recorded batch of rollouts, trained again and again by each backend. `share of peak` is the FLOPs that the
mathematics needs (see models.train.work), by time, by the speed of matrix products of the same dtype in the
same processes; on a GPU also by the maker's figure (MFU). `balance`: what data-parallel processes compute, by what the
one with most does; `exported`: bytes of the weights of one version.

Without a GPU, small models; with one, --size takes the shapes of Qwen3 in bfloat16, with random weights. A backend that
is not installed is listed as missing.

Each backend runs in processes of its own. Contenders with equally many processes share them, one after the other; all
processes measure the matmul peak together before each contender. A CPU process has one thread.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import multiprocessing

from bench.report import Series, arguments, finish, machine
from bench.rigs.train_work import CONTENDERS, SIZES, Contender, Setting, importable, make_checkpoint, quiet
from configs.resolve import resolve
from configs.schema import Config
from configs.schema.model_shapes import read_shape
from configs.schema.train import MegatronConfig, ParallelConfig, TrainConfig
from models.train.build import build_member
from models.train.trainer import Trainer
from models.train.work import published_tflops, step_flops, work_of


class Measured(msgspec.Struct, frozen=True):
    """Of one contender, over all its processes."""

    step_s: list[float]
    export_s: list[float]
    peak_flops: float  # by matrix products, all processes together
    memory_bytes: int  # of the fullest GPU; 0 on a CPU
    counts: dict[str, float]


def measure(setting: Setting, contenders: list[Contender], root: Path, deadline_s: float) -> dict[str, Measured | str]:
    """Contenders of equally many processes; a string is the reason why a contender could not be measured."""
    world = contenders[0].processes
    out = root / f"world-{world}"
    out.mkdir()
    started = multiprocessing.start_processes(_work, (setting, contenders, out), world, join=False, daemon=True)
    ends = time.monotonic() + deadline_s
    # The file of the process that failed says why; the others are ended.
    with suppress(multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException):
        while not started.join(timeout=1.0) and time.monotonic() < ends:
            continue
    for process in started.processes:
        process.kill()
        process.join()
    found: dict[str, Measured | str] = {one.name: "it was not done in time" for one in contenders}
    for result in out.glob("*.json"):
        found[result.stem] = msgspec.json.decode(result.read_bytes(), type=Measured | str)
    return found


def _work(rank: int, setting: Setting, contenders: list[Contender], out: Path) -> None:
    torch.set_num_threads(1)
    quiet()
    on_gpu = setting.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{out}/rendezvous",
        rank=rank,
        world_size=contenders[0].processes,
        timeout=timedelta(minutes=5),
    )
    for contender in contenders:
        result, found = out / f"{contender.name}.json", None
        try:
            found = _measure(setting, contender)
        except Exception as error:  # sent to the parent, which prints it
            reason = next(iter(str(error).splitlines()), "")
            result.write_bytes(msgspec.json.encode(f"{type(error).__name__}: {reason}"))
            if contender.processes > 1:
                raise
        if rank == 0 and found is not None:
            result.write_bytes(msgspec.json.encode(found))
    torch.distributed.destroy_process_group()


def _measure(setting: Setting, contender: Contender) -> Measured:
    peak = _peak(setting)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = _trainer(setting, contender)
    batch = setting.batch()
    metrics: dict[str, float] = {}
    step_s, export_s, exported = [], [], 0
    for number in range(setting.rounds + 1):
        started = _now(setting)
        trainer.begin_batch(rollouts=len(batch), steps=1)
        trainer.accumulate(batch)
        metrics = trainer.step()
        step_s.append(_now(setting) - started)
        if number:
            started = _now(setting)
            exported = sum(tensor.nbytes for _, tensor in trainer.export_weights())
            export_s.append(_now(setting) - started)
    memory = torch.cuda.max_memory_allocated() if setting.device == "cuda" else 0
    return Measured(
        step_s=step_s[1:],  # the first one warms up
        export_s=export_s,
        peak_flops=max(peak, _peak(setting)),
        memory_bytes=int(_over_processes(memory, torch.distributed.ReduceOp.MAX)),
        counts={
            "% padding": 100 * metrics["train/padding_frac"],
            "micro-batches": metrics["train/micro_batches"],
            "% balance": 100 * metrics["train/dp_balance"],
            "MB exported": exported / 1e6,
        },
    )


def _trainer(setting: Setting, contender: Contender) -> Trainer:
    """As a process of a run makes it."""
    config = Config(
        train=TrainConfig(
            hf_checkpoint=setting.checkpoint,
            lr=1e-6,
            max_tokens_per_gpu=setting.budget,
            train_backend=contender.backend,
            train_device=setting.device,
            train_dtype="bfloat16" if setting.device == "cuda" else "float32",
            gradient_checkpointing=setting.recompute,
        ),
        parallel=ParallelConfig(actor_num_gpus_per_node=contender.processes),
        megatron=MegatronConfig(tensor_model_parallel_size=contender.processes),
    )
    trainer = build_member(resolve(config), 1)
    trainer.setup()
    return trainer


def _now(setting: Setting) -> float:
    """Seconds, when all processes and their GPUs are done with what they were given."""
    if setting.device == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()
    return time.perf_counter()


def _peak(setting: Setting) -> float:
    """FLOP/s of square matrix products, all processes at once; the best of several."""
    size = 8192 if setting.device == "cuda" else 1024
    left = torch.randn((size, size), dtype=setting.dtype, device=setting.device)
    right, product = torch.randn_like(left), torch.empty_like(left)
    repeats = 20 if setting.device == "cuda" else 4
    best = float("inf")
    for _ in range(5):
        started = _now(setting)
        for _ in range(repeats):
            torch.matmul(left, right, out=product)
        if setting.device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return _over_processes(2.0 * size**3 * repeats / best, torch.distributed.ReduceOp.SUM)


def _over_processes(value: float, how: Any) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    torch.distributed.all_reduce(found, op=how)
    return float(found.item())


# Groups of a batch, medians of prompt and response in tokens, the longest, tokens of a micro-batch. Small on a CPU; on
# a GPU, sequences of a reasoning model.
BATCHES: Final = {
    "cuda": (8, 200.0, 1200.0, 8192, 16384), "quick": (3, 24.0, 80.0, 256, 1024), "cpu": (4, 32.0, 128.0, 512, 2048),
}  # fmt: skip


def setting_of(options: argparse.Namespace, checkpoint: Path) -> Setting:
    batch = BATCHES["cuda" if options.device == "cuda" else "quick" if options.quick else "cpu"]
    rounds = options.rounds or (3 if options.quick else 5)
    recompute = options.recompute or options.size == "4B"  # whose activations do not fit beside its optimizer
    return Setting(str(checkpoint), options.size, options.device, *batch, rounds, recompute)


def runnable(device: str) -> tuple[list[Contender], list[str]]:
    """Those that can run here, and why the others cannot."""
    chosen, missing = [], []
    gpus = torch.cuda.device_count() if device == "cuda" else None
    for one in CONTENDERS:
        if one.backend == "megatron" and not importable("megatron.core"):
            missing.append(f"{one.name}: not run, megatron.core is not installed")
        elif gpus is not None and one.processes > gpus:
            missing.append(f"{one.name}: not run, it takes {one.processes} GPUs and there is {gpus}")
        else:
            chosen.append(one)
    return chosen, missing


def speed(setting: Setting, root: Path) -> tuple[list[Series], list[str]]:
    """Steps of all backends that run here."""
    chosen, remarks = runnable(setting.device)
    found: dict[str, Measured | str] = {}
    for world in sorted({one.processes for one in chosen}):
        group = [one for one in chosen if one.processes == world]
        print(f"{', '.join(one.name for one in group)}: {setting.rounds} steps each", flush=True)
        found |= measure(setting, group, root, deadline_s=600.0)
    work = work_of(setting.batch())
    flops = step_flops(read_shape(setting.config), work)
    title = f"Qwen3 {setting.size}, {setting.device} {str(setting.dtype)[6:]}, {work.sequence_tokens:,} tokens a step"
    published = published_tflops(torch.cuda.get_device_name() if setting.device == "cuda" else "")
    processes = {one.name: one.processes for one in chosen}
    peaks: dict[int, float] = {}  # the best of all that as many processes found: other load only lowers it
    for name, one in found.items():
        if not isinstance(one, str):
            peaks[processes[name]] = max(peaks.get(processes[name], 0.0), one.peak_flops)
    out = []
    for name, one in found.items():
        if isinstance(one, str):
            remarks.append(f"{name}: not measured, {one}")
            continue
        peak, count = peaks[processes[name]], processes[name]
        figures = {
            "tokens/s": [work.sequence_tokens / step for step in one.step_s],
            "% of matmul peak": [100 * flops / step / peak for step in one.step_s],
            "ms of export": [1e3 * seconds for seconds in one.export_s],
            **{unit: [value] for unit, value in one.counts.items()},
        }
        if published is not None:
            figures["% MFU"] = [100 * flops / step / (published * 1e12 * count) for step in one.step_s]
            figures["GB of a GPU"] = [one.memory_bytes / 1e9]
        out += [Series(title, name, unit, values) for unit, values in figures.items()]
    remarks += [f"matmul peak, {world} at once: {peak / 1e9:,.0f} GFLOP/s" for world, peak in sorted(peaks.items())]
    return out, remarks


def main() -> None:
    parser = arguments(__doc__, "train", "a smaller model, 3 rounds", rounds="timed steps of each backend")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="default: quick or cpu, 0.6B on a GPU")
    parser.add_argument("--recompute", action="store_true", help="recompute activations; always for 4B")
    options = parser.parse_args()
    options.size = options.size or ("0.6B" if options.device == "cuda" else "quick" if options.quick else "cpu")
    os.environ["PYTHONWARNINGS"] = "ignore"  # of Megatron-core about missing packages, in its processes
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(1)
    about = machine(["torch", "transformers", "megatron-core", "transformer-engine"])
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        root = Path(directory)
        setting = setting_of(options, root / "model")
        make_checkpoint(root / "model", options.size, options.device)
        speeds, found = speed(setting, root)
    remarks = [
        f"{setting.rounds} steps after one that warms up, medians; {about.cores} cores, load {about.load_1min:.1f} at "
        "the start",
        "FLOPs: 6 * matrix weights * tokens + attention + output head of wanted tokens; padding and recomputation are "
        "no work",
    ]
    if setting.device == "cpu":
        remarks.append("a CPU with gloo, one thread for each process: ratios of backends here say nothing about a GPU")
    finish(options.output, about, remarks + found, speeds, baseline="torch")


if __name__ == "__main__":
    main()
