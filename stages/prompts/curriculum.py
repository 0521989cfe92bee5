"""Curriculum by pass rate: prompts that are always or never solved are asked less often. Pure arithmetic.

For each prompt a moving average of its groups' pass rates is kept. While it lies outside [low, high], a visit to the
prompt takes place only with probability `keep`.

Invariants: the draw of a visit depends on nothing but (seed, epoch, position), so that a resumed run repeats it; a
prompt without a known pass rate is always asked, and every other one with a probability above 0; a search passes over
at most one epoch of positions, then takes what comes.
"""

from __future__ import annotations

from collections.abc import Mapping

from configs.schema import DataConfig
from models.engines.noise import mix64
from stages.data.order import PromptOrder

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
