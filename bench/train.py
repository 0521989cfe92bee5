"""Training: speed of every backend, packing, balance, weight export: `python -m bench.train [--quick] [--size 0.6B]`.

*Speed*: one recorded batch of rollouts, trained again and again by each backend. `share of peak` is the FLOPs that the
mathematics asks for (bench.train_work says which), by time, by the speed of matrix products of the same dtype in the
same processes; on a GPU also by the maker's figure (MFU).
*Packing*: what is computed for a batch, by this repository's plan and by plain ones.
*Balance*: the costliest of n shares, by estimated FLOPs, when sequences are dealt by cost, by tokens or by number.

Without a GPU, small models; with one, --size takes the shapes of Qwen3 in bfloat16, with random weights. A backend that
is not installed is said to be missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.report import Machine, Series, arguments, finish, machine
from bench.train_plans import dealings, packings
from bench.train_speed import (
    CONTENDERS,
    PUBLISHED,
    SIZES,
    Contender,
    Measured,
    Setting,
    flops_of,
    make_checkpoint,
    measure,
)
from bench.train_work import ids_and_prompts, recorded_batch, work_of
from models.train.step.packing import Packing

BASELINE = "torch"
SHARES = (2, 4, 8, 16, 32, 64)
# What batches are like: name -> median tokens of prompts and of responses.
BATCHES = {"long answers": (200.0, 1200.0), "long prompts": (1500.0, 250.0)}


def setting_of(options: argparse.Namespace, checkpoint: Path) -> Setting:
    """Small on a CPU; on a GPU, sequences of a reasoning model."""
    if options.device == "cuda":
        shape: dict[str, Any] = {"groups": 8, "prompt": 200.0, "response": 1200.0, "longest": 8192, "budget": 16384}
    elif options.quick:
        shape = {"groups": 3, "prompt": 24.0, "response": 80.0, "longest": 256, "budget": 1024}
    else:
        shape = {"groups": 4, "prompt": 32.0, "response": 128.0, "longest": 512, "budget": 2048}
    rounds = options.rounds or (3 if options.quick else 5)
    recompute = options.recompute or options.size == "4B"  # whose activations do not fit beside its optimizer
    return Setting(str(checkpoint), options.size, options.device, rounds=rounds, recompute=recompute, **shape)


def runnable(device: str) -> tuple[list[Contender], list[str]]:
    """Those that can run here, and why the others cannot."""
    chosen, missing = [], []
    gpus = torch.cuda.device_count() if device == "cuda" else None
    for one in CONTENDERS:
        if not _importable(one.module):
            missing.append(f"{one.name}: not run, {one.module} is not installed")
        elif gpus is not None and one.processes > gpus:
            missing.append(f"{one.name}: not run, it takes {one.processes} GPUs and there is {gpus}")
        else:
            chosen.append(one)
    return chosen, missing


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def speed(setting: Setting, root: Path) -> tuple[list[Series], list[str]]:
    """Steps of all backends that run here."""
    chosen, remarks = runnable(setting.device)
    found: dict[str, Measured | str] = {}
    for world in sorted({one.processes for one in chosen}):
        group = [one for one in chosen if one.processes == world]
        print(f"{', '.join(one.name for one in group)}: {setting.rounds} steps each", flush=True)
        found |= measure(setting, group, root, deadline_s=600.0)
    work, flops = work_of(setting.batch()), flops_of(setting)
    title = f"Qwen3 {setting.size}, {setting.device} {str(setting.dtype)[6:]}, {work.sequence_tokens:,} tokens a step"
    published = next((value for name, value in PUBLISHED.items() if name in _gpu_name()), None)
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
        peak = peaks[processes[name]]
        out += [
            Series(title, f"{name}: speed", "tokens/s", [work.sequence_tokens / s for s in one.step_s]),
            Series(title, f"{name}: share of peak", "% of matmul", [100 * flops / s / peak for s in one.step_s]),
            Series(title, f"{name}: weight export", "ms", [1e3 * s for s in one.export_s]),
        ]
        if published is not None:
            mfu = [100 * flops / s / (published * processes[name]) for s in one.step_s]
            out.append(Series(title, f"{name}: MFU", "% of published", mfu))
            out.append(Series(title, f"{name}: memory", "GB of a GPU", [one.memory_bytes / 1e9]))
        remarks.append(f"{name}: padding {100 * one.padding_frac:.1f} % of the computed tokens")
    remarks += [f"matmul peak, {world} at once: {peak / 1e9:,.0f} GFLOP/s" for world, peak in sorted(peaks.items())]
    return out, remarks


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def plans(*, quick: bool) -> list[Series]:
    """Packing and balance of large batches; no model, so these are exact."""
    out = []
    packing = Packing(max_tokens=16384, quadratic_tokens=3 * 2560)  # of a model whose hidden size is 2560
    for name, (prompt, response) in BATCHES.items():
        batch = recorded_batch(32 if quick else 128, longest=8192, vocabulary=32000, prompt=prompt, response=response)
        tokens, prompts = ids_and_prompts(batch)
        series = packings(tokens, prompts, packing)
        if name == next(iter(BATCHES)):
            series += dealings(tokens, prompts, packing, SHARES[:4] if quick else SHARES)
        out += [Series(f"{name}: {one.setting}", one.name, one.unit, one.values) for one in series]
    return out


def print_exact(series: Sequence[Series]) -> None:
    """Figures that are what they are, without a range: one line for each name before the colon."""
    for setting in dict.fromkeys(one.setting for one in series):
        rows = [one for one in series if one.setting == setting]
        columns = list(dict.fromkeys(one.name.partition(": ")[2] for one in rows))
        found = {tuple(one.name.split(": ")): f"{one.median:,.1f}" for one in rows}
        units = {one.name.partition(": ")[2]: one.unit for one in rows}
        heads = [f"{column}, {units[column]}" if units[column] else column for column in columns]
        names = list(dict.fromkeys(one.name.partition(": ")[0] for one in rows))
        width = max(map(len, names))
        print(f"\n{setting}\n  {'':{width}}  {'  '.join(heads)}")
        for name in names:
            figures = (f"{found[name, column]:>{len(head)}}" for column, head in zip(columns, heads, strict=True))
            print(f"  {name:{width}}  {'  '.join(figures)}")


def print_speeds(series: Sequence[Series]) -> None:
    """Medians and ranges, and ratios to the baseline."""
    rows = {one.name: one for one in series}
    width = max(map(len, rows), default=0)
    print(f"\n{series[0].setting}\n  {'':{width}} {'median':>12} {'min':>12} {'max':>12}" if series else "")
    for name, one in rows.items():
        base = rows.get(f"{BASELINE}: {name.partition(': ')[2]}")
        ratio = f"  {one.median / base.median:.2f}x of {BASELINE}" if base is not None and base is not one else ""
        values = (one.median, min(one.values), max(one.values))
        figures = " ".join(f"{value:>12,.{0 if value >= 1000 else 1}f}" for value in values)
        print(f"  {name:{width}} {figures}  {one.unit}{ratio}")


def remarks_of(setting: Setting, about: Machine) -> list[str]:
    out = [
        f"{setting.rounds} steps after one that warms up, medians; {about.cores} cores, load {about.load_1min:.1f} at "
        "the start",
        "FLOPs: 6 * matrix weights * tokens + attention + output head of wanted tokens; padding and recomputation are "
        "no work",
    ]
    if setting.device == "cpu":
        out.append("a CPU with gloo, one thread for each process: ratios of backends here say nothing about a GPU")
    return out


def main() -> None:
    parser = arguments(
        __doc__, "train", "a smaller model, fewer shares, 3 rounds", rounds="timed steps of each backend"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=sorted(SIZES), help="default: quick or cpu, 0.6B on a GPU")
    parser.add_argument("--recompute", action="store_true", help="recompute activations; always for 4B")
    options = parser.parse_args()
    options.size = options.size or ("0.6B" if options.device == "cuda" else "quick" if options.quick else "cpu")
    os.environ["PYTHONWARNINGS"] = "ignore"  # of Megatron-core about what is not installed, in its processes
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(1)
    about = machine(["torch", "transformers", "megatron-core", "transformer-engine"])
    series = plans(quick=options.quick)
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        root = Path(directory)
        setting = setting_of(options, root / "model")
        make_checkpoint(root / "model", options.size, options.device)
        speeds, found = speed(setting, root)
    print_exact(series)
    print_speeds(speeds)
    notes = remarks_of(setting, about) + found
    finish(options.output, about, notes, series + speeds)


if __name__ == "__main__":
    main()
