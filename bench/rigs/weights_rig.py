"""What `bench.weights` measures on: two versions of a model, engines that receive weights, and a trainer's slots.

The models are Qwen3-shaped and random. Their two versions differ as one optimizer step makes them differ. The recording
engine serves the calls of a weight update and copies each byte once, into its own memory. It does not unpickle: from a
payload of the tensor route it takes only the name of the shared memory. `count_touched` counts what the project's own
code reads or writes on the way.
"""

from __future__ import annotations

import asyncio
import base64
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file

from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.weights import shared_memory_reader, shared_memory_writer
from models.weights.delta import DeltaStore, compress
from models.weights.layout import read_layout
from models.weights.shared_memory_writer import SlotWriter
from stages.messages import WeightsAnnouncement
from stages.ports import Topic
from stages.topic_values import KEYS, EngineEntry, carrying

SHAPES: Final = {10: (128, 10), 100: (512, 6), 1000: (1024, 16)}  # megabytes of float32 -> hidden size, layers
STEP: Final = 1e-6  # what every weight moves by: Adam's step at this learning rate


class Versions:
    """A checkpoint in `path` and its weights one step apart; odd versions are the one, even ones the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first = load_file(path / "model.safetensors")
        random = torch.Generator().manual_seed(1)
        self._both = [
            first,
            {name: tensor + STEP * torch.randn(tensor.shape, generator=random) for name, tensor in first.items()},
        ]
        self.nbytes = sum(tensor.nbytes for tensor in first.values())

    def tensors(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._both[version % 2].items())

    def bfloat16_ratio(self) -> float:
        """Bytes of the largest tensor by bytes of its difference, if the weights are kept in bfloat16."""
        name = max(self._both[0], key=lambda name: self._both[0][name].nbytes)
        old, new = (tensors[name].to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1) for tensors in self._both)
        return len(new) / max(1, sum(map(len, compress(old, np.ascontiguousarray(new), 2))))


def make_model(path: Path, megabytes: int) -> Versions:
    """A random checkpoint of about so many megabytes, with a tokenizer of bytes."""
    if megabytes not in SHAPES:
        raise SystemExit(f"--sizes {megabytes}: known are {', '.join(map(str, SHAPES))}")
    hidden, layers = SHAPES[megabytes]
    shape = TinyRecipe(
        hidden_size=hidden, num_layers=layers, num_heads=hidden // 64, num_kv_heads=hidden // 128,
        intermediate_size=4 * hidden, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    make_tiny_checkpoint(path, shape)
    return Versions(path)


Kind = Literal["recorder", "embedded", "sglang"]
LIMIT_S: Final = 600.0
SHARED: Final = re.compile(rb"/(torch_\d+_\d+_\d+)")


def count_touched() -> Counter[str]:
    """Bytes that are copied on their way out, digested, and copied on their way in, from now on."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str, what: str, nbytes: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def call(*given: Any) -> Any:
            counts[what] += nbytes(*given)
            return original(*given)

        setattr(owner, name, call)

    counted(shared_memory_writer._ParallelWrite, "_copy", "copied out", lambda writing, number, nbytes, *ends: nbytes)
    counted(shared_memory_writer, "digest_of", "digested out", len)
    counted(shared_memory_reader, "digest_of", "digested in", len)
    counted(shared_memory_reader.SlotReader, "between", "copied in", lambda slot, start, end: end - start)
    return counts


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
        calls: dict[str, Callable[[dict[str, Any]], None]] = {
            **dict.fromkeys(("pause_generation", "continue_generation", "begin_weight_update"), self._begin),
            "end_weight_update": self._end,
            "update_weights_from_disk": self._disk,
            "update_weights_from_tensor": self._tensor,
            "init_weights_update_group": self._join,
            "destroy_weights_update_group": self._leave,
            "update_weights_from_distributed": self._receive,
        }

        async def serve(http: web.Request) -> web.Response:
            body = await http.json()
            await asyncio.to_thread(calls[http.match_info["call"]], body)
            self.label = body.get("weight_version") or self.label
            return web.json_response({"success": True, "message": "", "status": "ok"})

        app.router.add_post(f"/{{call:{'|'.join(calls)}}}", serve)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/model_info", self._info)
        return app

    async def _info(self, http: web.Request) -> web.Response:
        return web.json_response({"device": "cpu", "tp_size": 1, "weight_version": self.label})

    def _begin(self, body: dict[str, Any]) -> None:
        self.at = 0

    def _end(self, body: dict[str, Any]) -> None:
        for name in self._shared:  # the reference that an unpickling reader would give back
            Path("/dev/shm", name).unlink(missing_ok=True)
        self._shared.clear()

    def _disk(self, body: dict[str, Any]) -> None:
        path = Path(body["model_path"]) / "model.safetensors"
        self._load(path, read_layout(path).data_start)

    def _load(self, path: Path, start: int) -> None:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            self._take(mapped, start)

    def _tensor(self, body: dict[str, Any]) -> None:
        name = SHARED.search(base64.b64decode(body["serialized_named_tensors"][0]))
        assert name is not None, "a payload names its shared memory"
        self._shared.add(name[1].decode())
        self._load(Path("/dev/shm", name[1].decode()), 0)

    def _join(self, body: dict[str, Any]) -> None:
        limit = timedelta(seconds=60)
        store = dist.TCPStore(body["master_address"], body["master_port"], 2, False, limit)
        name = body["group_name"]
        nested = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self._group = dist.ProcessGroupGloo(nested, 1, 2, limit)

    def _leave(self, body: dict[str, Any]) -> None:
        self._group = None

    def _receive(self, body: dict[str, Any]) -> None:
        shapes = zip(body["shapes"], body["dtypes"], strict=True)
        nbytes = sum(int(np.prod(shape)) * getattr(torch, kind).itemsize for shape, kind in shapes)
        arrived = torch.empty(nbytes, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([arrived], options).wait()
        self._take(memoryview(arrived.numpy()))

    def _take(self, memory: mmap.mmap | memoryview, start: int = 0) -> None:
        data = np.frombuffer(memory, np.uint8)[start:]  # not kept: the map is closed
        end = min(self.at + len(data), len(self.received))
        np.copyto(self.received[self.at : end], data[: end - self.at])
        self.at = end


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

    async def publish(self, route: str, *, base: bool = False) -> tuple[float, float]:
        """Publish the next version by a route; seconds until it landed everywhere, and of one engine's stall."""
        if route == "delta" and not base:  # what the difference is to: the versions between came by other routes
            await self.publish(route, base=True)
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
