"""An engine in a thread of its own whose answers can be spoilt: a real server behind a front that lies and hangs.

Everything but what a test spoils is the real server's: it takes weights, says which it has, and is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
from aiohttp import web

from configs.schema.engine import EngineConfig
from models.engines.serve import EngineServer

Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse | None]]


class SpoiltEngine:
    """`spoil`: path -> what answers a request there, given its body; None: as the real server would."""

    def __init__(self, config: EngineConfig, model: Path | str, spoil: dict[str, Handler]) -> None:
        self.config, self.model, self.spoil = config, str(model), spoil
        self.url = ""
        self.server: EngineServer

    async def serve(self, up: threading.Event, stop: asyncio.Event) -> None:
        async with (
            EngineServer(self.config, self.model, max_context_len=None, seed=0) as self.server,
            aiohttp.ClientSession() as self._session,
        ):
            app = web.Application(client_max_size=1 << 28)
            app.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            up.set()
            await stop.wait()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if (handler := self.spoil.get(request.path)) is not None:
            answer = await handler(request, body)
            if answer is not None:
                return answer
        return await self.forward(request, body)

    async def forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """The real server's answer."""
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(
            request.method, f"{self.server.url}{request.path_qs}", data=body or None, headers=headers
        ) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                await response.write(data.replace(b'"Simulated"', b'"Qwen3ForCausalLM"'))  # who is no model of its own
        await response.write_eof()
        return response


@contextlib.contextmanager
def serving(engine: SpoiltEngine) -> Iterator[SpoiltEngine]:
    """The engine, up, for the time of a block."""
    up, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await engine.serve(up, stop)

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert up.wait(60), "the engine did not come up"
    try:
        yield engine
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)


async def never(request: web.Request, body: bytes) -> web.StreamResponse | None:
    """No answer at all."""
    await asyncio.sleep(3600)
    return None
