"""The client of a byte transfer, without I/O: it requests chunks of named blobs, a few at a time.

Invariants:
- The server remembers nothing of its clients: every request is complete in itself and may be repeated. So a lost
  answer, a broken link and a new server at the same address all have one cure, to send the request again.
- A chunk is written only when its checksum is right and it is of the generation that the transfer began with, so that
  a blob never becomes a mixture of two.
- Answers to a call that has ended are dropped: nothing is written into a buffer that its owner has taken back.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from transport.codec import Buffer, checksum
from transport.errors import BlobGone, DecodeError, LinkLost, TransportError, UsageError
from transport.wire import PROTOCOL, ByteChunk, ByteRefusal, ByteRequest

CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 8  # fills a link of 10 Gbit/s up to 6 ms of delay
DAMAGE_LIMIT = 3  # of one chunk: more attempts would be damaged too
RETRY_S = 1.0  # after silence; a request that is merely slow is not repeated


class Blob(NamedTuple):
    """A named run of bytes as it is now: served anew under the same name, it has another generation."""

    name: str
    generation: str
    size: int


class Transfer:
    """What of a blob has arrived where it shall go: a writable buffer, or an open file. Survives a lost server: it can
    be fetched again, also through another client, and only missing chunks are requested.
    """

    def __init__(self, blob: Blob, into: memoryview | int, *, at: int = 0, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`into`: the buffer, or the descriptor of the file; `at`: where in it the blob begins."""
        self.blob = blob
        starts = range(0, blob.size, chunk_bytes)
        self.missing = deque((start, min(chunk_bytes, blob.size - start)) for start in starts)
        self._into = into if isinstance(into, int) else into.cast("B")
        self._at = at
        if isinstance(self._into, memoryview) and (self._into.readonly or at + blob.size > len(self._into)):
            raise UsageError(
                f"blob {blob.name!r} of {blob.size} bytes at {at} needs a writable buffer of as many bytes, this one "
                f"has {len(self._into)} (read-only: {self._into.readonly}); make one of the size that stat tells"
            )

    def write(self, offset: int, data: Buffer) -> None:
        start = self._at + offset
        if isinstance(self._into, memoryview):
            self._into[start : start + len(data)] = data
        else:
            rest = memoryview(data)
            while rest:
                written = os.pwrite(self._into, rest, start)
                start, rest = start + written, rest[written:]


@dataclass(slots=True, eq=False)
class Call:
    """One call of a client: the chunks that are still to be requested, and how it ended."""

    name: str
    generation: str  # empty: of whichever there is
    missing: deque[tuple[int, int]]
    transfer: Transfer | None = None  # none: a question about size and generation
    pending: int = 0  # requests that wait for their answers
    blob: Blob | None = None
    fault: TransportError | None = None
    damages: dict[int, int] = field(default_factory=dict)  # by offset

    @property
    def ended(self) -> bool:
        return self.fault is not None or not (self.missing or self.pending)


class ByteClientCore:
    """See the module. `now` is any monotonic clock, the same in all calls."""

    def __init__(self, run_id: str, address: str, *, give_up_s: float | None) -> None:
        self.give_up_s = give_up_s
        self._run_id, self._address = run_id, address
        self._calls: list[Call] = []
        self._requests: dict[int, tuple[ByteRequest, Call]] = {}  # waiting for their answers, by number
        self._retries: list[ByteRequest] = []
        self._number = 0
        self._heard_at = 0.0
        self._requested_at = 0.0

    def begin(self, now: float, call: Call) -> None:
        if not self._calls:  # a server without requests may be silent
            self._heard_at = self._requested_at = now
        self._calls.append(call)

    def end(self, call: Call) -> None:
        """The caller has its result, or does not wait any more: what was not answered is missing again."""
        self._calls.remove(call)
        for number in [number for number, (_, owner) in self._requests.items() if owner is call]:
            self._put_back(number)

    def on_message(self, now: float, message: ByteChunk | ByteRefusal, body: Buffer) -> None:
        self._heard_at = self._requested_at = now
        if message.number not in self._requests:
            return  # the second answer to a repeated request, or of a call that has ended
        request, call = self._requests[message.number]
        if isinstance(message, ByteRefusal):
            self._put_back(message.number)
            call.fault = BlobGone(f"{self._address}: {message.reason}")
        elif call.transfer is None:
            self._answered(message.number)
            call.blob = Blob(request.name, message.generation, message.total)
        elif (
            len(body) == request.size
            and message.generation == request.generation
            and checksum(body) == message.checksum
        ):
            self._answered(message.number)
            call.transfer.write(request.offset, body)
        else:
            self._put_back(message.number)
            self._damaged(request, call)

    def on_link_up(self) -> None:
        """Connected anew: what was under way is lost."""
        self._retries = [request for request, _ in self._requests.values()]

    def on_timer(self, now: float) -> None:
        if self.give_up_s is not None and now - self._heard_at >= self.give_up_s:
            for call in self._calls:
                call.fault = call.fault or LinkLost(
                    f"byte server at {self._address} was silent for give_up_s={self.give_up_s} while {call.name!r} "
                    f"was fetched; fetch it again, there or where it is served now: what has arrived is kept"
                )
        elif now - self._requested_at >= RETRY_S:
            self._retries = [request for request, _ in self._requests.values()]
            self._requested_at = now

    def flush(self) -> list[ByteRequest]:
        """What is to be sent now."""
        out, self._retries = self._retries, []
        for call in self._calls:
            while call.missing and call.pending < CHUNKS_IN_FLIGHT and call.fault is None:
                self._number += 1
                request = ByteRequest(
                    PROTOCOL, self._run_id, self._number, call.name, call.generation, *call.missing.popleft()
                )
                self._requests[self._number] = request, call
                call.pending += 1
                out.append(request)
        return out

    def deadline(self) -> float | None:
        if not self._calls:
            return None
        again = self._requested_at + RETRY_S
        return again if self.give_up_s is None else min(again, self._heard_at + self.give_up_s)

    @staticmethod
    def _damaged(request: ByteRequest, call: Call) -> None:
        times = call.damages[request.offset] = call.damages.get(request.offset, 0) + 1
        if times >= DAMAGE_LIMIT:
            call.fault = DecodeError(
                f"bytes {request.offset} to {request.offset + request.size} of blob {request.name!r} were damaged "
                f"{times} times on their way; check that nothing writes to the blob while it is served"
            )

    def _answered(self, number: int) -> tuple[ByteRequest, Call]:
        request, call = self._requests.pop(number)
        call.pending -= 1
        return request, call

    def _put_back(self, number: int) -> None:
        request, call = self._answered(number)
        call.missing.appendleft((request.offset, request.size))
