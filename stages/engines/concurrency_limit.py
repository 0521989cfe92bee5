"""How many samples may be in flight at an engine, all clients together: a limit that follows the engine's load.

The limit is additive-increase, multiplicative-decrease. It is cut when the KV cache is nearly full, when requests were
retracted for want of room, or when the engine's queue keeps growing; else it grows back to `--server-concurrency`.

Invariants:
- 1 <= limit <= most, and one look changes it by one step only;
- no cut before the last one has had its effect: what is in flight must have come down to the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from models.engines.protocol import Load

HIGH_USAGE: Final = 0.92  # share of the KV cache in use from which the limit is cut
CALM_USAGE: Final = 0.80  # up to which it grows
CUT: Final = 0.75
STEPS: Final = 32  # looks from nothing to `most`
QUEUE_LOOKS: Final = 2  # looks in a row that find a longer queue


@dataclass(frozen=True)
class Reading:
    """One look at an engine, all its data-parallel ranks together."""

    usage: float  # share of the KV cache in use, of the fullest rank
    waiting: int  # requests in the engine's queue
    retractions: int = 0  # since the look before, for want of room

    @classmethod
    def of(cls, loads: Sequence[Load], retractions: int = 0) -> Reading:
        usage = max((load.token_usage for load in loads), default=0.0)
        return cls(usage, sum(load.num_waiting_reqs for load in loads), retractions)


class Limit:
    """Controller of one engine's limit. Pure: told what was seen, says what may be in flight (samples)."""

    def __init__(self, most: int) -> None:
        self.most = self.value = most
        self.cuts = 0
        self._waiting = 0
        self._longer = 0

    def observe(self, reading: Reading, in_flight: int) -> int:
        """The limit after one more look; `in_flight` samples are at the engine now."""
        self._longer = self._longer + 1 if reading.waiting > self._waiting else 0
        self._waiting = reading.waiting
        if reading.usage >= HIGH_USAGE or reading.retractions > 0 or self._longer >= QUEUE_LOOKS:
            if in_flight <= self.value:
                self.value = max(1, int(CUT * min(self.value, max(in_flight, 1))))
                self.cuts += 1
                self._longer = 0
        elif reading.usage <= CALM_USAGE:
            self.value = min(self.most, self.value + max(1, self.most // STEPS))
        return self.value

    def restart(self) -> None:
        """The engine is a new one."""
        self.value, self._waiting, self._longer = self.most, 0, 0
