"""The order in which prompts are visited: a pure function of (seed, epoch), with random access.

Invariants: positions 0, 1, 2, ... run through the epochs one after the other; each epoch is a permutation of all
prompts; `index(position)` depends on nothing but (n, seed, shuffle, position), so the resumable cursor is the position
itself. The hash is written out here, not taken from a library's random generator, so that a run which is resumed
under another numpy version meets the same order.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from models.engines.noise import GOLDEN, mix64, mix_array


# Two epochs: around an epoch's end, requeued prompts of the old one interleave with the new one.
@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[n] prompt indices of one epoch: the indices sorted by a keyed hash of themselves."""
    key = mix64(mix64(seed) ^ epoch)
    keys = mix_array((np.arange(n, dtype=np.uint64) ^ np.uint64(key)) + GOLDEN)
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


class PromptOrder:
    """Maps a position in the endless run over the prompts to (epoch, prompt index)."""

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        if n < 1:
            raise ValueError(f"the order needs at least one prompt, got n = {n}")
        self.n = n
        self.seed = seed
        self.shuffle = shuffle

    def index(self, position: int) -> tuple[int, int]:
        """(epoch, prompt index) at a position >= 0. The first call of an epoch costs O(n log n), the others O(1)."""
        if position < 0:
            raise ValueError(f"a position counts from 0, got {position}")
        epoch, offset = divmod(position, self.n)
        if not self.shuffle:
            return epoch, offset
        return epoch, int(_permutation(self.n, self.seed, epoch)[offset])
