"""The gateway: an HTTP server with the APIs of model servers, which stands for the trained policy.

An agent gets an address and a key (`Endpoint` of stages/agents/environment.py). The key identifies the session: all
requests with it, in any dialect, belong to one rollout.

Invariants: a request without the key of an open session is refused; a disconnected client ends its request; refusals
have the form of the request's dialect; request size and concurrent requests are bounded.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Struct

from stages.base import outcome_of
from stages.chat.messages import ChatFormatError
from stages.gateway.answers import STATUS, Answers, Ask, Dialect, Json, OpenSession, Refused
from stages.gateway.anthropic_messages import AnthropicMessages
from stages.gateway.chat_completions import ChatCompletions
from stages.gateway.responses import Responses
from stages.gateway.token_routes import SglangGenerate, VllmGenerate

log = logging.getLogger("sluice.gateway")

DIALECTS: Final[Mapping[str, Dialect]] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": AnthropicMessages(),
    "/inference/v1/generate": VllmGenerate(),
    "/generate": SglangGenerate(),
}
HOST: Final = "127.0.0.1"
COUNT: Final = "/v1/messages/count_tokens"
COMMENT_S: Final = 10.0  # interval of keep-alive comments in a stream
_SHUTDOWN_S: Final = 1.0


class Limits(Struct, frozen=True):
    """Limits of one client."""

    body_bytes: int = 64 << 20
    messages: int = 10_000
    tools: int = 1_000
    in_flight: int = 64  # concurrent requests of a session


DEFAULT_LIMITS: Final = Limits()


class Gateway:
    """The server. Use as an async context manager; `session` opens sessions for agents."""

    model: Final = "policy"

    def __init__(self, answers: Answers, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.url = ""
        self._answers, self._limits = answers, limits
        self._sessions: dict[bytes, OpenSession] = {}  # by the digest of the key
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Gateway:
        app = web.Application(client_max_size=self._limits.body_bytes)
        app.add_routes([web.route("*", "/{path:.*}", self._serve)])
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, 0).start()  # any free port
        except BaseException:
            await self._runner.cleanup()
            raise
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def session(self, place: OpenSession) -> Iterator[str]:
        """The key of one rollout's session; invalid after the block."""
        key = secrets.token_hex(24)  # may be an argument of a program, so it must not begin with "-"
        digest = _digest(key)
        self._sessions[digest] = place
        try:
            yield key
        finally:
            del self._sessions[digest]
            for request in tuple(place.under_way):
                request.cancel()

    # ------------------------------------------------------------------ requests

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        path = http.path.rstrip("/")
        dialect = DIALECTS.get(path) or DIALECTS["/v1/messages" if path == COUNT else "/v1/chat/completions"]
        try:
            place = self._place(http)
            if http.method == "POST" and path in DIALECTS:
                return await self._answered(http, dialect, place)
            if http.method == "POST" and path == COUNT:
                return _json({"input_tokens": self._answers.count(place, await self._read(http, dialect))})
            if http.method == "GET" and path.startswith("/v1/models"):
                return self._models(path)
            raise Refused(
                "not_found", f"there is no {http.method} {http.path[:100]}; see docs/gateway.md for the routes"
            )
        except Exception as error:
            refused = as_refused(error)
            return _json(dialect.error(refused), STATUS[refused.reason])

    def _place(self, http: web.Request) -> OpenSession:
        """The session of a request's key. Raises Refused."""
        place = self._sessions.get(_digest(_key(http.headers)))
        if place is None:
            raise Refused("no_session", "no open session has this key; send the key of the endpoint as a bearer token")
        return place

    async def _read(self, http: web.Request, dialect: Dialect) -> Ask:
        """Waits for the body. Raises Refused."""
        limits = self._limits
        try:
            ask = dialect.read(await http.read())
        except web.HTTPRequestEntityTooLarge:
            raise Refused("too_large", f"a request may have {limits.body_bytes} bytes") from None
        if ask.conversation is not None:
            for what, n, most in (
                ("messages", len(ask.conversation.messages), limits.messages),
                ("tools", len(ask.conversation.tools), limits.tools),
            ):
                if n > most:
                    raise Refused("too_large", f"a request has {n} {what}; at most {most} are taken")
        return ask

    async def _answered(self, http: web.Request, dialect: Dialect, place: OpenSession) -> web.StreamResponse:
        """Answer a request. Waits for the engines; a disconnected client cancels it."""
        ask = await self._read(http, dialect)
        if len(place.under_way) >= self._limits.in_flight:
            raise Refused("busy", f"this session has {len(place.under_way)} requests under way; wait for one of them")
        task = asyncio.current_task()
        assert task is not None
        place.under_way.add(task)
        try:
            if ask.stream:
                return await self._streamed(http, dialect, place, ask)
            return _json(dialect.answer(ask, await self._answers.answer(place, ask)))
        finally:
            place.under_way.discard(task)

    async def _streamed(self, http: web.Request, dialect: Dialect, place: OpenSession, ask: Ask) -> web.StreamResponse:
        """The whole answer as events after it is complete: clients never see a part of a trained turn. Until then the
        stream sends keep-alive comments."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def wait() -> None:
            with contextlib.suppress(ConnectionError):  # the client disconnected, which ends the request
                while True:
                    await asyncio.sleep(COMMENT_S)
                    if not response.prepared:
                        await response.prepare(http)
                    await response.write(b": wait\n\n")

        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(wait())
            outcome = await outcome_of(self._answers.answer(place, ask))
            waiting.cancel()
        if isinstance(outcome, Exception):
            if not response.prepared:
                raise outcome
            events = [dialect.error_event(as_refused(outcome))]
        else:
            events = [*dialect.events(ask, outcome)]
        with contextlib.suppress(ConnectionError):
            if not response.prepared:
                await response.prepare(http)
            await response.write(b"".join(events))
            await response.write_eof()
        return response

    def _models(self, path: str) -> web.Response:
        """One model, with the fields of OpenAI, vLLM and Anthropic."""
        model = {
            "id": self.model,
            "object": "model",
            "type": "model",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "sluice",
            "display_name": self.model,
            "root": self.model,
            "max_model_len": self._answers.max_context,
        }
        if path != "/v1/models":
            return _json({**model, "id": path.removeprefix("/v1/models/")})
        listed = {"object": "list", "data": [model], "has_more": False}
        return _json({**listed, "first_id": self.model, "last_id": self.model})


def as_refused(error: Exception) -> Refused:
    """The refusal for an exception."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ChatFormatError | RecursionError):
        return Refused("invalid", f"the conversation cannot be written for this model: {error}")
    log.error("a request failed", exc_info=error)
    return Refused("internal", f"{type(error).__name__}: {error}")


def _key(headers: Mapping[str, str]) -> str:
    """A bearer token, an `x-api-key`, or the user of an address `http://KEY@HOST`, sent as basic authentication."""
    kind, _, key = headers.get("Authorization", "").partition(" ")
    match kind.lower():
        case "bearer":
            return key.strip()
        case "basic":
            with contextlib.suppress(ValueError):  # of base64 and of UTF-8
                return base64.b64decode(key.strip()).decode().partition(":")[0]
    return headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    """Sessions are looked up by digest, so the time of a lookup reveals nothing about keys."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
