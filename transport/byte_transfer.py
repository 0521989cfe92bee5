"""Files by name from process to process: large ones, in chunks, straight to where they shall lie.

The server answers requests from open files and remembers nothing of its clients; a client keeps a few requests under
way, which bounds the memory at both ends.

Invariants:
- Every request is complete in itself and may be repeated. So a lost answer and a broken link have one cure, to send the
  request again.
- A chunk is written only when its checksum is right and it is of the generation that the transfer began with, so that
  a file never becomes a mixture of two.
- Nothing is written after a fetch has ended, for its owner may have closed the file.
- The server does not change a blob; to change it, it is served anew. Checksums notice other changes only between
  reading and arriving: compare a digest of the whole.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from transport.bodies import body_buffer
from transport.codec import Buffer, checksum
from transport.errors import BlobGone, DecodeError, LinkLost, LinkRefused, TransportError, UsageError
from transport.port import CorePort
from transport.wire import PROTOCOL, AnyMessage, Body, ByteChunk, ByteRefusal, ByteRequest

CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 8  # fills a link of 10 Gbit/s up to 6 ms of delay
DAMAGE_LIMIT = 3  # of one chunk: more attempts would be damaged too
RETRY_S = 1.0  # after silence; a request that is merely slow is not repeated


class Blob(NamedTuple):
    """A named run of bytes as it is now: served anew under the same name, it has another generation."""

    name: str
    generation: str
    size: int


class ByteServer(CorePort):
    """Made by `Node.byte_server`; lives until its node closes."""

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.chunks = 0  # answers with bytes
        self._run_id = run_id
        self._served: dict[str, tuple[Blob, int]] = {}  # and the open file: a mapped one that shrinks ends the process

    def serve(self, name: str, path: Path) -> Blob:
        """Offer a file under a name, in place of what had it before; transfers of that fail with BlobGone."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        blob = Blob(name, secrets.token_hex(8), os.fstat(file).st_size)
        self.withdraw(name)
        self._served[name] = blob, file
        return blob

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        """Stop answering; clients hear nothing more."""
        self.shut(int(timeout_s * 1000))

    def shut(self, linger_ms: int) -> None:
        super().shut(linger_ms)
        for name in list(self._served):
            self.withdraw(name)

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        assert isinstance(message, ByteRequest)
        blob, file = self._served.get(message.name, (None, -1))
        refusal = self._refusal(message, blob)
        if blob is None or refusal:
            self.link.send(route, ByteRefusal(message.number, refusal))
            return
        data = os.pread(file, max(0, min(message.size, blob.size - message.offset)), message.offset)
        self.chunks += bool(data)
        chunk = ByteChunk(message.number, blob.generation, blob.size, len(data), checksum(data))
        self.link.send(route, chunk, data or None)  # a client that has gone asks again if it comes back

    def flush(self, now: float) -> None:
        """Answers are sent at once."""

    def _refusal(self, request: ByteRequest, blob: Blob | None) -> str:
        if (request.protocol, request.run_id) != (PROTOCOL, self._run_id):
            return (
                f"asked by run {request.run_id!r}, protocol {request.protocol}; this byte server is of run "
                f"{self._run_id!r}, protocol {PROTOCOL}; check the address and the version"
            )
        if blob is None:
            return f"no blob {request.name[:200]!r} is served here (any more); look up what is announced now"
        if request.generation not in ("", blob.generation):
            return f"blob {request.name[:200]!r} was served anew since this transfer began; begin again with stat"
        return ""

    def withdraw(self, name: str) -> None:
        """Serve a name no more; transfers of it fail with BlobGone."""
        if name in self._served:
            os.close(self._served.pop(name)[1])


class ByteClient(CorePort):
    """Made by `Node.byte_client`. Safe to be used by several tasks of one loop."""

    def __init__(self, run_id: str, address: str, *, give_up_s: float | None) -> None:
        super().__init__()
        self.address, self.give_up_s, self.timed = address, give_up_s, self
        self._run_id = run_id
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[ByteRequest, asyncio.Future[tuple[ByteChunk, Buffer]]]] = {}  # without an answer
        self._heard_at = self._requested_at = 0.0

    async def stat(self, name: str) -> Blob:
        """Generation and size of a blob. Raises BlobGone, LinkLost, LinkRefused."""
        chunk, _ = await self._ask(name)
        return Blob(name, chunk.generation, chunk.total)

    async def fetch(self, blob: Blob, file: int) -> None:
        """Fetch a blob into an open file, from its start on. Unblocked by its last chunk, by a refusal, or by
        give_up_s of silence.

        Raises BlobGone when the blob is not served any more, or anew; LinkLost, LinkRefused, and DecodeError for a
        chunk that never arrives whole. What has arrived by then is in the file.
        """
        starts = iter(range(0, blob.size, CHUNK_BYTES))

        async def fetch_in_turn() -> None:
            for start in starts:
                await self._fetch_chunk(blob, start, file)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CHUNKS_IN_FLIGHT):
                    tasks.create_task(fetch_in_turn())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def close(self, *, blame: bool = False, timeout_s: float = 1.5) -> None:
        self.shut(0)
        self.flush(self.now())

    # Driven by the owner task.

    def on_message(self, route: bytes, message: AnyMessage, body: Body) -> None:
        assert isinstance(message, ByteChunk | ByteRefusal)
        self._heard_at = self._requested_at = self.now()
        _, answer = self._asked.get(message.number, (None, None))
        if answer is None or answer.done():
            return  # the second answer to a repeated request, or to a call that has ended
        if isinstance(message, ByteRefusal):
            answer.set_exception(BlobGone(f"{self.address}: {message.reason}"))
        else:
            answer.set_result((message, body_buffer(body)))

    def on_link_up(self) -> None:
        """What was under way is lost if this is another connection."""
        super().on_link_up()
        if self.link_ups > 1:
            self.link.discard_unsent()
            self._ask_again()

    def flush(self, now: float) -> None:
        for request, answer in self._asked.values():
            if (fault := self._fault(now, request.name)) is not None and not answer.done():
                answer.set_exception(fault)

    def on_timer(self, now: float) -> None:
        if now - self._requested_at >= RETRY_S:
            self._requested_at = now
            self._ask_again()

    def deadline(self) -> float | None:
        if not self._asked:
            return None
        again = self._requested_at + RETRY_S
        return again if self.give_up_s is None else min(again, self._heard_at + self.give_up_s)

    async def _fetch_chunk(self, blob: Blob, start: int, file: int) -> None:
        size = min(CHUNK_BYTES, blob.size - start)
        for _ in range(DAMAGE_LIMIT):
            chunk, data = await self._ask(blob.name, blob.generation, start, size)
            whole = len(data) == size and chunk.generation == blob.generation
            if whole and checksum(data) == chunk.checksum:
                rest = memoryview(data)
                while rest:
                    written = os.pwrite(file, rest, start)
                    start, rest = start + written, rest[written:]
                return
        raise DecodeError(
            f"bytes {start} to {start + size} of blob {blob.name!r} were damaged {DAMAGE_LIMIT} times on their way; "
            f"check that nothing writes to the blob while it is served"
        )

    async def _ask(self, name: str, generation: str = "", offset: int = 0, size: int = 0) -> tuple[ByteChunk, Buffer]:
        """Request bytes of a blob, and wait for the answer; closing, refused keys and silence unblock it too."""
        self.check_process()
        now = self.now()
        if not self._asked:  # a server without requests may be silent
            self._heard_at = self._requested_at = now
        if (fault := self._fault(now, name)) is not None:
            raise fault
        request = ByteRequest(PROTOCOL, self._run_id, next(self._numbers), name, generation, offset, size)
        answer: asyncio.Future[tuple[ByteChunk, Buffer]] = self.loop.create_future()
        self._asked[request.number] = request, answer
        self.link.send(b"", request)
        self.link.wake()
        try:
            return await answer
        finally:
            del self._asked[request.number]

    def _ask_again(self) -> None:
        for request, _ in self._asked.values():
            self.link.send(b"", request)

    def _fault(self, now: float, name: str) -> TransportError | None:
        """Why the client cannot fetch this blob, if it cannot."""
        if self.closed:
            return UsageError(f"byte client of {self.address} is closed; fetch inside `async with Node`")
        if self.link_refusal is not None:
            return LinkRefused(
                f"byte server at {self.address} refused this node: {self.link_refusal}; add the key, or use the right "
                f"one"
            )
        if self.give_up_s is not None and now - self._heard_at >= self.give_up_s:
            return LinkLost(
                f"byte server at {self.address} was silent for give_up_s={self.give_up_s} while {name!r} was fetched; "
                f"fetch it again, there or where it is served now"
            )
        return None
