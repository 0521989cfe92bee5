"""Complete groups held by the trainer, from their arrival to their settlement, and the choice of the next one.

Invariants:
- I2: no group enters batch t unless the gate admits it (`refused`), so the order decides which group is first, never
  which is allowed. A refused group is settled as stale, or as discarded if over-sampling left it over from a
  synchronous batch.
- A group id is held once, however often it is delivered, and leaves once: to the batch or to be settled.
- A spare group (`nonzero_std_fallback`: rewards all equal) leaves only if no other group waits and the spares fill the
  batch.
- A group is held until the message that settles it (its own, or the report of its step) is in the ledger's stream. So
  `groups` is exactly what a checkpoint must keep: complete, and open in the ledger committed with it.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import Any

import numpy as np

from configs.schema import Config
from models.import_path import has_args, import_path, raised
from models.slime_arguments import slime_arguments
from stages.base import Activity, TrainOptions
from stages.errors import BufferOrderError
from stages.group.filters import FALLBACK, zero_std
from stages.messages import Outcome, RolloutSlice
from stages.ports import Lease, Ports, Topic, wait_value
from stages.rollouts import newest_version, oldest_version, rollout_return, rollouts, settlement
from stages.slime.hooks import shown
from stages.staleness_gate import StalenessGate

OrderFunction = Callable[..., Any]  # (groups, step) -> index, or slime's (args, rollout_id, buffer, num_samples)


@dataclass(frozen=True, eq=False)
class Waiting:
    """One group in the buffer."""

    lease: Lease[RolloutSlice]
    arrival: int
    group_id: int
    version: int | None  # that decides on its age: smallest of its trainable tokens, or the largest if they are masked
    signal: float  # standard deviation of its rewards, if the order goes by it
    spare: str | None  # the reason why it is a spare, if it is


class GroupBuffer:
    """Groups in the order of `--buffer-order`."""

    def __init__(self, config: Config) -> None:
        self._order = config.asynchrony.buffer_order
        self._custom: OrderFunction | None = import_path(self._order) if ":" in self._order else None
        self._args = slime_arguments(config) if has_args(self._custom) else None
        self._picked: list[int] = []  # by slime's buffer filter: ids of the next groups
        self._dropped: list[Waiting] = []
        self.gate = StalenessGate.of(config)
        self._has_spares = FALLBACK in config.filter.dynamic_sampling_filter
        self._groups: list[Waiting] = []  # sorted
        self._spares: list[Waiting] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._groups) + len(self._spares)

    def push(self, lease: Lease[RolloutSlice]) -> None:
        slice_ = lease.message
        self._arrivals += 1
        rewards = [rollout_return(parts) for parts in rollouts(slice_.samples)] if self._order == "priority" else []
        waiting = Waiting(
            lease,
            self._arrivals,
            slice_.group.group_id,
            (newest_version if self.gate.masks else oldest_version)(slice_.samples),
            float(np.std(rewards)) if rewards else 0.0,
            zero_std(slice_) if self._has_spares else None,
        )
        if waiting.spare is not None:
            self._spares.append(waiting)
        else:
            bisect.insort(self._groups, waiting, key=self._place)

    def _place(self, waiting: Waiting) -> tuple[int, int]:
        return waiting.arrival if self._order == "ready_first" else waiting.group_id, waiting.arrival

    def ready(self, missing: int) -> bool:
        """Whether a batch that lacks `missing` groups can take one now."""
        return bool(self._groups) or len(self._spares) >= missing > 0

    def pop(self, step: int, missing: int) -> Lease[RolloutSlice] | None:
        """The next group for batch `step`, None if none is ready. Raises BufferOrderError."""
        if self._groups and self._args is not None:
            return self._filtered(step, missing)
        if self._groups:
            return self._groups.pop(self._choose(step, missing)).lease
        if self.ready(missing):
            self._spares.sort(key=lambda w: w.group_id, reverse=True)
            return self._spares.pop().lease
        return None

    def take_old(self, step: int) -> list[Lease[RolloutSlice]]:
        """Remove the groups that are too old for batch `step`, oldest first."""
        old = [w for w in self._groups if not self.gate.fresh(step=step, version=w.version)]
        self._groups = [w for w in self._groups if self.gate.fresh(step=step, version=w.version)]
        return [w.lease for w in sorted(old, key=lambda w: w.group_id)]

    def take_spares(self) -> list[tuple[Lease[RolloutSlice], str]]:
        """Remove the spare groups, each with its reason: the batch that they waited for is full."""
        spares, self._spares = self._spares, []
        return [(w.lease, w.spare or "") for w in sorted(spares, key=lambda w: w.group_id)]

    def take_all(self) -> list[Lease[RolloutSlice]]:
        """Remove everything, oldest first."""
        rest = sorted((*self._groups, *self._spares), key=lambda w: (w.group_id, w.arrival))
        self._groups, self._spares = [], []
        return [w.lease for w in rest]

    def _choose(self, step: int, missing: int) -> int:
        """Index of the next group: the first one, unless the order depends on the batch."""
        if self._custom is not None:
            return self._call_order(self._custom, step)
        if self._order != "priority":
            return 0
        last = self._deadline(step, missing)

        def order(waiting: Waiting) -> tuple[float, ...]:
            slack = self._slack(waiting, step)
            # First the groups that the next batch could not take, oldest first; then the strongest signal.
            behind = (0.0,) if slack <= 0 else (1.0, -waiting.signal)
            return float(slack > last), *behind, float(waiting.group_id)

        return min(range(len(self._groups)), key=lambda place: order(self._groups[place]))

    def _slack(self, waiting: Waiting, step: int) -> float:
        """Batches after `step` that could still take the group."""
        return self.gate.batches_left(step=step, version=waiting.version)

    def _deadline(self, step: int, missing: int) -> float:
        """Only groups with this slack or less may be taken now, or some would become too old for lack of a place.

        The batches up to k from now have `missing` + k * B places; if as many groups have a slack of k or less, none of
        these places is free for further groups (earliest deadline first, applied only where it binds).
        """
        slacks = Counter(max(self._slack(waiting, step), 0) for waiting in self._groups)
        pressed = 0
        for k in range(self.gate.max_staleness + 1):
            pressed += slacks[k]
            if pressed >= missing + k * self.gate.batch:
                return k
        return math.inf

    def take_dropped(self) -> list[Lease[RolloutSlice]]:
        """Remove the groups that slime's buffer filter took out of the buffer and did not return."""
        dropped, self._dropped = self._dropped, []
        return [w.lease for w in dropped]

    def _filtered(self, step: int, missing: int) -> Lease[RolloutSlice] | None:
        """The next group that slime's buffer filter chose. It is asked again when those are used up."""
        assert self._custom is not None
        waiting = {w.group_id: w for w in self._groups}
        self._picked = [group_id for group_id in self._picked if group_id in waiting]
        if not self._picked:
            buffer = [shown(w.lease.message) for w in self._groups]
            try:
                groups: Sequence[Any] = self._custom(self._args, step, buffer, missing)
                self._picked = [as_index(group[0].group_index) for group in groups]
                left = {*self._picked, *(as_index(group[0].group_index or 0) for group in buffer)}
            except Exception as error:
                raise BufferOrderError(f"--buffer-filter-path {self._order} raised {raised(error)}") from error
            if unknown := left - waiting.keys():
                raise BufferOrderError(
                    f"--buffer-filter-path {self._order} returned {sorted(unknown)}, which are not in the buffer; "
                    "return groups of the buffer"
                )
            self._dropped += [w for w in self._groups if w.group_id not in left]
            self._groups = [w for w in self._groups if w.group_id in left]
        if not self._picked:
            return None
        chosen = waiting[self._picked.pop(0)]
        self._groups.remove(chosen)
        return chosen.lease

    def _call_order(self, function: OrderFunction, step: int) -> int:
        slices = [w.lease.message for w in self._groups]
        rule = f"it must return the index of one of the {len(slices)} waiting groups"
        try:
            chosen = as_index(function(slices, step))
        except Exception as error:
            raise BufferOrderError(f"--buffer-order {self._order} raised {raised(error)}; {rule}") from error
        if not 0 <= chosen < len(slices):
            raise BufferOrderError(f"--buffer-order {self._order} returned {chosen}; {rule}")
        return chosen


Record = Callable[[RolloutSlice, Outcome, str], Awaitable[None]]


class HeldGroups:
    """Complete groups, and their settlement if they are not trained. `record` is called for each such group."""

    def __init__(self, config: Config, ports: Ports, activity: Activity, record: Record, options: TrainOptions) -> None:
        """`options`: the ledger when the trainer was restarted. A group below `admitted` that is not `open` has ended;
        if it is delivered again, its release was lost, and it is dropped."""
        self.gate = dataclasses.replace(StalenessGate.of(config), floor=options.floor)
        self.drained: str | None = None  # why the run drains, if it does
        self._ports, self._activity, self._record = ports, activity, record
        self._buffer = GroupBuffer(config)
        self._buffer.gate = self.gate
        self._held: dict[int, Lease[RolloutSlice]] = {}
        self._seen: set[int] = set()
        self._options = options
        self._arrived = asyncio.Event()
        self._inlet_ended = False

    def bound(self, max_staleness: int) -> None:
        """Set the staleness bound, from the next batch on."""
        self.gate = self._buffer.gate = dataclasses.replace(self.gate, max_staleness=max_staleness)

    @property
    def groups(self) -> tuple[RolloutSlice, ...]:
        """All held groups, including those of the batch in progress."""
        return tuple(lease.message for lease in self._held.values())

    def ready(self, missing: int) -> bool:
        """Whether a batch that lacks `missing` groups can take one now."""
        return self._buffer.ready(missing)

    def add(self, lease: Lease[RolloutSlice]) -> None:
        """Hold a group; a repeated delivery is released at once."""
        group_id = lease.message.group.group_id
        ended = group_id < self._options.admitted and group_id not in self._options.open
        if ended or group_id in self._seen:
            lease.done()
            return
        self._seen.add(group_id)
        self._held[group_id] = lease
        self._buffer.push(lease)
        self._arrived.set()

    def put_back(self, leases: Sequence[Lease[RolloutSlice]]) -> None:
        """Return the groups of a batch that was not trained."""
        for lease in leases:
            self._buffer.push(lease)

    async def read(self) -> None:
        """Waits for groups; ends with the inlet."""
        inlet = self._ports.inlets["in"]
        while (lease := await inlet.receive()) is not None:
            self._activity.items_in += 1
            self.add(lease)
        self._inlet_ended = True
        self._arrived.set()

    async def watch_drain(self, topic: Topic) -> None:
        """Waits for the topic `drain`, then wakes `next` and ends."""
        self.drained = (await wait_value(topic, "drain")).decode()
        self._arrived.set()

    async def next(self, step: int, missing: int) -> Lease[RolloutSlice] | None:
        """The next group for batch `step`, which lacks `missing`. It may be too old: check with `refused`.

        Waits for an arrival. None once the inlet has ended and nothing is ready, or when the run drains: the checkpoint
        keeps the waiting groups, so that stopping a run does not wait until all of them are trained.
        """
        while self.drained is None:
            lease = self._buffer.pop(step, missing)
            for dropped in self._buffer.take_dropped():
                await self.settle(dropped, "filtered", "buffer_filter")
            if lease is not None or self._inlet_ended:
                return lease
            await self._arrival()
        return None

    async def refused(self, lease: Lease[RolloutSlice], step: int) -> bool:
        """Whether batch `step` must not train the group; if so, settle it."""
        newest = max((run.version for s in lease.message.samples for run in s.version_runs), default=-1)
        if newest > step and self.gate.ages:
            detail = f"a token has version {newest}, but the newest weights are version {step}; no engine can have it"
            await self.settle(lease, "failed", detail)
            return True
        refusal = self.gate.refusal(step, lease.message.samples)
        if refusal is not None:
            await self.settle(lease, *refusal)
        return refusal is not None

    async def clear(self, step: int) -> None:
        """Before batch `step`: settle groups that it could not take, so that new prompts replace them."""
        for lease, reason in self._buffer.take_spares():
            await self.settle(lease, "filtered", reason)
        for lease in self._buffer.take_old(step):
            await self.refused(lease, step)

    async def settle(self, lease: Lease[RolloutSlice], outcome: Outcome, detail: str) -> None:
        """Settle a group that is not trained."""
        slice_ = lease.message
        await self._ports.outlets["settle"].send(settlement(slice_, outcome, detail), slice_.group.key)
        await self._record(slice_, outcome, detail)
        self.ended([lease])
        lease.done()

    def ended(self, leases: Sequence[Lease[RolloutSlice]]) -> None:
        """These groups need no checkpoint any more: their settlement is in the ledger's stream."""
        for lease in leases:
            del self._held[lease.message.group.group_id]

    async def settle_rest(self) -> None:
        """After the last batch: discard all held and all arriving groups. Ends with the inlet."""
        while True:
            rest = self._buffer.take_all()
            for lease in rest:
                await self.settle(lease, "discarded", self.drained or "all rollout batches are trained")
            if not rest and self._inlet_ended:
                return
            if not rest:
                await self._arrival()

    async def _arrival(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()
