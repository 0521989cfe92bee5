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

_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection on 64-bit integers that scatters its input."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix64` of each element; numpy's unsigned arithmetic wraps as the mask above does."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Two epochs: around an epoch's end, requeued prompts of the old one interleave with the new one.
@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[n] prompt indices of one epoch: the indices sorted by a keyed hash of themselves."""
    key = mix64(mix64(seed & _MASK) ^ epoch)
    keys = _mix64_array(np.arange(n, dtype=np.uint64) ^ np.uint64(key))
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

    def position(self, epoch: int, offset: int = 0) -> int:
        """The position of the offset-th prompt of an epoch."""
        return epoch * self.n + offset
