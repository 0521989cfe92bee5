"""The part of an engine that only tells of its scheduler."""

from __future__ import annotations

from typing import Protocol

from models.engines.core import EngineFacts, Totals
from models.engines.protocol import Load


class Scheduler(Protocol):
    """What decides which completions run."""

    label: str
    paused: bool
    totals: Totals

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def used_tokens(self) -> int: ...


class ScheduledEngine:
    """What an `EngineCore` tells of its scheduler."""

    def __init__(self, facts: EngineFacts, scheduler: Scheduler) -> None:
        self.facts, self._scheduler = facts, scheduler

    @property
    def label(self) -> str:
        return self._scheduler.label

    @property
    def paused(self) -> bool:
        return self._scheduler.paused

    def totals(self) -> Totals:
        return self._scheduler.totals

    def measure(self) -> Load:
        """The load at this moment."""
        facts, now = self.facts, self._scheduler
        return Load(
            num_running_reqs=now.running,
            num_waiting_reqs=now.waiting,
            num_used_tokens=now.used_tokens,
            max_total_num_tokens=facts.kv_tokens,
            max_running_requests=facts.slots,
            token_usage=now.used_tokens / facts.kv_tokens,
            cache_hit_rate=now.totals.cache_hit_rate,
            busy_s=now.totals.busy_s,
        )
