"""Bytes by name from process to process: large ones, in chunks, straight to where they shall lie.

The server answers requests from files and buffers and remembers nothing; the client keeps a few requests under way,
which bounds the memory at both ends. See `transport.core.byte_transfer` for what is lost, repeated or damaged.

Invariant: the server does not change a blob; to change it, withdraw it first, then serve it anew. Checksums notice
other changes only between reading and arriving: compare a digest of the whole.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from pathlib import Path

from transport.codec import Buffer, checksum
from transport.core.byte_transfer import Blob, ByteClientCore, Call, Transfer
from transport.errors import LinkRefused, UsageError
from transport.port import CorePort, body_buffer
from transport.wire import PROTOCOL, AnyMessage, Body, ByteChunk, ByteRefusal, ByteRequest


class _Source:
    """A file or a buffer under a name. A file is read, not mapped: a mapped one that shrinks ends the process."""

    def __init__(self, data: Path | Buffer, generation: str) -> None:
        self.generation = generation or secrets.token_hex(8)
        self._file = os.open(data, os.O_RDONLY | os.O_CLOEXEC) if isinstance(data, Path) else -1
        self._buffer = memoryview(b"" if isinstance(data, Path) else data).cast("B")
        self.size = os.fstat(self._file).st_size if self._file >= 0 else len(self._buffer)

    def read(self, offset: int, size: int) -> Buffer:
        size = max(0, min(size, self.size - offset))
        return self._buffer[offset : offset + size] if self._file < 0 else os.pread(self._file, size, offset)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class ByteServer(CorePort):
    """Made by `Node.byte_server`; lives until its node closes."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.chunks = 0  # answers with bytes
        self._run_id = run_id
        self._sources: dict[str, _Source] = {}

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self.link.address

    def serve(self, name: str, data: Path | Buffer, generation: str = "") -> Blob:
        """Offer a file or a buffer (of which no copy is kept) under a name, in place of what had it before.

        A generation that follows from the bytes, such as their digest, lets a transfer go on with another server of the
        same bytes; without one, each serving has its own.
        """
        source = _Source(data, generation)
        self.withdraw(name)
        self._sources[name] = source
        return Blob(name, source.generation, source.size)

    def withdraw(self, name: str) -> None:
        """Offer it no longer; transfers under way fail with BlobGone."""
        source = self._sources.pop(name, None)
        if source is not None:
            source.close()

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        """Stop answering; clients hear nothing more."""
        self.shut(int(timeout_s * 1000))

    def shut(self, linger_ms: int) -> None:
        super().shut(linger_ms)
        for name in list(self._sources):
            self.withdraw(name)

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        assert isinstance(message, ByteRequest)
        source = self._sources.get(message.name)
        refusal = self._refusal(message, source)
        if source is None or refusal:
            self.link.send(route, ByteRefusal(message.number, refusal))
            return
        data = source.read(message.offset, message.size)
        chunk = ByteChunk(message.number, source.generation, source.size, len(data), checksum(data))
        self.chunks += bool(data)
        self.link.send(route, chunk, data or None)  # a client that has gone asks again if it comes back

    def flush(self, now: float) -> None:
        """Answers are sent at once."""

    def _refusal(self, request: ByteRequest, source: _Source | None) -> str:
        if (request.protocol, request.run_id) != (PROTOCOL, self._run_id):
            return (
                f"asked by run {request.run_id!r}, protocol {request.protocol}; this byte server is of run "
                f"{self._run_id!r}, protocol {PROTOCOL}; check the address and the version"
            )
        if source is None:
            return f"no blob {request.name[:200]!r} is served here (any more); look up what is announced now"
        if request.generation not in ("", source.generation):
            return f"blob {request.name[:200]!r} was served anew since this transfer began; begin again with stat"
        return ""


class ByteClient(CorePort):
    """Made by `Node.byte_client`. Safe to be used by several tasks of one loop."""

    def __init__(self, run_id: str, address: str, *, give_up_s: float | None) -> None:
        super().__init__()
        self.address = address
        self.core = ByteClientCore(run_id, address, give_up_s=give_up_s)
        self._waiters: dict[Call, asyncio.Future[None]] = {}

    async def stat(self, name: str) -> Blob:
        """Generation and size of a blob. Raises BlobGone, LinkLost, LinkRefused."""
        call = Call(name, "", deque([(0, 0)]))
        await self._finish(call)
        assert call.blob is not None
        return call.blob

    async def fetch(self, transfer: Transfer) -> None:
        """Fetch what is missing of it. Unblocked by its last chunk, by a refusal, or by give_up_s of silence.

        Raises BlobGone when the blob is not served any more, or anew: begin again. After LinkLost, LinkRefused and
        DecodeError, as after a cancellation, the same transfer may be fetched again, here or by another client.
        """
        blob = transfer.blob
        await self._finish(Call(blob.name, blob.generation, transfer.missing, transfer))

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        self.shut(0)
        self._wake()

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        assert isinstance(message, ByteChunk | ByteRefusal)
        self.core.on_message(self.now(), message, body_buffer(body))

    def on_link_up(self) -> None:
        super().on_link_up()
        if self.link_ups > 1:
            self.link.discard_unsent()
            self.core.on_link_up()

    def flush(self, now: float) -> None:
        for request in self.core.flush():
            self.link.send(b"", request)
        self._wake()

    def core_timer(self, now: float) -> None:
        self.core.on_timer(now)

    def core_deadline(self) -> float | None:
        return self.core.deadline()

    async def _finish(self, call: Call) -> None:
        """Waits for the last answer; closing and refused keys unblock it too."""
        self.check_process()
        self.core.begin(self.now(), call)
        waiter = self._waiters[call] = self.loop.create_future()
        self.link.wake()
        try:
            await waiter
        finally:
            del self._waiters[call]
            self.core.end(call)
        if call.fault is not None:
            raise call.fault
        if not call.ended and self.link_refusal is not None:
            raise LinkRefused(
                f"byte server at {self.address} refused this node: {self.link_refusal}; add the key, or use the right "
                f"one"
            )
        if not call.ended:
            raise UsageError(f"byte client of {self.address} is closed; fetch inside `async with Node`")

    def _wake(self) -> None:
        for call, waiter in self._waiters.items():
            if (call.ended or self.closed or self.link_refusal is not None) and not waiter.done():
                waiter.set_result(None)
