"""HTTP exchanges with one server, whole or streamed; and the worker API of a router in front of the engines.

Invariants: nothing is sent twice; a cancelled exchange closes its connection, and so the server notices; every failure
of the transport has one of the types of `models.errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Self, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from models import errors
from models.engines.access_token import Token
from models.engines.answers import UNDECODABLE
from models.engines.protocol import ErrorBody, ErrorDetail, GenerateRequest, SamplingParams, decoder, error_words
from models.engines.streamed import DONE, EventLines, PartialOutputs, StreamBroken

T = TypeVar("T")
Payload = Struct | Mapping[str, object] | None
Headers = Mapping[str, str] | None
MOST_BYTES: Final = 64 << 20  # of an answer to a request that is not /generate
MOST_REST: Final = 64 << 10  # after a stream's [DONE]
UNAUTHORIZED: Final = (401, 403)
_JSON_HEADERS: Final = {"Content-Type": "application/json"}
_KEEPALIVE_S: Final = 4.0  # below the 5 s after which SGLang's server closes an idle connection


class HttpClient:
    """Connections to `base_url` ("http://host:port"). Their number has no bound."""

    def __init__(self, base_url: str, *, connect_timeout_s: float, token: Token | None = None) -> None:
        """`token`: sent with each request."""
        self.base_url, self._token = base_url.rstrip("/"), token
        self._headers = _JSON_HEADERS | ({"Authorization": token.header} if token is not None else {})
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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
        payload: Payload,
        timeout_s: float,
        headers: Headers = None,
        most_bytes: int | None = None,
    ) -> bytes:
        """One exchange, returning the body. Waits for the answer; unblocked by it, by the timeout or by a lost
        connection. Raises `EngineProtocolError` for one of more than `most_bytes` (default 64 MiB)."""
        async with self._answer(method, path, payload, timeout_s, headers) as response:
            return await self._read(path, response, most_bytes or MOST_BYTES)

    async def health(self) -> bool:
        """True if the server reports health; False if it is unhealthy or does not answer."""
        return await self.is_ok("/health")

    async def is_ok(self, path: str) -> bool:
        """True if a GET is answered with success within the time of a connection."""
        try:
            await self.call("GET", path, None, self._connect_timeout_s)
        except (errors.EngineUnreachable, errors.EngineTimeout, errors.EngineRefused):
            return False
        return True

    def decode(self, path: str, body: bytes, kind: type[T]) -> T:
        """The JSON that `path` answered. Raises `EngineProtocolError`."""
        try:
            return decoder(kind).decode(body)
        except UNDECODABLE as error:
            raise errors.EngineProtocolError(
                self.base_url, f"{path} answered {body[:200]!r}, which does not decode: {error}"
            ) from error

    async def stream(
        self, path: str, payload: Struct, timeout_s: float, headers: Headers, partial: PartialOutputs
    ) -> None:
        """POST, and feed the events of the answer to `partial` until the stream sends [DONE]. Waits for the
        next piece; unblocked by it, by the timeout or by a lost connection."""
        lines, done, rest = EventLines(), False, 0
        async with self._answer("POST", path, payload, timeout_s, headers) as response:
            try:
                # Read to the very end, which comes right after [DONE]: only then is the connection used again.
                async for data in _pieces(response):
                    rest += len(data) if done else 0
                    if rest > MOST_REST:
                        break  # the server sends more after [DONE]: the connection is not used again
                    for event in lines.feed(data):
                        done = done or event == DONE
                        if not done:
                            self._take(path, event, partial)
                    if lines.waiting > partial.most_bytes:
                        raise errors.EngineProtocolError(
                            self.base_url, f"{path} streamed {lines.waiting} bytes without an end of line"
                        )
            except aiohttp.ClientError:
                if not done:  # else nothing is missing
                    raise
        if not done:
            raise errors.EngineUnreachable(self.base_url, f"the stream of {path} ended without [DONE]")

    def _take(self, path: str, event: bytes, partial: PartialOutputs) -> None:
        try:
            error = partial.take(event)
        except (StreamBroken, *UNDECODABLE) as broken:
            raise errors.EngineProtocolError(self.base_url, f"{path} streamed {event[:200]!r}: {broken}") from broken
        if error is None:
            return
        code, words = error.code if isinstance(error, ErrorDetail) else None, error_words(error)
        if isinstance(code, int) and 400 <= code < 500:
            raise errors.EngineRefused(self.base_url, code, words)
        raise errors.EngineUnreachable(self.base_url, f"{path} streamed the error {code or ''}: {words}")

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, payload: Payload, timeout_s: float, headers: Headers
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful answer whose body is still to be read."""
        data = None if payload is None else msgspec.json.encode(payload)
        limits = aiohttp.ClientTimeout(total=timeout_s, connect=None, sock_connect=self._connect_timeout_s)
        sent = {**headers, **self._headers} if headers else self._headers
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
                raise errors.EngineProtocolError(self.base_url, f"{path} answered with more than {most_bytes} bytes")
        return b"".join(parts)

    @contextmanager
    def _typed(self, path: str, timeout_s: float) -> Iterator[None]:
        """Turns exceptions of the transport into `EngineError`s."""
        try:
            yield
        except aiohttp.ServerTimeoutError as error:
            raise errors.EngineUnreachable(
                self.base_url, f"no connection within connect_timeout_s={self._connect_timeout_s:g}"
            ) from error
        except asyncio.TimeoutError as error:  # noqa: UP041 - aiohttp's timeouts derive from this name
            raise errors.EngineTimeout(self.base_url, timeout_s) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise errors.EngineUnreachable(self.base_url, f"{type(error).__name__}: {error}") from error
        except aiohttp.ClientError as error:
            raise errors.EngineProtocolError(self.base_url, f"{path}: {type(error).__name__}: {error}") from error

    def _refuse(self, path: str, status: int, body: bytes) -> None:
        if status >= 500:
            raise errors.EngineUnreachable(self.base_url, f"{path} answered {status}: {_words(body)}")
        if status in UNAUTHORIZED:
            raise errors.EngineUnauthorized(self.base_url, status, _words(body), self._token is not None)
        raise errors.EngineRefused(self.base_url, status, _words(body))

    def _open(self) -> aiohttp.ClientSession:
        """The session is made at the first call, for it belongs to the event loop that runs then."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=True)
        if self._session.closed:  # `close` is running: the owner has abandoned the server
            raise aiohttp.ClientConnectionError("the client is being closed")
        return self._session


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body piece by piece. aiohttp raises a plain RuntimeError in a read while `close` closes the connection, as it
    does for an abandoned server."""
    while True:
        try:
            data = await response.content.readany()
        except RuntimeError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        if not data:
            return
        yield data


def _words(body: bytes) -> str:
    """The text of a refusal, in any of the protocol's shapes."""
    try:
        refusal = msgspec.json.decode(body, type=ErrorBody)
        words = error_words(refusal.error) if refusal.error is not None else refusal.message
        return words or body[:500].decode(errors="replace")
    except UNDECODABLE:
        return body[:500].decode(errors="replace")


# --------------------------------------------------------------------------------------------------
# Routers: their worker API, and the fields of a request that they lose.
#
# Two kinds of one code line: `sglang` (sglang-router 0.3.2) and `smg` (1.13.0). Both forward /generate only; control
# calls go to the engines themselves. Both parse a request's body and write it again, so they lose fields that they do
# not know or know wrongly. The tables below were measured with every field set, and a test pins them.
#
# Adding a worker is asynchronous (1-3 s until the router lists it), and a removed worker may stay listed for a second:
# the owner of the list reads it again.


ROUTING_KEY_HEADER: Final = "X-SMG-Routing-Key"  # requests of one key go to one engine, with the right policy
REGULAR: Final = "regular"  # worker type of an engine that does everything
CONFLICT: Final = 409  # smg's answer to a worker that it has, or has not forgotten yet
NOT_FOUND: Final = 404


_DROPPED_BY_BOTH: Final = frozenset({"stop_regex", "spaces_between_special_tokens", "stream_interval", "logit_bias"})
# By kind of router: the fields that it drops at the top of a body, and among the sampling parameters.
DROPPED: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {
    "sglang": (
        frozenset({"routing_key", "return_routed_experts", "routed_experts_start_len", "input_logprob_temperature"}),
        _DROPPED_BY_BOTH | {"custom_params"},
    ),
    "smg": (frozenset(), _DROPPED_BY_BOTH),
}


def lost_fields(kind: str, request: GenerateRequest) -> tuple[str, ...]:
    """Names of the fields that are set in the request and that a router of this kind would not forward."""
    at_top, in_params = DROPPED[kind]
    lost = [name for name in _set_fields(request) if name in at_top]
    params = request.sampling_params
    for sample in params if isinstance(params, list) else [params]:
        lost += [f"sampling_params.{name}" for name in _set_fields(sample) if name in in_params]
    return tuple(dict.fromkeys(lost))


def _set_fields(struct: GenerateRequest | SamplingParams) -> list[str]:
    """Fields with another value than their default."""
    plain = type(struct)()
    return [name for name in struct.__struct_fields__ if getattr(struct, name) != getattr(plain, name)]


class Role(Struct, frozen=True, omit_defaults=True):
    """What an engine does for the router; these fields are part of the body that adds it."""

    worker_type: str = REGULAR  # or prefill and decode, where these are apart
    bootstrap_port: int | None = None  # of a prefill worker: where decode workers fetch the KV cache


class RouterWorker(Role, frozen=True, kw_only=True):
    """An engine as the router lists it."""

    id: str
    url: str
    is_healthy: bool = True


class _Workers(Struct, frozen=True):
    workers: list[RouterWorker] = []


class _NewWorker(Role, frozen=True, omit_defaults=True, kw_only=True):
    url: str
    api_key: str | None = None


class RouterClient(HttpClient):
    """Worker API of the router at `base_url`. Raises the errors of `EngineClient`. A router that is well may have no
    worker."""

    def __init__(self, base_url: str, *, timeout_s: float = 10.0, token: Token | None = None) -> None:
        super().__init__(base_url, connect_timeout_s=timeout_s, token=token)
        self._timeout_s = timeout_s

    async def workers(self) -> list[RouterWorker]:
        """All workers, also those that are being removed (not healthy then)."""
        body = await self.call("GET", "/workers", None, self._timeout_s)
        return list(self.decode("/workers", body or b"{}", _Workers).workers)

    async def add(self, url: str, role: Role | None = None, token: Token | None = None) -> bool:
        """Ask for a worker; it is listed seconds later. False if the router still has one at this address. `token`:
        the router sends it to the worker."""
        role, key = role or Role(), token.text if token is not None else None
        new = _NewWorker(url=url, worker_type=role.worker_type, bootstrap_port=role.bootstrap_port, api_key=key)
        try:
            await self.call("POST", "/workers", new, self._timeout_s)
        except errors.EngineRefused as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    async def remove(self, worker: RouterWorker) -> None:
        """Have a worker taken out; new requests go elsewhere at once. No error if it has gone."""
        try:
            await self.call("DELETE", f"/workers/{worker.id}", None, self._timeout_s)
        except errors.EngineRefused as error:
            if error.status != NOT_FOUND:
                raise


def urls(workers: Sequence[RouterWorker], *, healthy: bool = False) -> frozenset[str]:
    """Addresses of the workers, or of those that the router sends requests to."""
    return frozenset(w.url.rstrip("/") for w in workers if w.is_healthy or not healthy)
