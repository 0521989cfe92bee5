"""HTTP exchanges with one server (an engine, a router), whole or streamed, with its failures as `EngineError`.

Invariants: nothing is sent twice; whoever is cancelled in an exchange closes its connection, by which the server learns
of it; every failure of the transport has one of the types of `models.engines.errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from models.engines.answers import UNDECODABLE
from models.engines.errors import (
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnreachable,
)
from models.engines.protocol import ErrorBody, ErrorDetail, error_words
from models.engines.streamed import DONE, EventLines, PartialOutputs, StreamBroken
from models.engines.token import Token

T = TypeVar("T")
MOST_BYTES: Final = 64 << 20  # of an answer that follows from no request for tokens
MOST_REST: Final = 64 << 10  # behind a stream's last word
UNAUTHORIZED: Final = (401, 403)
_JSON_HEADERS: Final = {"Content-Type": "application/json"}
_KEEPALIVE_S: Final = 4.0  # below the 5 s after which SGLang's server closes an idle connection


class HttpClient:
    """Connections to `base_url` ("http://host:port"). Their number has no bound."""

    def __init__(self, base_url: str, *, connect_timeout_s: float, token: Token | None = None) -> None:
        """`token`: what the server wants to be sent with each request."""
        self.base_url, self._token = base_url.rstrip("/"), token
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests in flight are aborted by the server."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        payload: Struct | Mapping[str, object] | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        most_bytes: int | None = None,
    ) -> bytes:
        """One exchange, returning the body. Waits for the answer; unblocked by it, by the timeout or by a lost
        connection. Raises `EngineProtocolError` for one of more than `most_bytes` (default 64 MiB)."""
        async with self._answer(method, path, payload, timeout_s, headers) as response:
            return await self._read(path, response, most_bytes or MOST_BYTES)

    async def health(self) -> bool:
        """True if the server answers and says that it is well; False if nothing answers."""
        return await self.is_ok("/health")

    async def is_ok(self, path: str) -> bool:
        """True if a GET is answered with success within the time of a connection."""
        try:
            await self.call("GET", path, None, self._connect_timeout_s)
        except (EngineUnreachable, EngineTimeout, EngineRefused):
            return False
        return True

    def decode(self, path: str, body: bytes, kind: type[T]) -> T:
        """The JSON that `path` answered. Raises `EngineProtocolError`."""
        try:
            return msgspec.json.decode(body, type=kind)
        except UNDECODABLE as error:
            raise EngineProtocolError(
                self.base_url, f"{path} answered {body[:200]!r}, which does not decode: {error}"
            ) from error

    async def stream(
        self, path: str, payload: Struct, timeout_s: float, headers: Mapping[str, str] | None, partial: PartialOutputs
    ) -> None:
        """POST, and feed the events of the answer to `partial` until the stream says that it is done. Waits for the
        next piece; unblocked by it, by the timeout or by a lost connection."""
        lines, done, rest = EventLines(), False, 0
        async with self._answer("POST", path, payload, timeout_s, headers) as response:
            try:
                # Read to the very end, which comes right after [DONE]: only then is the connection used again.
                async for data in _pieces(response):
                    rest += len(data) if done else 0
                    if rest > MOST_REST:
                        break  # it says more after its last word: the connection is not used again
                    for event in lines.feed(data):
                        done = done or event == DONE
                        if not done:
                            self._take(path, event, partial)
                    if lines.waiting > partial.most_bytes:
                        raise EngineProtocolError(
                            self.base_url, f"{path} streamed {lines.waiting} bytes without an end of line"
                        )
            except aiohttp.ClientError:
                if not done:  # else nothing is missing
                    raise
        if not done:
            raise EngineUnreachable(self.base_url, f"the stream of {path} ended without [DONE]")

    def _take(self, path: str, event: bytes, partial: PartialOutputs) -> None:
        try:
            error = partial.take(event)
        except (StreamBroken, *UNDECODABLE) as broken:
            raise EngineProtocolError(self.base_url, f"{path} streamed {event[:200]!r}: {broken}") from broken
        if error is not None:
            raise self._streamed_error(path, error)

    def _streamed_error(self, path: str, error: ErrorDetail | str) -> EngineError:
        code = error.code if isinstance(error, ErrorDetail) else None
        words = error_words(error)
        if isinstance(code, int) and 400 <= code < 500:
            return EngineRefused(self.base_url, code, words)
        return EngineUnreachable(self.base_url, f"{path} streamed the error {code or ''}: {words}")

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        payload: Struct | Mapping[str, object] | None,
        timeout_s: float,
        headers: Mapping[str, str] | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful answer whose body is still to be read."""
        data = None if payload is None else msgspec.json.encode(payload)
        limits = aiohttp.ClientTimeout(total=timeout_s, connect=None, sock_connect=self._connect_timeout_s)
        sent = {**_JSON_HEADERS, **(headers or {})}
        if self._token is not None:
            sent["Authorization"] = self._token.header
        with self._typed(path, timeout_s):
            async with self._open().request(
                method, self.base_url + path, data=data, headers=sent, timeout=limits
            ) as response:
                if response.status >= 400:
                    self._refuse(path, response.status, await self._read(path, response, MOST_BYTES))
                yield response

    async def _read(self, path: str, response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
        """The body. Waits for its end, or until it is longer than an answer can be."""
        parts, count = [], 0
        async for data in _pieces(response):
            parts.append(data)
            count += len(data)
            if count > most_bytes:
                raise EngineProtocolError(self.base_url, f"{path} answered with more than {most_bytes} bytes")
        return b"".join(parts)

    @contextmanager
    def _typed(self, path: str, timeout_s: float) -> Iterator[None]:
        """Turns the transport's exceptions into ours."""
        try:
            yield
        except aiohttp.ServerTimeoutError as error:
            raise EngineUnreachable(
                self.base_url, f"no connection within connect_timeout_s={self._connect_timeout_s:g}"
            ) from error
        except asyncio.TimeoutError as error:  # noqa: UP041 - aiohttp's timeouts derive from this name
            raise EngineTimeout(self.base_url, timeout_s) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise EngineUnreachable(self.base_url, f"{type(error).__name__}: {error}") from error
        except aiohttp.ClientError as error:
            raise EngineProtocolError(self.base_url, f"{path}: {type(error).__name__}: {error}") from error

    def _refuse(self, path: str, status: int, body: bytes) -> None:
        if status >= 500:
            raise EngineUnreachable(self.base_url, f"{path} answered {status}: {_words(body)}")
        if status in UNAUTHORIZED:
            raise EngineUnauthorized(self.base_url, status, _words(body), self._token is not None)
        raise EngineRefused(self.base_url, status, _words(body))

    def _open(self) -> aiohttp.ClientSession:
        """The session is made at the first call, for it belongs to the event loop that runs then."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        if self._session.closed:  # `close` is at work: the server has been given up
            raise aiohttp.ClientConnectionError("the client is being closed")
        return self._session


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it comes. aiohttp has a plain RuntimeError for who reads on while the connection is being closed, as
    it is by `close` when the server has been given up."""
    while True:
        try:
            data = await response.content.readany()
        except RuntimeError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        if not data:
            return
        yield data


def _words(body: bytes) -> str:
    """What a refusal says, whichever of the protocol's shapes it has."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).words or body[:500].decode(errors="replace")
    except UNDECODABLE:
        return body[:500].decode(errors="replace")
