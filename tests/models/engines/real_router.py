"""The real sglang-router as a process, and a worker that writes down what reaches it."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from models.engines.access_token import TokenFile
from models.engines.launch.command import Launch, with_token
from tests.other_programs import free_port, served_app
from tests.sglang_server import needs_sglang

READY_S = 120.0
# As a run starts it (models/engines/launch/inside.py), but without a token.
MODULE = "sglang_router.launch_router"
RUN = f"import runpy, sys; sys.modules['sglang'] = None; runpy.run_module({MODULE!r}, run_name='__main__')"
ROUTER_VERSION = "0.3.2"


@contextmanager
def router_process(
    directory: Path, policy: str = "round_robin", *more: str, token: TokenFile | None = None
) -> Iterator[str]:
    """The address of a router without workers. Skips the test where it is not installed."""
    python = needs_sglang()
    start = [str(python), "-c", RUN]
    if token is not None:
        module = (str(python), "-m", MODULE)
        start = [*with_token(Launch(module, {}, ""), token.path, hidden="sglang").argv]
    version = f"from importlib.metadata import version; assert version('sglang-router') == '{ROUTER_VERSION}'"
    if subprocess.run([python, "-c", version], capture_output=True, cwd=directory).returncode:
        pytest.skip(f"sglang-router {ROUTER_VERSION} is not installed beside SGLang; run `make sglang-env`")
    url = f"http://127.0.0.1:{free_port()}"
    command = [*start, "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1]]
    command += ["--policy", policy, "--prometheus-port", str(free_port()), "--disable-retries", *more]
    with (directory / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=directory)
        try:
            _wait(process, url, directory / "router.log")
            yield url
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise AssertionError(f"the router did not come up: {log.read_text(errors='replace')[-2000:]}")


class Recorder:
    """A worker: well, and with an answer to everything. Keeps the bodies of /generate, and the tokens with them."""

    def __init__(self, answer: str = '{"text":"","output_ids":[1],"meta_info":{"id":"x","of_its_own":[1.50]}}') -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[list[str]] = []  # all headers of that name, in their order
        self.url = ""

    async def __aenter__(self) -> Recorder:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        for path in ("/health", "/server_info", "/model_info", "/get_load"):
            app.router.add_get(path, self._empty)
        self._stack = AsyncExitStack()
        self.url = await self._stack.enter_async_context(served_app(app))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _empty(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        self.bodies.append(json.loads(await request.read()))
        self.tokens.append(request.headers.getall("Authorization", []))
        return web.Response(text=self.answer, content_type="application/json")
