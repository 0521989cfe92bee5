"""From rollouts to graded rollouts: which grader, which process, and the reward of each sample.

Used by the reward stage for each slice, and by the group stage for whole groups under `--group-rm`.

Invariants:
- a grader that raises, hangs or dies fails its sample, with the reason; never the run, never a neighbour;
- of a rollout that fanned out into several sequences only the last is graded; a sample that already has a reward (an
  environment gave it) keeps it;
- the same sample with the same response is graded once per process, however often it is delivered, unless its grader
  draws at random;
- a group grader sees its whole group at once, or nothing;
- evaluation rollouts are graded alike but never shaped, so that their scores stay comparable.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec

from stages.base import Activity, MapStage, StageContext, beside
from stages.graders.grade import CacheKey, Grade, GradeCache, GradeRequest, Observed, failed
from stages.graders.pool import GraderPool, pool_error_alone
from stages.graders.registry import is_import_path, listed_grader, outside
from stages.messages import PromptGroup, RolloutSlice, Sample
from stages.ports import Ports, Topic
from stages.reward.components import SINGLE, Component, Overlong, Row, Selection, combined, picked, shaped
from stages.rollouts import MEMBER_STATUSES, rollouts, trainable_tokens

if TYPE_CHECKING:  # both bring an HTTP client, which most runs do not need
    from stages.reward.judge import Judge
    from stages.reward.remote import RemoteReward

log = logging.getLogger("sluice.grading")

CACHED_GRADES = 8192
_DRAWN = ("random", "sleep", "crash")  # graders that draw at random, or only take time


class GradeTask(msgspec.Struct, frozen=True):
    """One grader and one response."""

    request: GradeRequest
    prompt: str
    sample_id: str
    cache_key: CacheKey | None


def gradable(sample: Sample) -> bool:
    """Whether a grader should see the sample: it ended by itself or at a limit, and is the last of its rollout."""
    ended = sample.status in ("completed", "truncated") and sample.sequence == sample.sequences - 1
    return ended and sample.reward is None


def is_whole(slice_: RolloutSlice) -> bool:
    """Whether the slice has all rollouts of its group, with all sequences of each."""
    present = Counter(sample.index for sample in slice_.samples)
    wanted = {sample.index: sample.sequences for sample in slice_.samples}
    return len(present) >= slice_.group.n_samples and all(present[index] >= wanted[index] for index in present)


class Outside:
    """The graders `remote` and `judge`, which need no grader process. A client is made at its first use, or at `open`
    where the configuration names it, and closed with the stack."""

    def __init__(self, context: StageContext, stack: AsyncExitStack) -> None:
        self._context, self._config, self._stack = context, context.config.reward, stack
        self._names = tuple(entry.partition("=")[0] for entry in context.config.engine.frozen_engine)
        self._remote: RemoteReward | None = None
        self._judge: Judge | None = None

    def open(self) -> None:
        """Raises UnknownGraderError if the judge's prompt cannot be used."""
        if self._names or self._config.judge_engine is not None:
            from stages.reward.judge import Judge
            from stages.sampling.sampler import Sampler

            named = () if self._config.judge_engine is None else (self._config.judge_engine,)
            policies = tuple(dict.fromkeys((*named, *self._names)))
            self._judge = Judge(Sampler(self._context, policies=policies), self._config)
            self._stack.push_async_callback(self._judge.sampler.close)

    async def follow(self, topic: Topic) -> None:
        """Waits for the judges' addresses; runs until cancelled, or ends at once without judges."""
        if self._judge is not None:
            await self._judge.sampler.follow(topic)

    async def grade(self, request: GradeRequest, prompt: str, sample_id: str) -> Grade:
        """The grade of one response by the grader that the request names."""
        base, argument = outside(request.grader) or ("", None)
        if base == "remote":
            from stages.reward.remote import Question, RemoteReward

            if self._remote is None:
                self._remote = RemoteReward(self._config, request.reward_key)
                self._stack.push_async_callback(self._remote.close)
            question = Question(sample_id, prompt, request.response, request.label, request.metadata, argument)
            return await self._remote.grade(question)
        name = argument or self._config.judge_engine or (self._names[0] if len(self._names) == 1 else "")
        if self._judge is None or not name:
            return failed(
                f"rm_type {request.grader!r} has no engine; name one with --frozen-engine name=CHECKPOINT and "
                "--judge-engine name"
            )
        return await self._judge.grade(name, prompt, request.response, request.label, request.seed)


class Grading:
    """Grades slices by the configuration. `open` before the first, `outside.follow` beside them, `close` at the end."""

    def __init__(self, context: StageContext, activity: Activity) -> None:
        config, reward = context.config, context.config.reward
        self.reward, self.activity = reward, activity
        self.observed = Observed()
        self._overlong = Overlong(
            config.rollout.rollout_max_response_len, reward.overlong_buffer_len, reward.overlong_penalty_factor
        )
        self._cache = GradeCache(CACHED_GRADES)
        self._selection = Selection(reward)
        limits = (reward.reward_workers, reward.reward_deadline_s, reward.reward_retries)
        self._pool = GraderPool(*limits, config=config)
        self._stack = AsyncExitStack()
        self.outside = Outside(context, self._stack)

    async def open(self) -> None:
        """Start what grading needs. Raises UnknownGraderError for a judge's prompt that cannot be used."""
        self.outside.open()
        await self._stack.enter_async_context(self._pool)

    async def close(self) -> None:
        await self._stack.aclose()

    async def grade(self, slice_: RolloutSlice) -> RolloutSlice:
        """The slice with rewards. Grading it again changes nothing.

        Under --group-rm an incomplete slice comes back as it is, to be graded when the group is whole.
        """
        row = msgspec.json.decode(slice_.group.metadata, type=Row)
        if self.reward.group_rm:
            return await self._grade_group(slice_, row) if is_whole(slice_) else slice_
        members = [sample for sample in slice_.samples if gradable(sample)]
        components = self._selection.graders(row)
        tasks = [self._task(slice_.group, sample, part) for sample in members for part in components]
        answers = iter(await self._run(tasks))
        grades: dict[tuple[int, int], Grade] = {}
        for sample in members:
            found = [next(answers) for _ in components]
            if self._selection.components:
                grade = combined(components, found)
            else:
                grade = picked(found[0], self.reward.reward_key, components[0].grader)
            grades[sample.index, sample.sequence] = grade
        return self._settled(slice_, grades, "+".join(part.grader for part in components))

    def _task(self, group: PromptGroup, sample: Sample, part: Component) -> GradeTask:
        request = GradeRequest(
            grader=part.grader,
            response=_read_by(part.grader, sample),
            label=group.label,
            metadata=_with_left(group.metadata, sample.left),
            n_tokens=sample.response_length,
            seed=(group.seed + sample.index) & 0x7FFFFFFFFFFFFFFF,
            reward_key=self.reward.reward_key if part.name == SINGLE else None,
            prompt=group.prompt if is_import_path(part.grader) else "",
        )
        key = None
        if _worth_keeping(part.grader):
            read = f"{request.response}\0{sample.left}"
            digest = hashlib.blake2b(read.encode("utf-8", "replace"), digest_size=16).digest()
            key = (group.dataset, group.pinned_version, group.group_id, sample.index, part.grader, digest)
        return GradeTask(request, group.prompt, f"{group.key}/{sample.index}", key)

    async def _run(self, tasks: Sequence[GradeTask]) -> list[Grade]:
        """A grade for each task, in order: from the cache, the pool, a reward model or a judge, all concurrently."""
        grades: list[Grade | None] = [self._cache.get(task.cache_key) for task in tasks]
        self.observed.cached += sum(grade is not None for grade in grades)
        missing = [position for position, grade in enumerate(grades) if grade is None]
        pooled = [position for position in missing if outside(tasks[position].request.grader) is None]

        def record(position: int, grade: Grade, began: float) -> None:
            self.observed.add(grade, time.perf_counter() - began)
            self._cache.put(tasks[position].cache_key, grade)
            grades[position] = grade

        async def grade_in_pool() -> None:
            began = time.perf_counter()
            results = await self._pool.grade_many([tasks[position].request for position in pooled])
            for position, grade in zip(pooled, results, strict=True):
                record(position, grade, began)

        async def grade_outside(position: int) -> None:
            began, task = time.perf_counter(), tasks[position]
            record(position, await self.outside.grade(task.request, task.prompt, task.sample_id), began)

        with pool_error_alone():
            async with asyncio.TaskGroup() as running:
                for position in set(missing).difference(pooled):
                    running.create_task(grade_outside(position))
                await grade_in_pool()
        return [grade if grade is not None else failed("the grader gave no grade") for grade in grades]

    async def _grade_group(self, slice_: RolloutSlice, row: Row) -> RolloutSlice:
        members = [sample for sample in slice_.samples if gradable(sample)]
        if not members:
            return self._settled(slice_, {}, "")
        group, name = slice_.group, self._selection.group_grader(row)
        request = GradeRequest(
            grader=name,
            response="",
            label=group.label,
            metadata=_with_members(group.metadata, slice_),
            seed=group.seed & 0x7FFFFFFFFFFFFFFF,
            reward_key=self.reward.reward_key,
            responses=tuple(sample.response for sample in members),
            prompt=group.prompt,
        )
        began = time.perf_counter()
        (whole,) = await self._pool.grade_many([request])
        seconds = time.perf_counter() - began
        if whole.error is None and len(whole.members) != len(members):
            whole = failed("it is no grader of groups; --custom-rm-path must name a function of yours")
        answers = whole.members if whole.error is None else (whole,) * len(members)
        grades: dict[tuple[int, int], Grade] = {}
        for sample, answer in zip(members, answers, strict=True):
            self.observed.add(answer, seconds)
            grades[sample.index, sample.sequence] = picked(answer, self.reward.reward_key, name)
        return self._settled(slice_, grades, name)

    def _settled(self, slice_: RolloutSlice, grades: dict[tuple[int, int], Grade], grader: str) -> RolloutSlice:
        """The slice with the rewards of its grades, shaped."""
        training = slice_.group.purpose == "train"
        whole = [parts for parts in rollouts(slice_.samples) if all(part.status in MEMBER_STATUSES for part in parts)]
        lengths = {parts[0].index: trainable_tokens(parts) for parts in whole}
        samples: list[Sample] = []
        for sample in slice_.samples:
            grade = grades.get((sample.index, sample.sequence))
            if grade is not None:
                sample = self._with_grade(sample, grade, grader)
            if training and sample.status in ("completed", "truncated"):
                mask = self.reward.mask_truncated
                sample = shaped(sample, self._overlong, lengths.get(sample.index, 0), mask_truncated=mask)
            samples.append(sample)
        if self.observed.due():
            self.activity.extra.update(self.observed.figures())
        return msgspec.structs.replace(slice_, samples=tuple(samples))

    def _with_grade(self, sample: Sample, grade: Grade, grader: str) -> Sample:
        replace = msgspec.structs.replace
        if grade.error is None:
            sample = replace(sample, reward=grade.score, reward_parts=grade.parts, is_correct=grade.is_correct)
            return replace(sample, answer=grade.extracted)
        self.activity.failures += 1
        reason = f"grader {grader}: {grade.error}"
        if self.reward.reward_on_error == "fail_sample":
            return replace(sample, status="failed", error=reason)
        if self.observed.errors.bit_count() <= 1:  # the first, second, fourth, eighth, ... of them
            log.warning("rewarded with 0 (error %d of grading here): %s", self.observed.errors, reason)
        return replace(sample, reward=0.0, error=reason)


def _read_by(grader: str, sample: Sample) -> str:
    """The text that a grader reads: the response after the last result of a tool.

    Custom graders, `remote`, `judge` and `format` read the whole response.
    """
    everything = is_import_path(grader) or outside(grader) is not None or grader.partition(":")[0] == "format"
    return sample.response if everything else sample.response[sample.answer_start :]


def _worth_keeping(grader: str) -> bool:
    """Whether a grade is worth a place in the cache: it costs something, and the grader does not draw it."""
    if outside(grader) is not None or is_import_path(grader):
        return True
    listed = listed_grader(grader)
    return listed is not None and not listed.in_stage and grader.partition(":")[0] not in _DRAWN


def _with_left(metadata: str, left: str) -> str:
    """The row's metadata, and over it what a function has left on the sample."""
    if not left:
        return metadata
    found = msgspec.json.decode(left, type=dict[str, dict[str, msgspec.Raw]])
    row = msgspec.json.decode(metadata, type=dict[str, msgspec.Raw]) | found["metadata"]
    attributes = {"sample_attributes": found["attributes"]} if found["attributes"] else {}
    return msgspec.json.encode(row | attributes).decode()


def _with_members(metadata: str, slice_: RolloutSlice) -> str:
    """The row's metadata and, as `group_members`, how each rollout ended: a group grader gets no failed responses."""
    row = msgspec.json.decode(metadata, type=dict[str, msgspec.Raw])
    members = [
        {"index": s.index, "status": s.status, "n_tokens": s.response_length, "graded": gradable(s)}
        | ({"left": msgspec.Raw(s.left.encode())} if s.left else {})
        for s in slice_.samples
    ]
    return msgspec.json.encode({**row, "group_members": members}).decode()


class RewardStage(MapStage):
    """RolloutSlice in, the same slice with rewards out.

    Under --group-rm an incomplete slice of a group passes as it is, and the group stage grades the whole group.
    """

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._grading = Grading(context, self.activity)

    async def setup(self) -> None:
        await self._grading.open()

    async def close(self) -> None:
        await self._grading.close()

    async def run(self, ports: Ports) -> None:
        async with beside(self._grading.outside.follow(ports.topic)):
            await super().run(ports)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        return await self._grading.grade(message)
