"""Complete groups that wait for the trainer, and the choice of the next one.

Invariants:
- a group leaves once, to the batch or to be settled;
- the train stage checks the gate before it trains a group, so the order decides which group is first, never which is
  allowed;
- a spare group (`nonzero_std_fallback`: rewards all equal) leaves only if no other group waits and the spares fill the
  batch.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index as as_index

import numpy as np

from configs.schema import Config
from models.import_path import import_path
from stages.errors import BufferOrderError
from stages.group.filters import FALLBACK, zero_std
from stages.messages import RolloutSlice
from stages.ports import Lease
from stages.rollouts import oldest_version, rollout_return, rollouts
from stages.staleness_gate import StalenessGate

OrderFunction = Callable[[Sequence[RolloutSlice], int], int]


@dataclass(frozen=True)
class Waiting:
    """One group in the buffer."""

    lease: Lease[RolloutSlice]
    arrival: int
    group_id: int
    oldest: int | None  # version among its trainable tokens
    signal: float  # standard deviation of its rewards
    spare: str | None  # the reason why it is a spare, if it is


_Place = tuple[int, int, Waiting]  # sort key, arrival (unique), group


class GroupBuffer:
    """Groups in the order of `--buffer-order`."""

    def __init__(self, config: Config) -> None:
        self._order = config.asynchrony.buffer_order
        self._custom: OrderFunction | None = import_path(self._order) if ":" in self._order else None
        self.gate = StalenessGate.of(config)
        self._has_spares = FALLBACK in config.filter.dynamic_sampling_filter
        self._judged = self._custom is not None or self._order == "priority"  # the order depends on the batch
        self._groups: list[_Place] = []  # a heap, unless every choice looks at all of them
        self._spares: list[Waiting] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._groups) + len(self._spares)

    def push(self, lease: Lease[RolloutSlice]) -> None:
        slice_ = lease.message
        self._arrivals += 1
        rewards = np.array([rollout_return(parts) for parts in rollouts(slice_.samples)])
        waiting = Waiting(
            lease,
            self._arrivals,
            slice_.group.group_id,
            oldest_version(slice_.samples),
            float(rewards.std()) if len(rewards) else 0.0,
            zero_std(slice_) if self._has_spares else None,
        )
        if waiting.spare is not None:
            self._spares.append(waiting)
        elif self._judged:
            self._groups.append(self._place(waiting))
        else:
            heapq.heappush(self._groups, self._place(waiting))

    def _place(self, waiting: Waiting) -> _Place:
        by = waiting.arrival if self._order == "ready_first" else waiting.group_id
        return by, waiting.arrival, waiting

    def ready(self, missing: int) -> bool:
        """Whether a batch that lacks `missing` groups can take one now."""
        return bool(self._groups) or len(self._spares) >= missing > 0

    def pop(self, step: int, missing: int) -> Lease[RolloutSlice] | None:
        """The next group for batch `step`, None if none is ready. Raises BufferOrderError."""
        if self._groups and self._judged:
            return self._groups.pop(self._choose(step, missing))[-1].lease
        if self._groups:
            return heapq.heappop(self._groups)[-1].lease
        if self.ready(missing):
            return self._spares.pop(_first(self._spares, lambda w: (w.group_id,))).lease
        return None

    def take_old(self, step: int) -> list[Lease[RolloutSlice]]:
        """Remove the groups that are too old for batch `step`, oldest first."""
        old = [w for *_, w in self._groups if not self.gate.fresh(step=step, oldest_version=w.oldest)]
        self._groups = [p for p in self._groups if self.gate.fresh(step=step, oldest_version=p[-1].oldest)]
        heapq.heapify(self._groups)
        return [w.lease for w in sorted(old, key=lambda w: w.group_id)]

    def take_spares(self) -> list[tuple[Lease[RolloutSlice], str]]:
        """Remove the spare groups, each with its reason: the batch that they waited for is full."""
        spares, self._spares = self._spares, []
        return [(w.lease, w.spare or "") for w in sorted(spares, key=lambda w: w.group_id)]

    def take_all(self) -> list[Lease[RolloutSlice]]:
        """Remove everything, oldest first."""
        rest = sorted((*(w for *_, w in self._groups), *self._spares), key=lambda w: (w.group_id, w.arrival))
        self._groups, self._spares = [], []
        return [w.lease for w in rest]

    def _choose(self, step: int, missing: int) -> int:
        """Index of the next group, for orders that depend on the batch."""
        if self._custom is not None:
            return self._call_order(self._custom, step)
        last = self._deadline(step, missing)
        waiting = [w for *_, w in self._groups]
        return _first(waiting, lambda w: (float(self._slack(w, step) > last), *self._priority(w, step)))

    def _slack(self, waiting: Waiting, step: int) -> float:
        """Batches after `step` that could still take the group."""
        return self.gate.batches_left(step=step, oldest_version=waiting.oldest)

    def _deadline(self, step: int, missing: int) -> float:
        """Only groups with this slack or less may be taken now, or some would become too old for lack of a place.

        The batches up to k from now have `missing` + k * B places; if as many groups have a slack of k or less, none of
        these places is free for further groups (earliest deadline first, applied only where it binds).
        """
        slacks = Counter(max(self._slack(waiting, step), 0) for *_, waiting in self._groups)
        pressed = 0
        for k in range(self.gate.max_staleness + 1):
            pressed += slacks[k]
            if pressed >= missing + k * self.gate.batch:
                return k
        return math.inf

    def _priority(self, waiting: Waiting, step: int) -> tuple[float, ...]:
        """First the groups that the next batch could not take, oldest first; then the strongest signal."""
        if self._slack(waiting, step) <= 0:
            return (0.0, float(waiting.group_id))
        return (1.0, -waiting.signal, float(waiting.group_id))

    def _call_order(self, function: OrderFunction, step: int) -> int:
        self._groups.sort()
        slices = [w.lease.message for *_, w in self._groups]
        rule = f"it must return the index of one of the {len(slices)} waiting groups"
        try:
            chosen = as_index(function(slices, step))
        except Exception as error:
            raise BufferOrderError(
                f"--buffer-order {self._order} raised {type(error).__name__}: {error}; {rule}"
            ) from error
        if not 0 <= chosen < len(slices):
            raise BufferOrderError(f"--buffer-order {self._order} returned {chosen}; {rule}")
        return chosen


def _first(groups: Sequence[Waiting], key: Callable[[Waiting], tuple[float, ...]]) -> int:
    return min(range(len(groups)), key=lambda i: key(groups[i]))
