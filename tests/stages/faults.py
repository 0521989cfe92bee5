"""Faults between the stage and its engines: a proxy that breaks, hangs and lies, and a router without a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from models.engines.http_client import DROPPED
from tests.other_programs import served_app


class FaultProxy:
    """Passes bytes to and from an engine, until told otherwise. Its address is the engine's for everybody else."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self.target = (host, int(port))
        self.url = ""
        self.refused = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._status = 0
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    def cut(self) -> None:
        """Break every connection; new ones are served."""
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()
        self._pairs.clear()

    def kill(self) -> None:
        """As kill -9: connections break, new ones are refused."""
        if self._server is not None:
            self._server.close()
        self.cut()

    def stall(self) -> None:
        """As SIGSTOP: connections stand, nothing moves."""
        self._flowing.clear()

    def answer_generate_with(self, status: int) -> None:
        """Answer /generate with this status, and all else as before; 0: as before."""
        self._status = status

    def break_with(self, payload: dict[str, Any]) -> None:
        """Put an event into every open stream, then break it."""
        event = b"data: " + json.dumps(payload).encode() + b"\n\n"
        for client, _ in self._pairs:
            with contextlib.suppress(RuntimeError):  # closed already
                client.write(b"%x\r\n%s\r\n" % (len(event), event))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        self._pairs.append((writer, up_writer))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump(reader, up_writer, writer))
            tasks.create_task(self._pump(up_reader, writer, None))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: asyncio.StreamWriter | None
    ) -> None:
        """Waits for bytes; ends with either side's connection."""
        with contextlib.suppress(OSError):  # the other side has gone
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                if self._status and answer is not None and data.startswith(b"POST /generate"):
                    self.refused += 1
                    body = b'{"error":"out of order"}'
                    head = f"HTTP/1.1 {self._status} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                    answer.write(head.encode() + body)
                    await answer.drain()
                    break
                writer.write(data)
                await writer.drain()
        writer.close()
        if answer is not None and self._status:
            answer.close()


@dataclass
class FakeRouter:
    """The worker API and the /generate of sglang-router: round robin, fields dropped, adding and removing by a look."""

    kind: str = "sglang"
    url: str = ""
    posts: list[str] = field(default_factory=list)
    deletes: list[str] = field(default_factory=list)
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)  # worker, body, headers
    workers: dict[str, bool] = field(default_factory=dict)  # address -> healthy
    broken: bool = False  # answers everything with 500
    adds: bool = True  # False: accepts, and never lists
    lingering: set[str] = field(default_factory=set)  # listed as unhealthy after their removal
    conflict: set[str] = field(default_factory=set)  # POST answers 409
    roles: dict[str, dict[str, Any]] = field(default_factory=dict)  # address -> worker_type, bootstrap_port

    async def __aenter__(self) -> FakeRouter:
        app = web.Application(middlewares=[self._faults])
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        app.router.add_post("/generate", self._generate)
        self._stack = AsyncExitStack()
        served = served_app(app, shutdown_timeout=0.1, handler_cancellation=True)
        self.url = await self._stack.enter_async_context(served)
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @web.middleware
    async def _faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.broken:
            return web.json_response({"error": "broken"}, status=500)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _list(self, request: web.Request) -> web.Response:
        listed = [
            {"id": f"id-{url}".replace("/", "_"), "url": url, "is_healthy": ok, **self.roles.get(url, {})}
            for url, ok in self.workers.items()
        ]
        return web.json_response({"workers": listed, "total": len(listed)})

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        url = body.pop("url")
        self.posts.append(url)
        if url in self.conflict or (self.kind == "smg" and url in self.workers):
            return web.json_response({"error": "exists"}, status=409)
        if self.adds:
            self.workers[url], self.roles[url] = True, {"worker_type": "regular", **body}
        return web.json_response({"status": "accepted", "worker_id": url}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        url = next((u for u in self.workers if f"id-{u}".replace("/", "_") == wanted), None)
        if url is None:
            return web.json_response({"error": "not found"}, status=404)
        self.deletes.append(url)
        if url in self.lingering:
            self.workers[url] = False
        else:
            del self.workers[url]
        return web.json_response({"status": "accepted"}, status=202)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        healthy = [url for url, ok in self.workers.items() if ok]
        if not healthy:
            return web.json_response({"error": {"message": "No available workers"}}, status=503)
        url = healthy[len(self.requests) % len(healthy)]
        body = await request.json()
        for name in DROPPED[self.kind][0]:
            body.pop(name, None)
        self.requests.append((url, body, dict(request.headers)))
        async with self._session.post(f"{url}/generate", json=body) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await response.prepare(request)
            async for data in upstream.content.iter_any():
                await response.write(data)
        await response.write_eof()
        return response
