"""Faults on purpose where messages come in, the one place that every stage passes. Only a stage that `--fault-inject`
names has such an inlet."""

from __future__ import annotations

from typing import Generic, TypeVar

from models.fault_injection import FaultPlan
from stages.ports import Inlet, Lease

T_co = TypeVar("T_co", covariant=True)


class FaultyInlet(Generic[T_co]):
    """An inlet some of whose messages meet a fault when the stage takes them."""

    def __init__(self, inlet: Inlet[T_co], plan: FaultPlan) -> None:
        self._inlet, self._plan = inlet, plan

    async def receive(self) -> Lease[T_co] | None:
        """As the inlet. Raises InjectedError, which ends the replica: it is not about the one message."""
        lease = await self._inlet.receive()
        if lease is not None:
            await self._plan.meet(lease.key, lease.attempt)
        return lease
