"""One turn of a group's rollouts: asked of the sampler, ended by deadlines, begun anew where a group waits for it.

Samples that share all their tokens so far are one request, and each is handed on when it has ended. A sample that has
more than its budget, or whose time is over, asks nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from stages.base import Activity
from stages.generate.requests import Deadline, Requests
from stages.generate.samples import append_result
from stages.messages import PromptGroup, Sample
from stages.sampling.results import OUT_OF_TIME
from stages.sampling.sampler import Sampler
from stages.sequences import cut

Ended = Callable[[Sample], None]


class Turns:
    """Generates turns for one replica."""

    def __init__(self, requests: Requests, sampler: Sampler, activity: Activity) -> None:
        self.requests, self.sampler, self.activity = requests, sampler, activity

    async def take(self, group: PromptGroup, samples: Sequence[Sample], ended: Ended) -> None:
        """One more turn of each sample. `ended` is told of each when it has finished or failed, or was aborted by a
        drain; waits for the last one."""

        def done(sample: Sample) -> None:
            self.activity.failures += sample.status == "failed"
            ended(msgspec.structs.replace(sample, turns=sample.turns + 1))

        if all(s.turns == 0 and s.response_length == 0 and s.sequences == 1 for s in samples):
            await self._ask(group, samples, done)
            return
        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                tasks.create_task(self._ask(group, (sample,), done))

    async def _ask(self, group: PromptGroup, samples: Sequence[Sample], done: Ended) -> None:
        """One request, and another one for each sample that its group's deadline has begin anew."""
        first = samples[0]
        budget, deadline = self.requests.budget(group, first), self.requests.deadline(group, first)
        if budget <= 0:
            for sample in samples:
                done(msgspec.structs.replace(cut(sample, sample.length + budget), status="truncated"))
            return
        async with asyncio.TaskGroup() as tasks:
            if deadline is not None and deadline.left_s <= 0:
                for sample in samples:
                    tasks.create_task(self._late(group, sample, deadline, done))
                return
            async with self.sampler.stream(self.requests.of(group, samples, budget, deadline)) as members:
                async for place, result in members:
                    sample = append_result(samples[place], result)
                    if result.reason == OUT_OF_TIME and deadline is not None:
                        tasks.create_task(self._late(group, sample, deadline, done))
                    else:
                        done(sample)

    async def _late(self, group: PromptGroup, sample: Sample, deadline: Deadline, done: Ended) -> None:
        """A sample's time is over: it is kept as it is, or begun anew."""
        stopped = self.requests.stopped(sample, deadline)
        replaced = stopped.replaced > sample.replaced
        self._add("deadline_replaced" if replaced else "deadline_truncated", 1)
        self._add("deadline_tokens_dropped", sample.response_length if replaced else 0)
        if replaced:
            await self._ask(group, (stopped,), done)
        else:
            done(stopped)

    def _add(self, name: str, n: float) -> None:
        self.activity.extra[name] = self.activity.extra.get(name, 0.0) + n
