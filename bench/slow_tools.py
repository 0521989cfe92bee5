"""The environment of `bench.agentic`: a task of a few turns, each with a call that takes its time somewhere else.

Waits are lognormal, drawn from the task's seed: contenders that are given the same tasks wait the same.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from stages.agents.environment import Start, Step, Task, Turn
from stages.chat.messages import Message

LONGEST_S = 40.0  # a step that takes longer than its deadline is another matter


class SlowTools:
    """`turns` turns of the model with a wait of `wait_s` seconds on average behind each but the last."""

    def __init__(self, turns: int = 4, wait_s: float = 1.0, sigma: float = 1.0) -> None:
        self._turns, self._mean, self._sigma = turns, wait_s, sigma
        self._random = random.Random()

    async def reset(self, task: Task) -> Start:
        self._random.seed(task.sample_seed)
        return Start((Message("user", "Use your tools."),))

    async def step(self, turn: Turn) -> Step:
        if turn.number + 1 >= self._turns:
            return Step(reward=float(self._random.random() < 0.5), done=True)
        if self._mean:
            wait_s = self._random.lognormvariate(math.log(self._mean) - self._sigma**2 / 2, self._sigma)
            await asyncio.sleep(min(wait_s, LONGEST_S))
        return Step((Message("user", "It says 42."),))

    async def close(self) -> None:
        """Nothing is kept."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Mapping[str, Any]]:
        """All alike: what differs is the seed of a rollout."""
        while True:
            yield {}
