"""The group stage: puts the rollouts of one prompt together again and decides whether they are worth training on.

Invariants: a group leaves as one slice with its members in index order, or is settled here (filtered, failed,
surplus); the leases of its parts are released only then, so a lost replica loses nothing. For each (group, index) the
first rollout wins: a redelivered prompt may produce others, and they are dropped.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from stages.base import Stage
from stages.filters import FilterDecision, GroupFilter, resolve_filter
from stages.messages import PromptGroup, RolloutSlice, Sample, Settled
from stages.ports import Lease, Outlet, Ports

REMEMBERED_GROUPS = 100_000


@dataclass
class _Open:
    group: PromptGroup
    samples: dict[int, Sample] = field(default_factory=dict)
    leases: list[Lease[RolloutSlice]] = field(default_factory=list)


class GroupStage(Stage):
    """Joins, filters and passes on; evaluation rollouts go straight to the evaluate stage."""

    async def setup(self) -> None:
        self._open: dict[int, _Open] = {}
        self._filters: list[GroupFilter] = resolve_filter(self.config.filter)
        self._drain: str | None = None
        self._finished: OrderedDict[int, None] = OrderedDict()  # newest group ids that left: late duplicates end here

    async def run(self, ports: Ports) -> None:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_drain(ports))
            await self._join(ports)
            watch.cancel()

    async def _watch_drain(self, ports: Ports) -> None:
        """Waits for the topic `drain`, then settles what is incomplete as surplus. Cancelled when the inlet ends."""
        revision = 0
        while self._drain is None:
            revision = await ports.topic.wait(revision)
            reason = ports.topic.get("drain")
            self._drain = None if reason is None else reason.decode()
        for open_ in list(self._open.values()):
            await self._surplus(open_, ports.outlets["settle"])

    async def _join(self, ports: Ports) -> None:
        """Waits for slices; ends with the inlet."""
        inlet = ports.inlets["in"]
        while (lease := await inlet.receive()) is not None:
            self.activity.items_in += 1
            with self.activity.working():
                slice_: RolloutSlice = lease.message
                if slice_.group.purpose == "eval":
                    if "eval" in ports.outlets:
                        with self.activity.sending():
                            await ports.outlets["eval"].send(slice_, slice_.key)
                    lease.done()
                    continue
                if slice_.group.group_id in self._finished:
                    lease.done()
                    continue
                open_ = self._open.setdefault(slice_.group.group_id, _Open(slice_.group))
                open_.leases.append(lease)
                for sample in slice_.samples:
                    open_.samples.setdefault(sample.index, sample)
                if self._drain is not None:
                    await self._surplus(open_, ports.outlets["settle"])
                elif len(open_.samples) >= slice_.group.n_samples:
                    await self._finish(open_, ports)
                self.activity.extra["open_groups"] = float(len(self._open))

    async def _finish(self, open_: _Open, ports: Ports) -> None:
        group_id = open_.group.group_id
        self._open.pop(group_id, None)  # claimed: a drain must not settle it as well
        members = tuple(open_.samples[i] for i in sorted(open_.samples))
        slice_ = RolloutSlice(open_.group, members)
        with self.span("group", group=group_id):
            verdict = await self._judge(slice_)
        if isinstance(verdict, RolloutSlice):
            with self.activity.sending():
                await ports.outlets["out"].send(verdict, str(group_id))
            self.activity.items_out += 1
        else:
            with self.activity.sending():
                await ports.outlets["settle"].send(verdict, str(group_id))
        self._release(open_)

    async def _judge(self, slice_: RolloutSlice) -> RolloutSlice | Settled:
        """The slice of counting members, or how the group ends."""
        counting = [s for s in slice_.samples if s.status in ("completed", "truncated")]
        for sample in counting:
            fault = sample.fault()
            if fault is not None:
                return slice_.ended("failed", f"sample {sample.index}: {fault}")
        needed = 2 if slice_.group.n_samples > 1 else 1
        if len(counting) < needed:
            errors = sorted({s.error or s.status for s in slice_.samples if s not in counting})
            detail = f"insufficient_members: {len(counting)} of {len(slice_.samples)}; {'; '.join(errors)[:300]}"
            return slice_.ended("failed", detail)
        kept = msgspec.structs.replace(slice_, samples=tuple(counting))
        for filter_ in self._filters:
            try:
                answer = filter_(kept)
                decision: FilterDecision = await answer if inspect.isawaitable(answer) else answer
            except Exception as error:
                self.activity.failures += 1
                return slice_.ended("failed", f"group filter: {type(error).__name__}: {error}")
            if not decision.keep:
                self.activity.extra["filtered"] = self.activity.extra.get("filtered", 0.0) + 1
                return slice_.ended("filtered", decision.reason or "filtered")
        return kept

    async def _surplus(self, open_: _Open, settle: Outlet[Settled]) -> None:
        if self._open.pop(open_.group.group_id, None) is not open_:
            return  # it leaves another way just now
        slice_ = RolloutSlice(open_.group, tuple(open_.samples.values()))
        await settle.send(slice_.ended("surplus", self._drain or ""), str(open_.group.group_id))
        self._release(open_)

    def _release(self, open_: _Open) -> None:
        self._finished[open_.group.group_id] = None
        if len(self._finished) > REMEMBERED_GROUPS:
            self._finished.popitem(last=False)
        for lease in open_.leases:
            lease.done()
