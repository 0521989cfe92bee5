"""Spans of every sample in every stage: written per process, merged into one file for Perfetto or chrome://tracing.

Each process appends to `trace/<replica>.jsonl`, one record per line. `merge` makes one Chrome trace of them: a process
per replica, spans in lanes, arrows that follow one sample of a group from stage to stage, counters.

Invariants:
- times are unix seconds, so processes of one machine agree; the merged trace counts microseconds from its first
  record;
- a killed process loses at most what was in its buffer; a torn last line is skipped;
- both sides are bounded: a writer stops at `max_bytes` and counts what it dropped, a merge over `max_events` keeps
  every k-th group whole, so that the arrows it shows are complete.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

TRACE_DIRECTORY: Final = "trace"
NO_GROUP: Final = -1
NO_SAMPLE: Final = -1
_FLUSH_BYTES: Final = 64 * 1024
_FLUSH_S: Final = 1.0


class Span(Struct, frozen=True, tag="span", omit_defaults=True):
    """One piece of work. `sample` is -1 for work on the whole group, `group_id` -1 for work on none."""

    name: str
    stage: str
    replica: str
    start_s: float  # unix time
    dur_s: float
    group_id: int = NO_GROUP
    sample: int = NO_SAMPLE
    args: dict[str, float | int | str] = {}


class Counter(Struct, frozen=True, tag="counter", omit_defaults=True):
    """A value from `at_s` (unix time) on: the weights version, a queue's depth."""

    name: str
    replica: str
    at_s: float
    value: float


class Dropped(Struct, frozen=True, tag="dropped", omit_defaults=True):
    """Last record of a writer that reached its size: how many records it did not write."""

    replica: str
    records: int


Record = Span | Counter | Dropped


class TraceWriter:
    """Appends the spans of one replica to its file; buffered, so a span costs about a microsecond.

    Args:
        directory: the run's trace directory.
        replica: names the file and the process in the merged trace.
        max_bytes: size at which writing stops.
    """

    def __init__(self, directory: Path, replica: str, *, stage: str = "", max_bytes: int = 32 << 20) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', replica)}.jsonl"
        self._replica = replica
        self._stage = stage
        self._max_bytes = max_bytes
        self._file = self.path.open("ab", buffering=0)
        self._written = self._file.tell()
        self._buffer = bytearray()
        self._flushed_s = time.monotonic()
        self._encoder = msgspec.json.Encoder()
        self.dropped = 0

    def span(
        self,
        name: str,
        *,
        start_s: float,
        dur_s: float,
        group_id: int = NO_GROUP,
        sample: int = NO_SAMPLE,
        stage: str | None = None,
        args: dict[str, float | int | str] | None = None,
    ) -> None:
        """Record finished work. `start_s` is unix time."""
        self._add(Span(name, stage or self._stage, self._replica, start_s, dur_s, group_id, sample, args or {}))

    @contextlib.contextmanager
    def measure(self, name: str, *, group_id: int = NO_GROUP, sample: int = NO_SAMPLE) -> Iterator[None]:
        """Record the body as a span, also if it raises."""
        start_s, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self.span(name, start_s=start_s, dur_s=time.perf_counter() - start, group_id=group_id, sample=sample)

    def counter(self, name: str, value: float, *, at_s: float | None = None) -> None:
        """Record that a value changed."""
        self._add(Counter(name, self._replica, time.time() if at_s is None else at_s, value))

    def flush(self) -> None:
        """Hand the buffer to the kernel. A disk that fails ends the trace, not the run: the rest counts as dropped."""
        if self._buffer:
            try:
                self._file.write(self._buffer)
                self._written += len(self._buffer)
            except OSError:
                self.dropped += self._buffer.count(b"\n")
                self._max_bytes = 0
            self._buffer.clear()
        self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Flush, note what was dropped, close. May be called twice."""
        if self._file.closed:
            return
        if self.dropped and self._max_bytes:
            self._buffer += self._encoder.encode(Dropped(self._replica, self.dropped)) + b"\n"
        self.flush()
        self._file.close()

    def _add(self, record: Record) -> None:
        line = self._encoder.encode(record)
        if self._written + len(self._buffer) + len(line) + 1 > self._max_bytes:
            self.dropped += 1
            return
        self._buffer += line
        self._buffer += b"\n"
        if len(self._buffer) >= _FLUSH_BYTES or time.monotonic() - self._flushed_s >= _FLUSH_S:
            self.flush()


def read_records(directory: Path) -> Iterator[Record]:
    """All records of a trace directory, file by file. Lines that do not decode (torn by a kill) are skipped."""
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # torn, as documented
                    yield decoder.decode(line)
