"""A server that gives prepared answers: a reward model, or an engine that judges."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.other_programs import served_app

Answer = web.Response | Callable[[web.Request], Awaitable[web.StreamResponse]]


class AnswerServer:
    """Gives the answers in order, the last one for ever; keeps the requests."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.bodies: list[Any] = []
        self.keys: list[str] = []
        self.open = self.most_open = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            self.bodies.append(await request.json())
            self.keys.append(request.headers.get("Idempotency-Key", ""))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, web.Response):
                return web.Response(body=answer.body, status=answer.status, headers=answer.headers)
            return await answer(request)
        finally:
            self.open -= 1

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()


@asynccontextmanager
async def answering(path: str, *answers: object) -> AsyncIterator[tuple[str, AnswerServer]]:
    """The server's address, and the server. An answer that is neither a response nor a function is sent as JSON."""
    server = AnswerServer([a if isinstance(a, web.Response) or callable(a) else web.json_response(a) for a in answers])
    application = web.Application(client_max_size=1 << 30)
    application.router.add_post(path, server.handle)
    application.router.add_get("/health", server.health)
    async with served_app(application, shutdown_timeout=0.1) as url:
        yield url, server
