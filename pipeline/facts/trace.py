"""Spans of every sample in every stage: written per process, merged into one file for Perfetto or chrome://tracing.

Each process appends to `trace/<replica>.jsonl`, one record per line. `merge` makes one Chrome trace of them: a process
per replica, spans in lanes, arrows that follow one sample of a group from stage to stage.

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
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

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
    detail: str = ""


class Dropped(Struct, frozen=True, tag="dropped", omit_defaults=True):
    """Last record of a writer that reached its size: how many records it did not write."""

    replica: str
    records: int


Record = Span | Dropped


class TraceWriter:
    """Appends the spans of one replica to its file; buffered, so a span costs about a microsecond. A context manager.

    It is what a stage calls `Spans` (stages/base.py).

    Args:
        directory: the run's trace directory.
        replica: names the file and the process in the merged trace.
        max_bytes: size at which writing stops.
        enabled: without it nothing is written, not even a file.
    """

    def __init__(
        self, directory: Path, replica: str, *, stage: str = "", max_bytes: int = 32 << 20, enabled: bool = True
    ) -> None:
        self.path = directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', replica)}.jsonl"
        self._replica = replica
        self._stage = stage
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._written = 0
        if enabled:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._written = self._file.tell()
        self._buffer = bytearray()
        self._flushed_s = time.monotonic()
        self._encoder = msgspec.json.Encoder()
        self.dropped = 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self,
        name: str,
        start_s: float,
        dur_s: float,
        *,
        group: int = NO_GROUP,
        sample: int = NO_SAMPLE,
        detail: str = "",
    ) -> None:
        """Record finished work. `start_s` is unix time."""
        if self._file is None:
            return
        line = self._encoder.encode(Span(name, self._stage, self._replica, start_s, dur_s, group, sample, detail))
        if self._written + len(self._buffer) + len(line) + 1 > self._max_bytes:
            self.dropped += 1
            return
        self._buffer += line
        self._buffer += b"\n"
        if len(self._buffer) >= _FLUSH_BYTES or time.monotonic() - self._flushed_s >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hand the buffer to the kernel. A disk that fails ends the trace, not the run: the rest counts as dropped."""
        if self._buffer and self._file is not None:
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
        if self._file is None:
            return
        if self.dropped and self._max_bytes:
            self._buffer += self._encoder.encode(Dropped(self._replica, self.dropped)) + b"\n"
        self.flush()
        self._file.close()
        self._file = None


def read_records(directory: Path) -> Iterator[Record]:
    """All records of a trace directory, file by file. Lines that do not decode (torn by a kill) are skipped."""
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # torn, as documented
                    yield decoder.decode(line)
