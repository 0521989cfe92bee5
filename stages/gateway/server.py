"""The gateway: an HTTP server with the APIs of model servers, which stands for the trained policy.

An agent gets an address and a key (`Endpoint` of stages/agents/environment.py). The key identifies the session: all
requests with it, in any dialect, belong to one rollout.

Invariants: a request without the key of an open session is refused; a disconnected client ends its request; refusals
have the form of the request's dialect; connections, requests and (in stages/gateway/requests.py) bodies are bounded.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from aiohttp import web

from stages.base import outcome_of
from stages.chat.messages import ChatFormatError, TooLong
from stages.gateway.answers import STATUS, Answers, Ask, Dialect, Json, OpenSession, Refused
from stages.gateway.anthropic_messages import AnthropicMessages
from stages.gateway.chat_completions import ChatCompletions
from stages.gateway.requests import Bodies, Full, Limits
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
_LINGER_S: Final = 2.0  # for which the rest of a refused body is read and dropped, so that its client reads the refusal
DEFAULT_LIMITS: Final = Limits()
Understood = tuple[Ask, Sequence[int]]  # a request, and its context in tokens


class Gateway:
    """The server. Use as an async context manager; `session` opens sessions for agents."""

    model: Final = "policy"

    def __init__(self, answers: Answers, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.url = ""
        self._answers, self._limits = answers, limits
        self._sessions: dict[bytes, OpenSession] = {}  # by the digest of the key
        self._bodies = Bodies(limits, answers.requests.max_context)

    async def __aenter__(self) -> Gateway:
        app = web.Application()
        app.add_routes([web.route("*", "/{path:.*}", self._serve)])
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # it would unpack refused bodies too, and hold up the loop
            shutdown_timeout=_SHUTDOWN_S,
            keepalive_timeout=self._limits.head_s,
            lingering_time=_LINGER_S,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._bodies.close)
            stack.push_async_callback(self._runner.cleanup)
            await self._runner.setup()
            make = asyncio.get_running_loop().create_server
            listener = await make(self._connected, HOST, 0, backlog=1024)  # any free port
            stack.callback(listener.close)
            self.url = f"http://{HOST}:{listener.sockets[0].getsockname()[1]}"
            self._stack = stack.pop_all()
        return self

    def _connected(self) -> asyncio.Protocol:
        """What answers a new connection."""
        server = self._runner.server
        return Full() if server is None or len(server.connections) >= self._limits.connections else server()

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

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
            place = self._sessions.get(_digest(_key(http.headers)))
            if place is None:
                words = "no open session has this key; send the key of the endpoint as a bearer token"
                raise Refused("no_session", words)
            if http.method == "POST" and (path in DIALECTS or path == COUNT):
                return await self._answered(http, dialect, place, answered=path != COUNT)
            if http.method == "GET" and path.startswith("/v1/models"):
                return self._models(path)
            raise Refused(
                "not_found", f"there is no {http.method} {http.path[:100]}; see docs/gateway.md for the routes"
            )
        except Exception as error:
            refused = as_refused(error)
            answer = _json(dialect.error(refused), STATUS[refused.reason])
            if answer.status in (429, 503):
                answer.headers["Retry-After"] = "1"
            return answer

    def _understood(self, dialect: Dialect, place: OpenSession, body: bytes, *, answered: bool) -> Understood:
        """The request and its context in tokens. Changes nothing, so a thread may call it. Raises Refused."""
        limits, ask = self._limits, dialect.read(body)
        if ask.conversation is not None:
            for what, n, most in (
                ("messages", len(ask.conversation.messages), limits.messages),
                ("tools", len(ask.conversation.tools), limits.tools),
            ):
                if n > most:
                    raise Refused("too_large", f"a request has {n} {what}; at most {most} are taken")
        return ask, self._answers.context(place.session, ask, answered=answered)

    async def _received(self, http: web.Request, dialect: Dialect, place: OpenSession, *, answered: bool) -> Understood:
        """The request and its context. Waits for the client and for a thread; the body is gone afterwards."""
        async with self._bodies.read(http, place) as body:
            work = partial(self._understood, dialect, place, body, answered=answered)
            return await self._bodies.work(len(body), work)

    async def _answered(
        self, http: web.Request, dialect: Dialect, place: OpenSession, *, answered: bool
    ) -> web.StreamResponse:
        """Answer a request, or count its tokens. Waits for client and engines; a client that disconnects cancels it."""
        if len(place.under_way) >= self._limits.in_flight:
            raise Refused("busy", f"this session has {len(place.under_way)} requests under way; wait for one of them")
        task = asyncio.current_task()
        assert task is not None
        place.under_way.add(task)
        try:
            ask, context = await self._received(http, dialect, place, answered=answered)
            if not answered:
                return _json({"input_tokens": len(context)})
            if ask.stream:
                return await self._streamed(http, dialect, place, ask, context)
            return _json(dialect.answer(ask, await self._answers.answer(place, ask, context)))
        except (Refused, TooLong) as error:
            place.truncated |= answered and as_refused(error).reason == "too_long"
            raise
        finally:
            place.under_way.discard(task)

    async def _streamed(
        self, http: web.Request, dialect: Dialect, place: OpenSession, ask: Ask, context: Sequence[int]
    ) -> web.StreamResponse:
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
            outcome = await outcome_of(self._answers.answer(place, ask, context))
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
            "max_model_len": self._answers.requests.max_context,
        }
        if path != "/v1/models":
            return _json({**model, "id": path.removeprefix("/v1/models/")})
        ids = {"first_id": self.model, "last_id": self.model}
        return _json({"object": "list", "data": [model], "has_more": False, **ids})


def as_refused(error: Exception) -> Refused:
    """The refusal for an exception."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, TooLong):
        return Refused("too_long", str(error))
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
