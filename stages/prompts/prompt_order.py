"""The order in which prompts are visited: a pure function of (seed, epoch), with random access.

Invariants: positions 0, 1, 2, ... run through the epochs one after the other; each epoch is a permutation of all
prompts; `index(position)` depends on nothing but (n, seed, shuffle, position), so the resumable cursor is the position
itself. The hash is written out here, not taken from a library's random generator, so that a run which is resumed
under another numpy version meets the same order.

Curriculum by pass rate: prompts that are always or never solved are asked less often. Pure arithmetic.

For each prompt a moving average of its groups' pass rates is kept. While it lies outside [low, high], a visit to the
prompt takes place only with probability `keep`.

Invariants: the draw of a visit depends on nothing but (seed, epoch, position), so that a resumed run repeats it; a
prompt without a known pass rate is always asked, and every other one with a probability above 0; a search passes over
at most one epoch of positions, then takes what comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from configs.schema import DataConfig
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


WEIGHT = 0.5  # of the newest pass rate in the average: rates move as the policy learns


class PassRateCurriculum:
    """Pass rates by prompt index, and which visits are left out."""

    def __init__(self, data: DataConfig, order: PromptOrder, rates: Mapping[int, float] | None = None) -> None:
        self.on = data.curriculum == "pass_rate"
        self._data, self._order = data, order
        self.rates: dict[int, float] = dict(rates or {})

    def observe(self, index: int, pass_rate: float | None) -> None:
        """A group of the prompt was graded; None says nothing."""
        if not self.on or pass_rate is None:
            return
        before = self.rates.get(index, pass_rate)
        self.rates[index] = before + WEIGHT * (pass_rate - before)

    def skips(self, position: int) -> bool:
        """Whether the visit at this position of the order is left out."""
        epoch, index = self._order.index(position)
        rate = self.rates.get(index)
        if rate is None or self._data.curriculum_low <= rate <= self._data.curriculum_high:
            return False
        draw = mix64(mix64(mix64(self._data.rollout_seed) ^ epoch) ^ position)
        return draw / 2**64 >= self._data.curriculum_keep

    def next_position(self, cursor: int) -> int:
        """The first position from `cursor` on whose visit takes place."""
        if not self.on:
            return cursor
        for position in range(cursor, cursor + self._order.n):
            if not self.skips(position):
                return position
        return cursor + self._order.n
