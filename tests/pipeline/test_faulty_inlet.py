"""Faults on purpose where messages come in."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema.run import read_fault
from models.fault_injection import FaultPlan, InjectedError, injected
from pipeline.hosts.worker import FaultyInlet
from tests.stages.stage_rig import Held, make_sample, make_slice


class Fixed:
    """An inlet with these leases."""

    def __init__(self, *leases: Held) -> None:
        self._left = list(leases)

    async def receive(self) -> Held | None:
        return self._left.pop(0) if self._left else None


async def test_a_message_may_meet_a_fault_at_each_delivery(tmp_path: Path) -> None:
    plan = FaultPlan((read_fault("reward:0.5:error"),), 1, 0, "reward-0", str(tmp_path / "faults.jsonl"))
    message, met = make_slice(0, make_sample(0)), list[str]()
    for attempt in (1, 2):
        for key in map(str, range(20)):
            inlet = FaultyInlet(Fixed(held := Held(message, key, attempt)), plan)
            if plan.draw(key, attempt) is None:
                assert await inlet.receive() is held
            else:
                with pytest.raises(InjectedError):
                    await inlet.receive()
                assert held.ends == [], "it is the hub's, which gives it to another replica"
                met.append(key)
    assert 0 < len(met) < 40
    assert injected(tmp_path) == {"reward error": len(met)}
    assert await FaultyInlet(Fixed(), plan).receive() is None
