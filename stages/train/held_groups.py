"""Complete groups held by the trainer: from their arrival, or their return from a checkpoint, until they are settled.

Invariants:
- I2: no group enters batch t unless the gate admits it (`refused`). A refused group is settled as stale, or as
  discarded if over-sampling left it over from a synchronous batch.
- A group id is held once, however often it is delivered.
- A group is held until the message that settles it (its own, or the report of its step) is in the ledger's stream. So
  `groups` is exactly what a checkpoint must keep: complete, and open in the ledger committed with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from configs.schema import Config
from stages.base import Activity
from stages.messages import Outcome, RolloutSlice
from stages.ports import Lease, Ports, Topic
from stages.rollouts import oldest_version, settlement
from stages.staleness_gate import StalenessGate
from stages.train.buffer import GroupBuffer

Record = Callable[[RolloutSlice, Outcome, str], Awaitable[None]]


class HeldGroups:
    """Complete groups, and their settlement if they are not trained. `record` is called for each such group."""

    def __init__(self, config: Config, ports: Ports, activity: Activity, record: Record) -> None:
        self.gate = StalenessGate.of(config)
        self.drained: str | None = None  # why the run drains, if it does
        self._ports, self._activity, self._record = ports, activity, record
        self._buffer = GroupBuffer(config)
        self._held: dict[int, Lease[RolloutSlice]] = {}
        self._seen: set[int] = set()
        self._admitted, self._open = 0, frozenset[int]()
        self._arrived = asyncio.Event()
        self._inlet_ended = False

    def bound(self, max_staleness: int) -> None:
        """Set the staleness bound, from the next batch on."""
        self.gate = self._buffer.gate = dataclasses.replace(self.gate, max_staleness=max_staleness)

    def restore_ledger(self, admitted: int, still_open: frozenset[int]) -> None:
        """State of the ledger when the trainer was restarted. A group below `admitted` that is not in `still_open` has
        ended; if it is delivered again, its release was lost, and it is dropped."""
        self._admitted, self._open = admitted, still_open

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
        ended = group_id < self._admitted and group_id not in self._open
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
        revision = 0
        while self.drained is None:
            revision = await topic.wait(revision, "drain")
            reason = topic.get("drain")
            self.drained = None if reason is None else reason.decode()
        self._arrived.set()

    async def next(self, step: int, missing: int) -> Lease[RolloutSlice] | None:
        """The next group for batch `step`, which lacks `missing`. It may be too old: check with `refused`.

        Waits for an arrival. None once the inlet has ended and nothing is ready, or when the run drains: the checkpoint
        keeps the waiting groups, so that stopping a run does not wait until all of them are trained.
        """
        while self.drained is None:
            lease = self._buffer.pop(step, missing)
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
        oldest = oldest_version(lease.message.samples)
        if self.gate.fresh(step=step, oldest_version=oldest):
            return False
        detail = f"oldest token has version {oldest}, batch {step}, bound {self.gate.max_staleness}"
        if self.gate.max_staleness == 0 and self.gate.extra > 0:
            await self.settle(lease, "discarded", f"over-sampled: {detail}")
        else:
            await self.settle(lease, "stale", detail)
        return True

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
        self.release([lease])

    def release(self, leases: Sequence[Lease[RolloutSlice]]) -> None:
        """Release groups whose settlement is in the ledger's stream."""
        self.ended(leases)
        for lease in leases:
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
