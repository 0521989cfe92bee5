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

from models.weights.layout import WEIGHTS_FILE
from models.weights.shared_memory_reader import STATE_FILE, STATE_WORDS, SlotManifest, SlotReader
from models.weights.slots_directory import DirectoryLease

COPIES = 2


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
            if copy is not None and msgspec.structs.replace(copy, path=original.path) == original:
                return copy
        return None

    def begin(self) -> Path:
        """The directory to fill, which holds nothing valid until `finish`."""
        self._held[self._next] = None
        directory = self._lease.directory / f"copy-{self._next}"
        directory.mkdir(mode=0o700, exist_ok=True)
        _mark(directory, [1])
        return directory

    def finish(self, original: SlotManifest) -> SlotManifest:
        """Declare what was filled last to be a copy of this slot. Reads all bytes. Raises DigestMismatch, TornWeights,
        and leaves it invalid: the original was overwritten while it was fetched, or the bytes are others."""
        directory = self._lease.directory / f"copy-{self._next}"
        copy = msgspec.structs.replace(original, path=str(directory))
        nbytes = (directory / WEIGHTS_FILE).stat().st_size
        digest = int(original.digest, 16)
        words = [original.generation, original.epoch, original.version, nbytes, digest >> 64, digest & (1 << 64) - 1]
        _mark(directory, words)
        try:
            with SlotReader(copy):
                pass
        except BaseException:
            _mark(directory, [1])
            raise
        self._held[self._next], self._next = copy, (self._next + 1) % COPIES
        return copy

    def close(self) -> None:
        self._lease.release()


def _mark(directory: Path, words: list[int]) -> None:
    """Write the state of a copy; an odd generation says that it is being written."""
    state = np.zeros(STATE_WORDS, dtype=np.uint64)
    state[: len(words)] = words
    place = directory / STATE_FILE
    with place.open("r+b" if place.exists() else "wb") as file:  # in place: readers have it mapped
        file.write(state.tobytes())
