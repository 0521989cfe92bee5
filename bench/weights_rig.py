"""What `bench.weights` measures on: models of a given size, engines that receive, links and a trainer's slots.

The recording engine serves the calls of a weight update and copies every byte that it is given once, into memory of its
own. It does not unpickle: of a payload of the tensor route it takes the name of the shared memory, nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import mmap
import os
import re
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web

from bench.weights_model import Versions
from configs.schema import Config
from configs.schema.engine import EngineConfig, UpdateConfig
from configs.schema.rollout import RolloutConfig
from models.engines.client import EngineClient
from models.engines.launch.command import server_launch
from models.engines.launch.environment import probe
from models.weights.buckets import TORCH_NAMES
from models.weights.delta_mirror import DeltaMirror
from models.weights.delta_store import DeltaStore
from models.weights.layout import read_layout
from models.weights.shared_memory_writer import SlotWriter
from stages.base import StageContext
from stages.engines.engine_control import EngineControl
from stages.engines.stage import EnginesStage
from stages.messages import EngineAddress, EngineEntry, WeightsAnnouncement
from stages.ports import SameHost, Topic
from stages.topic_values import KEYS, carrying
from transport import Node

Kind = Literal["recorder", "sglang"]
SHARED: Final = re.compile(rb"/(torch_\d+_\d+_\d+)")
START_S: Final = 300.0
LIMIT_S: Final = 600.0
CONTEXT: Final = 512  # tokens; nothing is generated
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class Recorder:
    """An engine without a model. `received` is where the bytes end up."""

    def __init__(self, nbytes: int) -> None:
        self.received = np.zeros(nbytes, np.uint8)
        self.label = "default"
        self.at = 0
        self._group: Any = None
        self._shared: set[str] = set()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        for path in ("/pause_generation", "/continue_generation", "/begin_weight_update"):
            app.router.add_post(path, self._begin)
        app.router.add_post("/end_weight_update", self._end)
        app.router.add_post("/update_weights_from_disk", self._disk)
        app.router.add_post("/update_weights_from_tensor", self._tensor)
        app.router.add_post("/init_weights_update_group", self._init)
        app.router.add_post("/destroy_weights_update_group", self._destroy)
        app.router.add_post("/update_weights_from_distributed", self._distributed)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/model_info", self._info)
        return app

    async def _info(self, http: web.Request) -> web.Response:
        return web.json_response({"device": "cpu", "tp_size": 1, "weight_version": self.label})

    async def _begin(self, http: web.Request) -> web.Response:
        self.at = 0
        return web.json_response({"success": True, "message": "", "status": "ok"})

    async def _end(self, http: web.Request) -> web.Response:
        for name in self._shared:  # the reference that an unpickling reader would give back
            Path("/dev/shm", name).unlink(missing_ok=True)
        self._shared.clear()
        return web.json_response({"success": True})

    async def _disk(self, http: web.Request) -> web.Response:
        body = await http.json()
        await asyncio.to_thread(self._load, Path(body["model_path"]) / "model.safetensors")
        return self._done(body)

    def _load(self, path: Path) -> None:
        layout = read_layout(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            self._take(np.frombuffer(memoryview(mapped)[layout.data_start :], np.uint8).copy())

    async def _tensor(self, http: web.Request) -> web.Response:
        body = await http.json()
        name = SHARED.search(base64.b64decode(body["serialized_named_tensors"][0]))
        assert name is not None, "a payload names its shared memory"
        self._shared.add(name[1].decode())
        await asyncio.to_thread(self._map, Path("/dev/shm", name[1].decode()))
        return self._done(body)

    def _map(self, path: Path) -> None:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            self._take(np.frombuffer(mapped, np.uint8).copy())

    async def _init(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self._join, await http.json())
        return web.json_response({"success": True})

    def _join(self, body: dict[str, Any]) -> None:
        limit = timedelta(seconds=60)
        store = dist.TCPStore(body["master_address"], body["master_port"], 2, False, limit)
        name = body["group_name"]
        nested = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self._group = dist.ProcessGroupGloo(nested, 1, 2, limit)

    async def _destroy(self, http: web.Request) -> web.Response:
        self._group = None
        return web.json_response({"success": True})

    async def _distributed(self, http: web.Request) -> web.Response:
        body = await http.json()
        nbytes = sum(
            int(np.prod(shape)) * ITEM_BYTES[dtype] for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        )
        await asyncio.to_thread(self._receive, nbytes)
        return self._done(body)

    def _receive(self, nbytes: int) -> None:
        arrived = torch.empty(nbytes, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([arrived], options).wait()
        self._take(arrived.numpy())

    def _take(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        end = min(self.at + len(data), len(self.received))
        np.copyto(self.received[self.at : end], data[: end - self.at])
        self.at = end

    def _done(self, body: dict[str, Any]) -> web.Response:
        self.label = body["weight_version"] or self.label
        return web.json_response({"success": True, "message": ""})


@dataclass
class Fleet:
    """Engines under control, and the trainer's side."""

    topic: Topic
    engines: int
    slots: SlotWriter
    deltas: DeltaStore
    versions: Versions
    version: int = 0
    delta_ratio: float = 1.0
    recorders: list[Recorder] = field(default_factory=list)

    async def publish(self, route: str) -> tuple[float, float]:
        """Publish the next version by a route; seconds until it landed everywhere, and of one engine's stall."""
        if route == "delta":
            await self._once("delta")  # what the difference is to: the versions between came by other routes
        return await self._once(route)

    async def _once(self, route: str) -> tuple[float, float]:
        self.version += 1
        loop = asyncio.get_running_loop()
        started = loop.time()
        announcement = await asyncio.to_thread(self._write, route)
        await self.topic.publish("weights", msgspec.msgpack.encode(announcement))
        entries = await self._landed()
        landed_s = loop.time() - started
        return landed_s, sum(entry.stall_s for entry in entries) / len(entries)

    def _write(self, route: str) -> WeightsAnnouncement:
        manifest = self.slots.write(self.version, 0, self.versions.tensors(self.version))
        delta = ""
        if route == "delta":
            published = self.deltas.publish(manifest)
            delta, self.delta_ratio = published.path, published.ratio
        return WeightsAnnouncement(**msgspec.structs.asdict(manifest), transport=route, delta=delta)

    async def _landed(self) -> list[EngineEntry]:
        """Waits for the entry of every engine; unblocked by the last one."""
        revision = 0
        async with asyncio.timeout(LIMIT_S):
            while True:
                entries = list(carrying(self.topic).values())
                if len(entries) == self.engines and all(entry.version >= self.version for entry in entries):
                    return entries
                revision = await self.topic.wait(revision, *KEYS)


class _NoSpans:
    def add(
        self, name: str, start_s: float, dur_s: float, *, group: int = -1, sample: int = -1, detail: str = ""
    ) -> None:
        """The benchmark takes its figures from the directory."""


@asynccontextmanager
async def fleet(kind: Kind, versions: Versions, engines: int, bucket_bytes: int, root: Path) -> AsyncIterator[Fleet]:
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
            update=UpdateConfig(update_weight_buffer_size=bucket_bytes),
        )
        stage = EnginesStage(StageContext(config, root, "engines-0", _NoSpans()))
        controls = [EngineControl(f"engine-{index}", stage, mirror, SameHost()) for index in range(engines)]
        one = Fleet(topic, engines, slots, DeltaStore(root / "deltas"), versions)
        for control in controls:
            url = await stack.enter_async_context(_recording(one) if kind == "recorder" else _serving(versions, root))
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
    """A recording engine, in an event loop and a thread of its own as in a process of its own."""
    recorder = Recorder(one.slots.layout.data_bytes)
    one.recorders.append(recorder)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(recorder.application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(start(), loop))
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(runner.cleanup(), loop))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def sglang_python() -> Path | None:
    """The interpreter of an environment with SGLang; None if there is none."""
    named = os.environ.get("SLUICE_SGLANG_PYTHON")
    path = Path(named) if named else Path(__file__).parent.parent / ".venv-sglang" / "bin" / "python"
    return path if path.is_file() else None


@asynccontextmanager
async def _serving(versions: Versions, root: Path) -> AsyncIterator[str]:
    """A real SGLang server, started as a run starts it: without a GPU it needs the shims of `server_launch`."""
    python = sglang_python()
    assert python is not None, "asked for only where there is one"
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
        with suppress(ProcessLookupError):  # it may have ended by itself, and then that is what is told
            os.killpg(process.pid, 15)
        await asyncio.to_thread(process.wait)


assert set(ITEM_BYTES) == set(TORCH_NAMES.values())
