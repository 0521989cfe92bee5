"""One turn of a group's rollouts: asked of the sampler, ended by deadlines, begun anew where a group waits for it.

Samples that share all their tokens so far are one request, and each is handed on when it has ended. A sample that has
more than its budget, or whose time is over, asks nobody. What another process has left of a turn is gone on from
(stages/generate/response_journal.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from stages.base import Activity
from stages.generate.requests import Deadline, Requests
from stages.generate.response_journal import ResponseJournal
from stages.generate.samples import append_result
from stages.messages import PromptGroup, Sample
from stages.ports import Readable
from stages.rollouts import cut
from stages.sampling.attempt import Progress
from stages.sampling.requests import OUT_OF_TIME
from stages.sampling.sampler import Sampler
from stages.topic_values import newest_settings

Ended = Callable[[Sample], None]


class Turns:
    """Generates turns for one replica."""

    def __init__(self, requests: Requests, sampler: Sampler, activity: Activity, journal: ResponseJournal) -> None:
        self.requests, self.sampler, self.activity, self.journal = requests, sampler, activity, journal
        self.topic: Readable | None = None  # what the user changes while the run goes on

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
            had = await self.journal.restore(group, samples, self._oldest)
            progress = self._progress(group, samples, budget)
            request = self.requests.of(group, samples, budget, deadline)
            async with self.sampler.stream(request, had, progress) as members:
                async for place, result in members:
                    if not had or result is not had[place]:
                        self.journal.keep(group, samples[place], result)
                    sample = append_result(samples[place], result)
                    if result.reason == OUT_OF_TIME and deadline is not None:
                        tasks.create_task(self._late(group, sample, deadline, done))
                    else:
                        done(sample)

    def _progress(self, group: PromptGroup, samples: Sequence[Sample], budget: int) -> Progress | None:
        """Who is told of the parts of responses, if they are long enough to be worth it."""
        journal = self.journal
        if group.purpose == "eval" or not self.requests.rollout.partial_rollout or not 0 < journal.tokens < budget:
            return None
        return Progress(journal.tokens, lambda place, result: journal.keep(group, samples[place], result))

    @property
    def _oldest(self) -> int:
        """The oldest version that the batches to come may train."""
        changed = None if self.topic is None else newest_settings(self.topic)
        bound = self.requests.config.asynchrony.max_staleness if changed is None else changed.max_staleness
        return (self.sampler.directory.published or 0) - (bound or 0)

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
