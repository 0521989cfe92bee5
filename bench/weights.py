"""From trainer to engines, by each route, next to a copy of the same bytes: `python -m bench.weights [--quick]`.

Two receivers. *recorder*: engines of this process that do the least a receiver can do by the route (map the file, map
the shared memory, receive the broadcast) and copy every byte once; what is timed is the transfer itself. *sglang*: real
servers, if SLUICE_SGLANG_PYTHON or .venv-sglang is there.

`landed` is the time from the begin of the trainer's write to the last engine's report; `stall` how long one engine
stood still; `memcpy` one copy of the same bytes by one thread, in the same round. Engines take their turns, so `landed`
grows with their number and `stall` does not. Every weight moves by about 1e-6 from one version to the next, as a step
of Adam at that learning rate makes it: that decides what the route delta has to move, which is printed.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.report import Machine, Series, arguments, finish, machine, print_table
from bench.weights_model import Versions, make_model
from bench.weights_rig import Fleet, Kind, fleet, sglang_python

BASELINE = "memcpy"
ROUTES = ("disk", "tensor", "distributed", "delta")
SIZES_MB = (10, 100, 1000)
QUICK_MB = (10, 100)
BUCKET_BYTES = 128 << 20


def copy_s(nbytes: int) -> float:
    """Seconds of one copy between two buffers whose pages are there, the quickest of three."""
    source, target = np.full(nbytes, 1, np.uint8), np.full(nbytes, 2, np.uint8)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return min(times)


async def measure(kind: Kind, versions: Versions, engines: int, rounds: int, root: Path) -> list[Series]:
    """All routes in turns, each round, on the same engines."""
    nbytes = versions.nbytes
    setting = f"{kind}, {nbytes / 1e6:,.0f} MB, {engines} engine{'s' if engines > 1 else ''}"
    values: dict[tuple[str, str], list[float]] = {}
    ratios: list[float] = []
    async with fleet(kind, versions, engines, BUCKET_BYTES, root / f"{kind}-{nbytes}") as one:
        await warm_up(one)
        for number in range(rounds):
            print(f"{setting}: round {number + 1} of {rounds}", flush=True)
            values.setdefault((BASELINE, ""), []).append(1e3 * copy_s(nbytes))
            for route in ROUTES:
                landed_s, stall_s = await one.publish(route)
                values.setdefault((route, "landed"), []).append(1e3 * landed_s)
                values.setdefault((route, "stall"), []).append(1e3 * stall_s)
                if route == "delta":
                    ratios.append(one.delta_ratio)
    note = (
        f"(moves 1/{statistics.median(ratios):.1f} of the bytes; of bfloat16 weights 1/{versions.bfloat16_ratio():.0f})"
    )
    return [
        Series(setting, f"{name} {what}".strip(), "ms", found, note if name == "delta" else "")
        for (name, what), found in values.items()
    ]


async def warm_up(one: Fleet) -> None:
    """Once by every route: groups are made, pages are touched, the copy beside the engines begins."""
    for route in ROUTES:
        await one.publish(route)


def remarks(rounds: int, about: Machine, engines: int) -> list[str]:
    return [
        f"{rounds} interleaved rounds, medians; everything on one machine of {about.cores} cores, load "
        f"{about.load_1min:.1f} at the start",
        f"{engines} engines update one after the other (--update-weight-rolling 1); landed includes the trainer's "
        "write into the slot and its digest, for delta also the compression",
        "gloo over loopback on a CPU: nothing here says anything about NCCL, CUDA IPC or a network",
    ]


def main() -> None:
    parser = arguments(__doc__, "weights", "10 and 100 MB only, 3 rounds instead of 5")
    parser.add_argument("--engines", type=int, default=2, help="recording engines; one real server is used")
    parser.add_argument("--sizes", type=int, nargs="+", help="megabytes of the model")
    parser.add_argument("--receivers", nargs="+", choices=["recorder", "sglang"], help="default: what is there")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 5)
    sizes = options.sizes or (QUICK_MB if options.quick else SIZES_MB)
    torch.set_num_threads(1)
    # The base of a difference is long overwritten by the other routes; each is therefore written twice, timed once.
    logging.getLogger("sluice.weights").setLevel(logging.ERROR)
    about = machine(["torch", "aiohttp", "pyarrow", "safetensors"])
    kinds: list[Kind] = options.receivers or ["recorder", "sglang"]
    if "sglang" in kinds and sglang_python() is None:
        print("no SGLang (SLUICE_SGLANG_PYTHON, .venv-sglang): recording engines only")
        kinds.remove("sglang")
    series: list[Series] = []
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        for megabytes in sizes:
            versions = make_model(Path(directory, f"model-{megabytes}"), megabytes)
            for kind in kinds:
                engines = options.engines if kind == "recorder" else 1
                series += asyncio.run(measure(kind, versions, engines, rounds, Path(directory)))
    print_table(series, BASELINE)
    notes = remarks(rounds, about, options.engines)
    finish(options.output, about, notes, series)


if __name__ == "__main__":
    main()
