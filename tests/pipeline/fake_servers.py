"""A fake SGLang server, a controller that writes down what it is told, and patience."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from launching import alive

from configs.schema import Config
from models.engines.client import EngineClient
from pipeline.facts.run_directory import EngineSpec
from pipeline.supervise.health_probe import HttpProbe
from stages.base import TrainOptions
from stages.topic_values import RouterAddress

PATIENCE_S = 20.0

# Serves /health and /server_info like an SGLang server: an HTTP process, and a scheduler that only /server_info asks.
FAKE = """
import http.server, json, os, signal, subprocess, sys, threading, time
port, mode = int(sys.argv[1]), sys.argv[2]
if mode == "broken":
    print("loading"); print("ValueError: the checkpoint has no head"); print("a child failed", flush=True); sys.exit(1)
if mode == "never":
    print("still loading", flush=True); time.sleep(600)
loop = "import sys\\nfor line in sys.stdin: print('here', flush=True)"
child = subprocess.Popen([sys.executable, "-c", loop], stdin=-1, stdout=-1, text=True)
lock = threading.Lock()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = b"{}"
        if self.path == "/server_info":
            with lock:
                child.stdin.write("\\n"); child.stdin.flush(); child.stdout.readline()
            body = json.dumps({"version": "9.9", "child": child.pid}).encode()
        if self.path == "/model_info":
            body = json.dumps({"architectures": [mode], "vocab_size": 32}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer.daemon_threads = True
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Told:
    """A controller that writes down what it is told."""

    def __init__(self, *, resumable: bool = True) -> None:
        self.resumable = resumable
        self.events: list[tuple[str, ...]] = []
        self.lines: list[str] = []
        self.is_loading = False
        self.complaints: dict[tuple[str, int], str] = {}

    def lost(self, stage: str, name: str, why: str) -> None:
        self.events.append(("lost", stage, name, why))

    def engine_up(self, spec: EngineSpec, url: str, incarnation: int, version: str) -> None:
        self.events.append(("up", spec.name, url, str(incarnation), version))

    def away(self, kind: str, name: str, url: str, why: str) -> None:
        self.events.append(("away", name, why))

    def router_up(self, address: RouterAddress, version: str, metrics: str) -> None:
        self.events.append(("router", address.kind, address.url, str(address.incarnation), version))

    def loading(self, name: str) -> bool:
        return self.is_loading

    def complaint(self, name: str, incarnation: int) -> str | None:
        return self.complaints.get((name, incarnation))

    async def trainer_state(self, lost: TrainOptions) -> TrainOptions | None:
        return msgspec.structs.replace(lost, incarnation=lost.incarnation + 1) if self.resumable else None

    def say(self, line: str) -> None:
        self.lines.append(line)

    async def until(self, what: str, times: int = 1) -> tuple[str, ...]:
        """Wait for the n-th event of a kind."""
        await eventually(lambda: len(self._of(what)) >= times)
        return self._of(what)[times - 1]

    def _of(self, what: str) -> list[tuple[str, ...]]:
        return [event for event in self.events if event[0] == what]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  (what is waited for announces nothing)
            await asyncio.sleep(0.02)


def configured(**health: float) -> Config:
    """Looks at servers often, and with little patience."""
    quick = {"interval": 0.05, "timeout": 0.5, "failures": 2}
    settings = {**{f"rollout_health_check_{name}": value for name, value in quick.items()}, **health}
    return msgspec.convert({"health": settings}, Config)


def gone(pid: int) -> bool:
    return not alive(pid)


async def scheduler(client: EngineClient) -> int:
    """Number of the fake's second process."""
    return int(msgspec.json.decode(await client.call("GET", "/server_info", None, 5.0))["child"])


@contextlib.asynccontextmanager
async def outside(script: Path, port: int, mode: str = "Tiny") -> AsyncIterator[asyncio.subprocess.Process]:
    """The fake server, started by somebody else."""
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), str(port), mode, start_new_session=True)
    try:
        async with EngineClient(f"http://127.0.0.1:{port}") as client:
            look = HttpProbe(client, 1.0)
            await eventually(lambda: connects(port))
            assert await look() is None
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
