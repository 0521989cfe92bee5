"""Requests of all dialects: their bodies on the way into memory, and their fields.

Bodies are bounded: how large, how many at a time, how slowly. Threads read the long ones. Invariants:
- a body is refused at the first byte beyond its limit; a packed body is unpacked in pieces, as far as it is read;
- the bytes of all bodies in memory stay below a bound, those of one session below a quarter of it. Only bytes that have
  arrived count, so slow clients take no room from others;
- a body that has not arrived in time is refused;
- neither JSON nor a tokenizer holds up the event loop for a long body, and a short body never waits for a long one.

A field is either honoured, or has no effect and stands so in docs/gateway.md, or is refused with its name. Unknown
fields have no effect: clients send undocumented fields of providers.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from models.engines.protocol import decoder
from stages.chat.messages import ToolSchema
from stages.gateway.answers import Constraint, OpenSession, Refused

T = TypeVar("T")
LEAST_BODY: Final = 1 << 20  # bytes of a body that any context allows
BYTES_PER_TOKEN: Final = 32  # of a body, for each token of the context: JSON of text has 4 to 12
SHARE: Final = 4  # one session may have this part of all bytes
_INLINE: Final = 1 << 14  # bytes of a body that the event loop itself may read
_PIECE: Final = 1 << 16  # bytes that are unpacked at a time
_SHORT: Final = 1 << 18  # bytes of a body that no long one may hold up


class Limits(Struct, frozen=True):
    """Limits of one gateway; counts are of one request or session unless stated otherwise."""

    body_bytes: int = 64 << 20
    body_s: float = 60.0  # until the whole body is there
    all_bodies: int = 256 << 20  # bytes of all bodies that are being read or made tokens of
    connections: int = 4096  # of all clients
    head_s: float = 75.0  # a connection that has sent no whole head for so long is closed
    messages: int = 10_000
    tools: int = 1_000
    in_flight: int = 64  # concurrent requests of a session


class Bodies:
    """Reads the bodies of one gateway. `max_context`: tokens of the longest conversation."""

    def __init__(self, limits: Limits, max_context: int) -> None:
        self.held = 0  # bytes of all bodies in memory
        self._limits = limits
        self._most = min(limits.body_bytes, LEAST_BODY + BYTES_PER_TOKEN * max_context)
        # Two threads: short bodies in the first, long ones in the second. Threads start when they are needed.
        self._lanes = [ThreadPoolExecutor(1, "gateway-short"), ThreadPoolExecutor(1, "gateway-long")]

    def close(self) -> None:
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def read(self, http: web.Request, place: OpenSession) -> AsyncIterator[bytes]:
        """The body, which counts until the block ends. Waits for the client at most `body_s`. Raises Refused."""
        self._check(http.content_length or 0)
        if (packing := http.headers.get("Content-Encoding", "identity").lower()) not in ("identity", "gzip", "deflate"):
            raise Refused("invalid", f"Content-Encoding is {packing[:40]!r}; send gzip, deflate or no encoding")
        unpack, body, size = _unpacker(packing), bytearray(), 0
        try:
            try:
                async with asyncio.timeout(self._limits.body_s):
                    while packed := await http.content.readany():
                        for piece in unpack(packed):
                            self.held += len(piece)
                            place.body_bytes += len(piece)
                            size += len(piece)
                            body += piece
                            self._check(size)
                            most = self._limits.all_bodies
                            if self.held > most or place.body_bytes > most // SHARE:
                                raise Refused("unavailable", f"bodies have {self.held} bytes now; send it later")
            except TimeoutError:
                raise Refused("slow", f"the body did not arrive within {self._limits.body_s:g} s") from None
            except (web.RequestPayloadError, zlib.error) as error:
                raise Refused("invalid", f"the body is not what its headers say: {error}") from None
            whole = bytes(body)
            del body
            yield whole
        finally:
            self.held -= size
            place.body_bytes -= size

    async def work(self, size: int, work: Callable[[], T]) -> T:
        """The result of work on a body of so many bytes. Waits for its thread; cancelled before, it is never done."""
        if size <= _INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._lanes[size > _SHORT], work)

    def _check(self, size: int) -> None:
        if size <= self._most:
            return
        if self._most == self._limits.body_bytes:
            raise Refused("too_large", f"a request may have {self._most} bytes")
        raise Refused("too_long", f"the request has over {self._most} bytes, more than the context can hold")


def _unpacker(packing: str) -> Callable[[bytes], Iterator[bytes]]:
    """Unpacks what has arrived in pieces, so that a bomb is refused before it takes memory or time."""
    if packing == "identity":
        return lambda packed: iter((packed,))
    unpacker = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)  # 32: by its header gzip or zlib

    def unpack(packed: bytes) -> Iterator[bytes]:
        piece = bytes(_PIECE)
        while packed or len(piece) == _PIECE:
            yield (piece := unpacker.decompress(packed, _PIECE))
            packed = unpacker.unconsumed_tail
            if unpacker.unused_data:  # it would be kept, and counted nowhere
                raise zlib.error("bytes follow its end")

    return unpack


class Full(asyncio.Protocol):
    """Answers a connection beyond the limit, and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 503 Full\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        transport.close()


def decode(body: bytes, kind: type[T], refused: Mapping[str, object] | None = None) -> T:
    """The body of a request. Raises Refused.

    `refused`: fields that must be absent or null, or have this value; where it is None, they may be empty as well.
    """
    try:
        parsed = decoder(kind).decode(body)
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if refused else {}
        given = {name: msgspec.json.decode(fields[name]) for name in fields.keys() & (refused or {})}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # validation errors are decode errors
        raise Refused("invalid", f"the request cannot be read: {error}") from error
    except RecursionError:
        raise Refused("invalid", "the request is nested too deeply; send plain messages") from None
    for name, value in given.items():
        harmless = (refused or {})[name]
        if value not in (None, harmless) and (value or harmless is not None):
            raise unserved(name, value)
    return parsed


def unserved(name: str, value: object) -> Refused:
    """The refusal of a field."""
    shown = msgspec.json.encode(value)[:60].decode(errors="replace")
    return Refused("invalid", f"{name} is {shown}, which this gateway does not serve; leave it out (docs/gateway.md)")


def offered(choice: str | Mapping[str, Any] | None, tools: Iterable[ToolSchema]) -> tuple[ToolSchema, ...]:
    """The tools that `tool_choice` of any dialect leaves. Raises Refused for a call that must be made."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        raise unserved("tool_choice", choice)
    return () if kind == "none" else tuple(tools)


def form(name: str, sent: Mapping[str, Any] | None, tools: Sequence[ToolSchema]) -> Constraint | None:
    """The form of an answer: `response_format`, `text.format` or `output_config.format`. Raises Refused."""
    kind = (sent or {}).get("type", "text")
    if sent is None or kind == "text":
        return None
    described = sent.get("json_schema", sent)
    schema = {"type": "object"} if kind == "json_object" else described.get("schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise unserved(name, sent)
    if tools:
        raise Refused(
            "invalid", f"{name} and tools exclude each other here, for a call has another form; leave one out"
        )
    return Constraint(name, msgspec.json.encode(schema).decode())
