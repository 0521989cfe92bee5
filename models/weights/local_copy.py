"""Slots of another host, copied to this one: two directories that engines load like the trainer's own.

Invariants:
- a copy bears the generation and the digest of the slot that it was made of, and only once all its bytes are verified;
  so `SlotReader` treats it like the original, and finds out as well when it was overwritten meanwhile;
- the newest complete copy is never the one that is overwritten.

The files are brought by the caller: into `begin`'s directory, followed by `finish`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from models.weights.shared_memory_reader import STATE_FILE, SlotManifest, SlotReader
from models.weights.slots_directory import DirectoryLease

COPIES = 2
BEING_WRITTEN = 1  # as any odd generation


class LocalCopies:
    """Owner of a directory of copies. Created on construction, removed by `close`."""

    def __init__(self, directory: Path) -> None:
        """Raises SlotDirectoryError."""
        self._lease = DirectoryLease(directory)
        self._held: list[SlotManifest | None] = [None] * COPIES
        self._next = 0

    def find(self, original: SlotManifest) -> SlotManifest | None:
        """The copy of a slot as it was announced, if there is one."""
        for copy in self._held:
            if copy is not None and (copy.label, copy.digest, copy.generation) == (
                original.label,
                original.digest,
                original.generation,
            ):
                return copy
        return None

    def begin(self) -> Path:
        """The directory to fill, which holds nothing valid until `finish`."""
        self._held[self._next] = None
        directory = self._lease.directory / f"copy-{self._next}"
        directory.mkdir(mode=0o700, exist_ok=True)
        _mark(directory, BEING_WRITTEN)
        return directory

    def finish(self, original: SlotManifest) -> SlotManifest:
        """Declare what was filled last to be a copy of this slot. Reads all bytes. Raises DigestMismatch, TornWeights,
        and leaves it invalid: the original was overwritten while it was fetched, or the bytes are others."""
        directory = self._lease.directory / f"copy-{self._next}"
        copy = msgspec.structs.replace(original, path=str(directory))
        _mark(directory, original.generation)
        try:
            SlotReader(copy)
        except BaseException:
            _mark(directory, BEING_WRITTEN)
            raise
        self._held[self._next], self._next = copy, (self._next + 1) % COPIES
        return copy

    def close(self) -> None:
        self._lease.release()


def _mark(directory: Path, generation: int) -> None:
    place = directory / STATE_FILE
    with place.open("r+b" if place.exists() else "wb") as file:  # in place: readers have it mapped
        file.write(np.uint64(generation).tobytes())
