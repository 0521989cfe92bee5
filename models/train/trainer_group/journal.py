"""What a new trainer group has to do again: the calls since a save, as the bytes that were sent, and the saves to start
from.

    run/trainer_group/calls-000003.bin    the calls between one save and the next; record = length, xxh3_64, bytes

The journal serves one life of the train stage, which never ends with its trainer group: the file holds what memory
should not, and is of no use to a later life, which starts from a committed checkpoint.

Invariants: a record is read back whole or not at all, and nothing after a damaged one is read; calls are dropped only
when a *committed* save makes them superfluous; at any time there is a point from which the journal leads to now.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from models.checkpoint import CheckpointError, read_manifest

_HEAD: Final = struct.Struct("<QQ")


@dataclass(frozen=True)
class Point:
    """Where a new trainer group may start from: a saved directory (None: the initial weights), and the calls after
    it."""

    directory: Path | None
    segment: int  # the first file of calls after it


class CallJournal:
    """Calls and points of one train stage. What an earlier life left in `home` is removed."""

    def __init__(self, home: Path) -> None:
        self.home = home
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        self.points = [Point(None, 0)]
        self._segment = 0
        self._file = self._path(0).open("wb", buffering=0)

    def append(self, call: bytes) -> None:
        """Add a call that was made. Raises OSError, then the journal is as it was."""
        record = _HEAD.pack(len(call), xxhash.xxh3_64_intdigest(call)) + call
        end = self._file.tell()
        try:
            written = 0
            while written < len(record):
                written += self._file.write(memoryview(record)[written:])
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)
            raise

    def started_from(self, directory: Path) -> None:
        """All began anew from that directory: nothing before it matters."""
        self.saved(directory)
        self._keep_from(len(self.points) - 1)

    def saved(self, directory: Path) -> None:
        """All calls so far are in the save of that directory, which may not be committed yet."""
        self._file.close()
        self._segment += 1
        self._file = self._path(self._segment).open("wb", buffering=0)
        # A directory that was written anew no longer holds what the older point found there.
        self.points = [point for point in self.points if point.directory != directory]
        self.points.append(Point(directory, self._segment))

    def drop_superfluous(self) -> None:
        """Forget what lies before the newest committed save."""
        for place in range(len(self.points) - 1, 0, -1):
            directory = self.points[place].directory
            if directory is not None and committed(directory) is not None:
                self._keep_from(place)
                return

    def _keep_from(self, place: int) -> None:
        self.points = self.points[place:]
        for segment in range(self.points[0].segment - 1, -1, -1):
            if not self._path(segment).exists():
                return
            self._path(segment).unlink()

    def calls_after(self, point: Point) -> Iterator[bytes | Point]:
        """All calls from a point to now, in order, with the later points where they were reached."""
        later = {one.segment: one for one in self.points}
        for segment in range(point.segment, self._segment + 1):
            if segment > point.segment and segment in later:
                yield later[segment]
            yield from read_calls(self._path(segment))

    def close(self) -> None:
        """Remove the files."""
        self._file.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def _path(self, segment: int) -> Path:
        return self.home / f"calls-{segment:06d}.bin"


def read_calls(path: Path) -> Iterator[bytes]:
    """The whole records of a file; an unfinished or damaged tail is left out."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left >= _HEAD.size:
            length, checksum = _HEAD.unpack(file.read(_HEAD.size))
            left -= _HEAD.size
            if length > left:
                return
            call = file.read(length)
            left -= length
            if xxhash.xxh3_64_intdigest(call) != checksum:
                return
            yield call


def committed(directory: Path) -> Path | None:
    """Where a save lies for good, None while it is a draft (or was none, and is gone).

    `directory`: as it was given to `save`; a draft (`models.checkpoint.draft_path`) loses its dot and its ending when
    it is committed. Any other directory is its own commitment.
    """
    name = directory.name
    if not (name.startswith(".") and name.endswith(".draft")):
        return directory if directory.is_dir() else None
    final = directory.with_name(name[1:].removesuffix(".draft"))
    if directory.exists():
        return None  # a checkpoint of that name would be of an earlier life
    try:
        read_manifest(final)
    except CheckpointError:
        return None
    return final
