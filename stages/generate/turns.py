"""One turn of a group's rollouts: requested from the sampler, ended by deadlines, restarted if a group waits for it.

Samples that share all tokens so far are one request; each is passed on at its end. A sample beyond its budget or its
deadline makes no request. A turn continues from the records of another process (stages/records/responses.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from stages.base import Activity
from stages.messages import PromptGroup, Sample
from stages.ports import Readable
from stages.records.responses import ResponseJournal
from stages.rollouts import cut
from stages.sampling.attempt import Progress
from stages.sampling.requests import OUT_OF_TIME
from stages.sampling.rollout_requests import Deadline, Requests, append_result
from stages.sampling.sampler import Sampler
from stages.topic_values import newest_settings

Ended = Callable[[Sample], None]


class Turns:
    """Generates turns for one replica."""

    def __init__(self, requests: Requests, sampler: Sampler, activity: Activity, journal: ResponseJournal) -> None:
        self.requests, self.sampler, self.activity, self.journal = requests, sampler, activity, journal
        self.topic: Readable | None = None  # settings that the user changes during the run

    async def take(self, group: PromptGroup, samples: Sequence[Sample], ended: Ended) -> None:
        """One more turn of each sample.

        `ended` gets each sample when it has finished, failed, or was aborted by a drain. Returns after the last sample.
        """

        def done(sample: Sample) -> None:
            self.activity.failures += sample.status == "failed"
            ended(msgspec.structs.replace(sample, turns=sample.turns + 1))

        if all(s.turns == 0 and s.response_length == 0 and s.sequences == 1 for s in samples):
            await self._request(group, samples, done)
            return
        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                tasks.create_task(self._request(group, (sample,), done))

    async def _request(self, group: PromptGroup, samples: Sequence[Sample], done: Ended) -> None:
        """One request, and a further request for each sample that its group's deadline restarts."""
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
            restored = await self.journal.restore(group, samples, self._oldest)
            progress = self._progress(group, samples, budget)
            request = self.requests.of(group, samples, budget, deadline)
            async with self.sampler.stream(request, restored, progress) as members:
                async for place, result in members:
                    if not restored or result is not restored[place]:
                        self.journal.keep(group, samples[place], result)
                    sample = append_result(samples[place], result)
                    if result.reason == OUT_OF_TIME and deadline is not None:
                        tasks.create_task(self._late(group, sample, deadline, done))
                    else:
                        done(sample)

    def _progress(self, group: PromptGroup, samples: Sequence[Sample], budget: int) -> Progress | None:
        """The receiver of partial responses, if a response may become long enough for a record."""
        journal = self.journal
        if group.purpose == "eval" or not self.requests.rollout.partial_rollout or not 0 < journal.tokens < budget:
            return None
        return Progress(journal.tokens, lambda place, result: journal.keep(group, samples[place], result))

    @property
    def _oldest(self) -> int:
        """The oldest version that later batches may train."""
        changed = None if self.topic is None else newest_settings(self.topic)
        bound = self.requests.config.asynchrony.max_staleness if changed is None else changed.max_staleness
        return (self.sampler.directory.published or 0) - (bound or 0)

    async def _late(self, group: PromptGroup, sample: Sample, deadline: Deadline, done: Ended) -> None:
        """A sample reached its deadline: keep it as it is, or restart it."""
        stopped = self.requests.stopped(sample, deadline)
        replaced = stopped.replaced > sample.replaced
        self._add("deadline_replaced" if replaced else "deadline_truncated", 1)
        self._add("deadline_tokens_dropped", sample.response_length if replaced else 0)
        if replaced:
            await self._request(group, (stopped,), done)
        else:
            done(stopped)

    def _add(self, name: str, n: float) -> None:
        self.activity.extra[name] = self.activity.extra.get(name, 0.0) + n
