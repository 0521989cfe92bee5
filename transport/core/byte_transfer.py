"""The asking side of a byte transfer, as a pure machine: chunks of named blobs, asked for a few at a time.

Invariants:
- The server remembers nothing of its clients: every ask is complete in itself and may be repeated, so a lost answer, a
  broken link and a new server at the same address all have one cure, to ask again.
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
from transport.wire import PROTOCOL, ByteAsk, ByteChunk, ByteRefusal

CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 8  # fills a link of 10 Gbit/s up to 6 ms of delay
DAMAGE_LIMIT = 3  # of one chunk: whatever damages it as often will go on to
ASK_AGAIN_S = 1.0  # after silence; what is merely slow is not asked for twice


class Blob(NamedTuple):
    """A named run of bytes as it is now: served anew under the same name, it has another generation."""

    name: str
    generation: str
    size: int


class Transfer:
    """What of a blob has arrived where it shall go: a writable buffer, or an open file. Survives a lost server: it can
    be fetched again, also through another client, and only what is missing is asked for.
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
    """One call of a client: what it has still to ask for, and how it ended."""

    name: str
    generation: str  # empty: of whichever there is
    missing: deque[tuple[int, int]]
    transfer: Transfer | None = None  # none: it asks about the blob only
    asked: int = 0  # asks that wait for their answers
    blob: Blob | None = None
    fault: TransportError | None = None
    damages: dict[int, int] = field(default_factory=dict)  # by offset

    @property
    def ended(self) -> bool:
        return self.fault is not None or not (self.missing or self.asked)


class ByteClientCore:
    """See the module. `now` is any monotonic clock, the same one in all calls."""

    def __init__(self, run_id: str, address: str, *, give_up_s: float | None, in_flight: int) -> None:
        self.give_up_s = give_up_s
        self._run_id, self._address, self._in_flight = run_id, address, in_flight
        self._calls: list[Call] = []
        self._asks: dict[int, tuple[ByteAsk, Call]] = {}  # waiting for their answers, by number
        self._again: list[ByteAsk] = []
        self._number = 0
        self._heard_at = 0.0
        self._asked_at = 0.0

    def begin(self, now: float, call: Call) -> None:
        if not self._calls:  # silence is only that of a server which was asked
            self._heard_at = self._asked_at = now
        self._calls.append(call)

    def end(self, call: Call) -> None:
        """The caller has its result, or does not wait any more: what was not answered is missing again."""
        self._calls.remove(call)
        for number in [number for number, (_, other) in self._asks.items() if other is call]:
            self._put_back(number)

    def on_message(self, now: float, message: ByteChunk | ByteRefusal, body: Buffer) -> None:
        self._heard_at = self._asked_at = now
        if message.number not in self._asks:
            return  # the second answer to what was asked twice, or a call that has ended
        ask, call = self._asks[message.number]
        if isinstance(message, ByteRefusal):
            self._put_back(message.number)
            call.fault = BlobGone(f"{self._address}: {message.reason}")
        elif call.transfer is None:
            self._answered(message.number)
            call.blob = Blob(ask.name, message.generation, message.total)
        elif len(body) == ask.size and message.generation == ask.generation and checksum(body) == message.checksum:
            self._answered(message.number)
            call.transfer.write(ask.offset, body)
        else:
            self._put_back(message.number)
            self._damaged(ask, call)

    def on_link_up(self) -> None:
        """Connected anew: what was under way is lost."""
        self._again = [ask for ask, _ in self._asks.values()]

    def on_timer(self, now: float) -> None:
        if self.give_up_s is not None and now - self._heard_at >= self.give_up_s:
            for call in self._calls:
                call.fault = call.fault or LinkLost(
                    f"byte server at {self._address} was silent for give_up_s={self.give_up_s} while {call.name!r} "
                    f"was fetched; fetch it again, there or where it is served now: what has arrived is kept"
                )
        elif now - self._asked_at >= ASK_AGAIN_S:
            self._again = [ask for ask, _ in self._asks.values()]
            self._asked_at = now

    def flush(self) -> list[ByteAsk]:
        """What is to be sent now."""
        out, self._again = self._again, []
        for call in self._calls:
            while call.missing and call.asked < self._in_flight and call.fault is None:
                self._number += 1
                ask = ByteAsk(PROTOCOL, self._run_id, self._number, call.name, call.generation, *call.missing.popleft())
                self._asks[self._number] = ask, call
                call.asked += 1
                out.append(ask)
        return out

    def deadline(self) -> float | None:
        if not self._calls:
            return None
        again = self._asked_at + ASK_AGAIN_S
        return again if self.give_up_s is None else min(again, self._heard_at + self.give_up_s)

    @staticmethod
    def _damaged(ask: ByteAsk, call: Call) -> None:
        times = call.damages[ask.offset] = call.damages.get(ask.offset, 0) + 1
        if times >= DAMAGE_LIMIT:
            call.fault = DecodeError(
                f"bytes {ask.offset} to {ask.offset + ask.size} of blob {ask.name!r} were damaged {times} times on "
                f"their way; check that nothing writes to the blob while it is served"
            )

    def _answered(self, number: int) -> tuple[ByteAsk, Call]:
        ask, call = self._asks.pop(number)
        call.asked -= 1
        return ask, call

    def _put_back(self, number: int) -> None:
        ask, call = self._answered(number)
        call.missing.appendleft((ask.offset, ask.size))
