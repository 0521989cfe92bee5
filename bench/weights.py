"""From trainer to engines, by each route, next to a copy of the same bytes: `python -m bench.weights [--quick]`.

Three receivers. *recorder*: engines of this process that do the least a receiver can do by the route (map the file,
map the shared memory, receive the broadcast) and copy every byte once; what is timed is the transfer itself.
*embedded*: our own engine, idle, by the routes that it serves. *sglang*: real servers, if SLUICE_SGLANG_PYTHON or
.venv-sglang is there. Beside the stall stands how often the project, but for its engines, copies and digests the bytes.

`landed` is the time from the begin of the trainer's write to the last engine's report; `stall` how long one engine
stood still; `memcpy` one copy of the same bytes by one thread, in the same round. Engines take their turns, so `landed`
grows with their number and `stall` does not. Every weight moves by about 1e-6 from one version to the next, as a step
of Adam at that learning rate makes it: that decides what the route delta has to move, which is printed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from functools import cache
from pathlib import Path
from typing import Final, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from aiohttp import web

from bench.report import NoSpans, Series, arguments, finish, machine
from bench.rigs.weights_rig import LIMIT_S, Fleet, Kind, Recorder, Versions, count_touched, make_model
from configs.schema import Config
from configs.schema.rollout import EngineConfig, RolloutConfig, UpdateConfig
from models.engines.client import EngineClient
from models.engines.launch.command import server_launch
from models.engines.launch.environment import probe
from models.engines.serve import EngineServer
from models.weights.delta import DeltaStore
from models.weights.delta_mirror import DeltaMirror
from models.weights.shared_memory_writer import SlotWriter
from stages.base import StageContext
from stages.engines.engine_control import EngineControl
from stages.engines.stage import EnginesStage
from stages.ports import SameHost
from stages.topic_values import EngineAddress
from transport import Node

BASELINE = "memcpy"
ROUTES = ("disk", "tensor", "distributed", "delta")
SIZES_MB = (10, 100, 1000)
QUICK_MB = (10, 100)
TOUCHED = count_touched()
BUCKET_BYTES = 128 << 20


@cache  # a kernel that takes back so much memory is busy with it during the next update
def buffers(nbytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    return np.full(nbytes, 1, np.uint8), np.full(nbytes, 2, np.uint8)


def copy_s(nbytes: int) -> float:
    """Seconds of one copy between two buffers whose pages are there, the quickest of three."""
    source, target = buffers(nbytes)
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
    touched: dict[str, str] = {}
    routes = ("disk", "delta") if kind == "embedded" else ROUTES
    async with fleet(kind, versions, engines, root / f"{kind}-{nbytes}") as one:
        for number in range(rounds):
            print(f"{setting}: round {number + 1} of {rounds}", flush=True)
            values.setdefault((BASELINE, ""), []).append(1e3 * copy_s(nbytes))
            for route in routes:
                for _ in range(2):  # as in a run, where both slots of its one route are mapped
                    await one.publish(route)
                TOUCHED.clear()
                for what, seconds in zip(("landed", "stall"), await one.publish(route), strict=True):
                    values.setdefault((route, what), []).append(1e3 * seconds)
                touched[f"{route} stall"] = ", ".join(
                    f"{what} {n / nbytes:.3g}x" for what, n in sorted(TOUCHED.items())
                )
                if route == "delta":
                    ratios.append(one.delta_ratio)
    touched["delta landed"] = (
        f"(moves 1/{statistics.median(ratios):.1f} of the bytes; of bfloat16 weights 1/{versions.bfloat16_ratio():.0f})"
    )
    return [
        Series(setting, series := f"{name} {what}".strip(), "ms", found, touched.get(series, ""))
        for (name, what), found in values.items()
    ]


def main() -> None:
    parser = arguments(__doc__, "weights", "10 and 100 MB only, 3 rounds instead of 5")
    parser.add_argument("--engines", type=int, default=2, help="recording or embedded engines; one real server is used")
    parser.add_argument("--sizes", type=int, nargs="+", help="megabytes of the model")
    parser.add_argument("--receivers", nargs="+", choices=get_args(Kind), help="default: the installed ones")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 5)
    sizes = options.sizes or (QUICK_MB if options.quick else SIZES_MB)
    torch.set_num_threads(1)
    # The base of a difference is long overwritten by the other routes; each is therefore written twice, timed once.
    logging.getLogger("sluice.weights").setLevel(logging.ERROR)
    about = machine(["torch", "aiohttp", "pyarrow", "safetensors"])
    kinds: list[Kind] = options.receivers or [*get_args(Kind)]
    if "sglang" in kinds and sglang_python() is None:
        print("no SGLang (SLUICE_SGLANG_PYTHON, .venv-sglang): recording engines only")
        kinds.remove("sglang")
    series: list[Series] = []
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        for megabytes in sizes:
            versions = make_model(Path(directory, f"model-{megabytes}"), megabytes)
            for kind in kinds:
                engines = 1 if kind == "sglang" else options.engines
                series += asyncio.run(measure(kind, versions, engines, rounds, Path(directory)))
    remarks = [
        f"{rounds} interleaved rounds, medians; everything on one machine of {about.cores} cores, load "
        f"{about.load_1min:.1f} at the start",
        "the engines of a setting update side by side; landed includes the "
        "trainer's write into the slot and its digest, for delta also the compression",
        "gloo over loopback on a CPU: this is no measurement of NCCL, CUDA IPC or a network",
    ]
    finish(options.output, about, remarks, series, baseline=BASELINE)


START_S: Final = 300.0


CONTEXT: Final = 512  # tokens; nothing is generated


@asynccontextmanager
async def fleet(kind: Kind, versions: Versions, engines: int, root: Path) -> AsyncIterator[Fleet]:
    """Engines of a kind that follow one topic."""
    root.mkdir()
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(Node("bench", "weights"))
        server = await node.topic_server("inproc://topic")
        topic = await node.topic(server.address, replica="trainer")
        slots = stack.enter_context(closing(SlotWriter(Path("/dev/shm", f"sluice-bench-{os.getpid()}"), versions.path)))
        mirror = DeltaMirror(f"bench-mirror-{os.getpid()}", root)
        stack.callback(mirror.close)
        config = Config(
            engine=EngineConfig(pause_generation_mode="in_place"),
            rollout=RolloutConfig(request_timeout_secs=LIMIT_S),
            update=UpdateConfig(update_weight_buffer_size=BUCKET_BYTES),
        )
        stage = EnginesStage(StageContext(config, root, "engines-0", NoSpans()))
        controls = [EngineControl(f"engine-{index}", stage, mirror, SameHost()) for index in range(engines)]
        one = Fleet(topic, engines, slots, DeltaStore(root / "deltas"), versions)
        for control in controls:
            serving = {"recorder": _recording(one), "embedded": _embedded(versions), "sglang": _serving(versions, root)}
            url = await stack.enter_async_context(serving[kind])
            server.publish(f"engine/{control.name}", msgspec.msgpack.encode(EngineAddress(control.name, url, 0)))
        async with asyncio.TaskGroup() as tasks:
            following = [
                tasks.create_task(control.follow(await node.topic(server.address, replica=control.name)))
                for control in controls
            ]
            yield one
            for task in following:
                task.cancel()


@asynccontextmanager
async def _recording(one: Fleet) -> AsyncIterator[str]:
    """A recording engine, in place of a process: what takes time it does in threads of its own."""
    runner = web.AppRunner(Recorder(one.slots.layout.data_bytes).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _embedded(versions: Versions) -> AsyncIterator[str]:
    engine = EngineConfig(engine_device="cpu", engine_dtype="float32", engine_slots=1)
    async with EngineServer(engine, str(versions.path), max_context_len=CONTEXT, seed=0) as server:
        yield server.url


def sglang_python() -> Path | None:
    """The interpreter of an environment with SGLang; None if there is none."""
    named = os.environ.get("SLUICE_SGLANG_PYTHON")
    path = Path(named) if named else Path(__file__).parent.parent / ".venv-sglang" / "bin" / "python"
    return path if path.is_file() else None


@asynccontextmanager
async def _serving(versions: Versions, root: Path) -> AsyncIterator[str]:
    """A real SGLang server, started as a run starts it: without a GPU it needs the shims of `server_launch`."""
    python = sglang_python()
    assert python is not None, "called only where SGLang is installed"
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    config = Config(engine=EngineConfig(engine="sglang", engine_slots=4))
    installed = await asyncio.to_thread(probe, python, ("server",))
    launch = server_launch(config, installed, model_path=str(versions.path), port=port, max_context=CONTEXT, seed=0)
    with (root / "sglang.log").open("wb") as out:
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs while it starts
            launch.argv, stdout=out, stderr=out, env={**os.environ, **launch.env}, start_new_session=True
        )
    try:
        async with asyncio.timeout(START_S), EngineClient(launch.url) as client:
            while not await client.health():
                if process.poll() is not None:
                    raise RuntimeError(f"SGLang ended: {(root / 'sglang.log').read_text()[-2000:]}")
                await asyncio.sleep(0.5)
        yield launch.url
    finally:
        with suppress(ProcessLookupError):  # it may have ended by itself, and then its own error is reported
            os.killpg(process.pid, 15)
        await asyncio.to_thread(process.wait)


if __name__ == "__main__":
    main()
