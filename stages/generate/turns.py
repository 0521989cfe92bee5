"""One turn of a group's rollouts, and the destination of each rollout after it.

A turn is requested from the sampler, ended by deadlines, and restarted if a group is abandoned. Then the rollout goes
to the loop stage that wants it, or out, to the reward stage.

Invariants: the sequences of a rollout stay together until the last has ended; an exception in `wants` fails that
rollout with the reason, and nothing else; rollouts on their way out carry no data that only loops read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from configs.schema import Config
from models.import_path import import_path
from stages.base import Activity, LoopStage, failed, side_by_side
from stages.messages import PromptGroup, RolloutSlice, Sample
from stages.records.unfinished import ResponseJournal
from stages.rollouts import cut, oldest_version, rollout_fault
from stages.sampling.attempt import Progress
from stages.sampling.requests import OUT_OF_TIME
from stages.sampling.rollout_requests import Deadline, Requests, append_result
from stages.sampling.sampler import Sampler

Ended = Callable[[Sample], None]


class Turns:
    """Generates turns for one replica."""

    def __init__(self, requests: Requests, sampler: Sampler, activity: Activity, journal: ResponseJournal) -> None:
        self.requests, self.sampler, self.activity, self.journal = requests, sampler, activity, journal

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
        await side_by_side(self._request(group, (sample,), done) for sample in samples)

    async def _request(self, group: PromptGroup, samples: Sequence[Sample], done: Ended) -> None:
        """One request, and a further request for each sample that its group's deadline restarts."""
        first = samples[0]
        budget, deadline = self.requests.budget(group, first), self.requests.deadline(group, first)
        if budget <= 0:
            for sample in samples:
                done(msgspec.structs.replace(cut(sample, sample.length + budget), status="truncated"))
            return
        oldest, own = self.sampler.oldest, oldest_version(samples)
        if own is not None and own < oldest and self.requests.cancels_stale(group):
            for sample in samples:
                done(msgspec.structs.replace(sample, status="aborted"))
            return
        async with asyncio.TaskGroup() as tasks:
            if deadline is not None and deadline.left_s <= 0:
                for sample in samples:
                    tasks.create_task(self._late(group, sample, deadline, done))
                return
            restored = await self.journal.restore(group, samples, oldest)
            # A receiver of partial responses, if a response may become long enough for a record.
            journal, partial = self.journal, group.purpose == "train" and self.requests.rollout.partial_rollout
            progress = None
            if partial and 0 < journal.tokens < budget:
                progress = Progress(journal.tokens, lambda place, result: journal.keep(group, samples[place], result))
            request = self.requests.of(group, samples, budget, deadline)
            cancel_stale, trained = self.requests.cancels_stale(group), group.purpose == "train"
            request = replace(request, cancel_stale=cancel_stale, cancel_decided=trained)
            async with self.sampler.stream(request, restored, progress) as members:
                async for place, result in members:
                    if not restored or result is not restored[place]:
                        self.journal.keep(group, samples[place], result)
                    sample = append_result(samples[place], result)
                    if result.reason == OUT_OF_TIME and deadline is not None:
                        tasks.create_task(self._late(group, sample, deadline, done))
                    else:
                        done(sample)

    async def _late(self, group: PromptGroup, sample: Sample, deadline: Deadline, done: Ended) -> None:
        """A sample reached its deadline: keep it as it is, or restart it."""
        stopped = self.requests.stopped(sample, deadline)
        replaced = stopped.replaced > sample.replaced
        self.activity.count("deadline_replaced" if replaced else "deadline_truncated")
        self.activity.count("deadline_tokens_dropped", sample.response_length if replaced else 0)
        if replaced:
            await self._request(group, (stopped,), done)
        else:
            done(stopped)


log = logging.getLogger("sluice.loops")


class Loops:
    """The loop stages behind generate, in the order in which they may take a rollout. `entries`: name=import path."""

    def __init__(self, config: Config, entries: Sequence[str]) -> None:
        self._config = config
        parts = [entry.partition("=") for entry in entries]
        self._stages: list[tuple[str, type[LoopStage]]] = [(name, import_path(path)) for name, _, path in parts]
        self._options = {stage.name: stage.options for stage in config.stage}

    @property
    def beginning(self) -> str | None:
        """Outlet of the loop stage in which rollouts begin, None where the engine has the first turn."""
        return next((f"loop.{name}" for name, stage in self._stages if stage.begins(self._config)), None)

    def takes_turn(self, sample: Sample) -> bool:
        """Whether an engine continues a sequence."""
        return sample.status != "failed" and not sample.done and sample.turns < self._config.rollout.max_turns

    def next(self, group: PromptGroup, parts: Sequence[Sample]) -> tuple[str, RolloutSlice]:
        """The destination of a rollout with all its sequences: name of the outlet, and the slice."""
        slice_ = RolloutSlice(group, tuple(parts))
        if any(part.status == "failed" for part in parts) or all(part.done for part in parts):
            return "out", _leaving(slice_)
        further = any(map(self.takes_turn, parts))
        for name, stage in self._stages:
            if not (further or stage.begins(self._config)):
                continue
            try:
                wanted = stage.wants(self._config, self._options.get(name, {}), slice_)
            except Exception as error:
                log.warning("wants of %s failed on group %d: %r", name, group.group_id, error, exc_info=True)
                reason = f"{stage.__name__}.wants: {type(error).__name__}: {error}"
                return "out", _leaving(failed(slice_, reason))
            if wanted:
                return f"loop.{name}", slice_
        return "out", _leaving(slice_)


def _leaving(slice_: RolloutSlice) -> RolloutSlice:
    """The rollout for the stages after the loops; failed if its sequences are inconsistent."""
    parts = slice_.samples
    if parts[0].sequences > 1 and all(part.status != "failed" for part in parts):
        wrong = rollout_fault(parts)
        parts = parts if wrong is None else failed(slice_, wrong).samples
    return RolloutSlice(msgspec.structs.replace(slice_.group, tools="[]"), tuple(map(_ended, parts)))


def _ended(sample: Sample) -> Sample:
    if not sample.done and not sample.loop_state:
        return sample
    status = "completed" if sample.status == "pending" else sample.status  # a loop stage wrote the whole sequence
    return msgspec.structs.replace(sample, status=status, loop_state=b"")
