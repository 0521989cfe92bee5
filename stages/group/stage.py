"""The group stage: puts the rollouts of one prompt together again and decides whether they are worth training on.

Invariants: a group leaves as one slice with its members in index order and the sequences of a rollout in sequence
order, or is settled: here (filtered, failed, discarded), or by the controller after a member became a dead letter. The
leases of its parts are released only then, so a lost replica loses nothing. For each (group, index) the first rollout
wins: rollouts of a redelivered prompt are dropped. A group that its filters drop for its first rollouts is settled like
any other, when all have come: generate, which is told by the topic, ends the rest, and their tokens count. The input
stream is keyed: all slices of a group come to the same replica, and the incomplete groups of a retired replica move to
another replica whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from configs.schema import Config
from configs.schema.algorithm import ESTIMATORS, GROUP_RELATIVE
from models.import_path import raised
from models.slime_arguments import slime_arguments
from stages.base import Stage, beside
from stages.errors import FilterError
from stages.group.filters import EARLY, FilterDecision, FilterState, GroupFilter, resolve_filter
from stages.messages import PromptGroup, RolloutSlice, Sample, Settled, WeightsAnnouncement
from stages.ports import Lease, Outlet, Ports, Topic, read_value
from stages.reward.stage import Grading
from stages.rollouts import closing, counting, mean_reward, rollout_fault, rollouts, settlement
from stages.sample_log import SampleLog
from stages.slime.hooks import all_samples, logged, removed, sample_filter, shown
from stages.slime.types import DataSource
from stages.staleness_gate import StalenessGate
from stages.topic_values import DECIDED, FAILED, SETTINGS, newest_settings

REMEMBERED_GROUPS = 100_000
MOST_REASONS = 100  # in the log and in the figures: a reason with a number in it is never the same twice
REMEMBERED_DECISIONS = 256
BETWEEN_NEWS_S = 0.1
REASON_CHARS = 200  # of a figure's name

log = logging.getLogger("sluice.group")


@dataclass
class _Open:
    group: PromptGroup
    parts: dict[int, dict[int, Sample]] = field(default_factory=dict)  # index -> sequence -> sample
    leases: list[Lease[RolloutSlice]] = field(default_factory=list)
    decided: Settled | None = None  # how it ends, known before its last rollout has ended

    def add(self, sample: Sample) -> None:
        """Take a sample, unless its place is filled or its attempt has another number of sequences."""
        sequences = self.parts.setdefault(sample.index, {})
        if all(known.sequences == sample.sequences for known in sequences.values()):
            sequences.setdefault(sample.sequence, sample)

    @property
    def whole(self) -> list[dict[int, Sample]]:
        """The rollouts of which all sequences are here."""
        return [parts for parts in self.parts.values() if len(parts) >= next(iter(parts.values())).sequences]

    @property
    def complete(self) -> bool:
        return len(self.whole) >= self.group.n_samples

    @property
    def slice(self) -> RolloutSlice:
        samples = [sample for parts in self.parts.values() for sample in parts.values()]
        return RolloutSlice(self.group, tuple(sample for parts in rollouts(samples) for sample in parts))

    @property
    def beginning(self) -> RolloutSlice:
        """The rollouts that have ended, as if the group had no others."""
        samples = [sample for parts in self.whole for sample in parts.values()]
        members = tuple(sample for parts in rollouts(samples) for sample in parts)
        return RolloutSlice(msgspec.structs.replace(self.group, n_samples=len(self.whole)), members)


def members_needed(config: Config, n_samples: int) -> int:
    """Fewest rollouts that can be trained on: two if the estimator compares them with each other, else one."""
    estimator, unrelated = config.algorithm.advantage_estimator, config.algorithm.disable_rewards_normalization
    independent = estimator in ESTIMATORS and (estimator not in GROUP_RELATIVE or unrelated)
    return 1 if independent or n_samples == 1 else 2


class GroupStage(Stage):
    """Joins, filters and passes on; evaluation rollouts go straight to the evaluate stage."""

    _grading: Grading | None = None  # of whole groups, with --group-rm

    async def setup(self) -> None:
        self._open: dict[str, _Open] = {}
        self._state = FilterState()
        self._names = self.config.filter.dynamic_sampling_filter
        self._filters = resolve_filter(self.config, self._names, self._state)
        path = self.config.filter.rollout_sample_filter_path
        self._sample_filter = None if path is None else sample_filter(path)
        path = self.config.filter.rollout_all_samples_process_path
        self._all_samples = None if path is None else all_samples(path)
        self._args = slime_arguments(self.config)
        self._drain: str | None = None
        self._gate = StalenessGate.of(self.config)
        self._early_after = self.config.filter.dynamic_sampling_early_after
        self._decided: deque[str] = deque(maxlen=REMEMBERED_DECISIONS)
        self._news = asyncio.Event()  # there are decisions that generate does not know
        self._logged: set[str] = set()  # reasons of failed members that have been logged
        self._finished: OrderedDict[str, None] = OrderedDict()  # newest groups that left, to recognise late duplicates
        self._samples = SampleLog(self.config, self.context.run_dir)
        if self.config.reward.group_rm:
            self._grading = Grading(self.context, self.activity)
            await self._grading.open()

    async def close(self) -> None:
        if self._grading is not None:
            await self._grading.close()

    async def run(self, ports: Ports) -> None:
        self._take_thresholds(ports.topic)  # a new replica needs them before its first group
        judges = [] if self._grading is None else [self._grading.outside.follow(ports.topic)]
        async with beside(self._watch_topic(ports), self._tell(ports), *judges):
            await self._join(ports)

    async def _watch_topic(self, ports: Ports) -> None:
        """Waits for `dead` (groups that lost a member for good), `drain` (discard incomplete groups) and `settings`
        (new thresholds of the filters). Cancelled when the inlet ends."""
        revision = 0
        while True:
            revision = await ports.topic.wait(revision, "dead", "drain", SETTINGS)
            self._take_thresholds(ports.topic)
            for key in read_value(ports.topic, "dead", tuple[str, ...]) or ():
                # The controller has settled this group: release its parts, and drop the parts that still come.
                open_ = self._open.get(key)
                self._claim(key)
                if open_ is not None:
                    self._release(open_)
            reason = ports.topic.get("drain")
            if reason is not None and self._drain is None:
                self._drain = reason.decode()
                for open_ in list(self._open.values()):
                    await self._discard(open_, ports.outlets["settle"])

    async def _tell(self, ports: Ports) -> None:
        """Waits for groups that are decided before their end; runs until cancelled. Tells generate, not too often,
        for each change of the topic wakes several processes."""
        while True:
            await self._news.wait()
            self._news.clear()
            await ports.topic.publish(DECIDED + ports.replica, msgspec.msgpack.encode(tuple(self._decided)))
            await asyncio.sleep(BETWEEN_NEWS_S)

    def _take_thresholds(self, topic: Topic) -> None:
        """Apply the newest thresholds to all groups that are filtered from now on."""
        changed = newest_settings(topic)
        if changed is None:
            return
        self._gate = dataclasses.replace(self._gate, max_staleness=changed.max_staleness)
        if changed.dynamic_sampling_filter != self._names:
            self._names = changed.dynamic_sampling_filter
            self._filters = resolve_filter(self.config, self._names, self._state)

    async def _join(self, ports: Ports) -> None:
        """Waits for slices; ends with the inlet, after the groups that are being graded."""
        inlet = ports.inlets["in"]
        async with asyncio.TaskGroup() as gradings:
            while (lease := await inlet.receive()) is not None:
                self.activity.items_in += 1
                with self.activity.working():
                    whole = await self._take(lease, ports)
                if whole is not None and self._grading is not None:
                    gradings.create_task(self._finish(whole, ports))  # other groups are joined while it is graded
                elif whole is not None:
                    await self._finish(whole, ports)
                self.activity.extra["open_groups"] = float(len(self._open))

    async def _take(self, lease: Lease[RolloutSlice], ports: Ports) -> _Open | None:
        """Add a slice to its group. Returns the group, claimed, if the slice completed it."""
        slice_ = lease.message
        group = slice_.group
        if group.purpose == "eval" and self._grading is None:
            await self._evaluated(slice_, ports)
            lease.done()
            return None
        if group.key in self._finished:
            lease.done()
            return None
        open_ = self._open.setdefault(group.key, _Open(group))
        open_.leases.append(lease)
        for sample in slice_.samples:
            open_.add(sample)
        if self._drain is not None:
            await self._discard(open_, ports.outlets["settle"])
        elif open_.complete:
            self._claim(group.key)  # a drain must not settle it as well
            return open_
        else:
            await self._decide_early(open_, ports.topic)
        return None

    async def _decide_early(self, open_: _Open, topic: Topic) -> None:
        """Drop a group for what its first rollouts are. It is settled when the others have come, cut short."""
        if self._early_after is None or open_.decided is not None:
            return
        beginning = open_.beginning
        members = counting(beginning.samples)
        if len(closing(members)) < self._early_after or any(map(rollout_fault, rollouts(members))):
            return
        self._learn_version(topic)
        open_.decided = await self._dropped(msgspec.structs.replace(beginning, samples=members))
        if open_.decided is not None:
            self._decided.append(open_.group.key)
            self._news.set()

    def _learn_version(self, topic: Topic) -> None:
        newest = read_value(topic, "weights", WeightsAnnouncement)
        self._state.version = 0 if newest is None else newest.version

    async def _evaluated(self, slice_: RolloutSlice, ports: Ports) -> None:
        if "eval" in ports.outlets:
            with self.activity.sending():
                await ports.outlets["eval"].send(slice_, slice_.key)

    async def _finish(self, open_: _Open, ports: Ports) -> None:
        slice_ = open_.slice
        with self.activity.working(), self.span("group", group=open_.group.group_id) as details:
            if self._grading is not None:
                slice_ = await self._grading.grade(slice_)
            if (reward := mean_reward(slice_)) is not None:
                details.append(f"reward {reward:.6g}")
            if open_.group.purpose == "eval":
                await self._evaluated(slice_, ports)
                self._release(open_)
                return
            self._learn_version(ports.topic)
            verdict = await self._judge(slice_, open_.decided)
            if self._all_samples is not None:
                flag, seen = "--rollout-all-samples-process-path", shown(slice_)
                await logged(flag, self._all_samples, self._args, [seen], DataSource())
            port = "out" if isinstance(verdict, RolloutSlice) else "settle"
            with self.activity.sending():
                try:
                    await ports.outlets[port].send(verdict, slice_.group.key)
                except ValueError as error:  # the group is larger than the limit of a message
                    await ports.outlets["settle"].send(settlement(slice_, "failed", str(error)), slice_.group.key)
            self.activity.items_out += port == "out"
            if isinstance(verdict, Settled):
                await self._samples.ended(self._state.version, slice_, verdict.outcome, verdict.detail)
        self._release(open_)

    async def _judge(self, slice_: RolloutSlice, decided: Settled | None) -> RolloutSlice | Settled:
        """The slice of counting members, or how the group ends. `decided`: what its first rollouts have settled."""
        self._count_failed(slice_)
        if decided is not None:
            return settlement(slice_, decided.outcome, f"{decided.detail}{EARLY}")
        members = counting(slice_.samples)
        for parts in rollouts(members):
            wrong = rollout_fault(parts)
            if wrong is not None:
                return settlement(slice_, "failed", f"sample {parts[0].index}: {wrong}")
        counted, total = len(closing(members)), len(closing(slice_.samples))
        errors = sorted({s.error or s.status for s in slice_.samples if s.status not in ("completed", "truncated")})
        if counted < (needed := members_needed(self.config, slice_.group.n_samples)):
            detail = f"insufficient_members: {counted} of {total}; {'; '.join(errors)[:300]}"
            if counted + sum(sample.status == "aborted" for sample in closing(slice_.samples)) < needed:
                return settlement(slice_, "failed", detail)
            # It grew too old, or the run stops, which generate may learn before this stage: a resume sends it again.
            refusal = self._gate.refusal(self._state.version, slice_.samples)
            return settlement(slice_, *(refusal or ("discarded", detail)))
        new = [error for error in errors if error not in self._logged]  # each once: the metrics only count them
        if new and len(self._logged) < MOST_REASONS:
            self._logged.update(new)
            rest, why = f"{counted} of its {total} rollouts", "; ".join(new)[:1000]
            log.warning("group %s continues with %s; others failed: %s", slice_.group.key, rest, why)
        kept = msgspec.structs.replace(slice_, samples=members)
        if (dropped := await self._dropped(kept)) is not None:
            return settlement(slice_, dropped.outcome, dropped.detail)
        if self._sample_filter is not None:
            try:
                kept = removed(self._sample_filter, self._args, kept)
            except Exception as error:
                detail = f"--rollout-sample-filter-path: {raised(error)}"
                return settlement(slice_, "failed", detail)
        self._state.passes(slice_.group)
        return kept

    async def _dropped(self, slice_: RolloutSlice) -> Settled | None:
        """What a filter says that does not keep the group."""
        for filter_ in self._filters:
            try:
                decision = await _decide(filter_, slice_)
            except Exception as error:
                self.activity.failures += 1
                return settlement(slice_, "failed", f"--dynamic-sampling-filter-path: {raised(error)}")
            if not decision.keep:
                self.activity.count("filtered")
                return settlement(slice_, "filtered", decision.reason or "filtered")
        return None

    def _count_failed(self, slice_: RolloutSlice) -> None:
        """Also what counts with reward 0 because its grader failed (`--reward-on-error zero`)."""
        for parts in rollouts(slice_.samples):
            reason = next((part.error for part in parts if part.error and part.status != "aborted"), None)
            if reason is not None:
                name = f"{FAILED}{reason[:REASON_CHARS]}"
                known = sum(figure.startswith(FAILED) for figure in self.activity.extra)
                new = name not in self.activity.extra
                self.activity.count(f"{FAILED}other reasons" if new and known >= MOST_REASONS else name)

    async def _discard(self, open_: _Open, settle: Outlet[Settled]) -> None:
        if self._open.get(open_.group.key) is not open_:
            return  # another task has claimed it
        self._claim(open_.group.key)
        if open_.group.purpose == "train":
            await settle.send(settlement(open_.slice, "discarded", self._drain or ""), open_.group.key)
        self._release(open_)

    def _claim(self, key: str) -> None:
        """Take a group out of the open groups; slices that still come for it are dropped."""
        self._open.pop(key, None)
        self._finished[key] = None
        if len(self._finished) > REMEMBERED_GROUPS:
            self._finished.popitem(last=False)

    def _release(self, open_: _Open) -> None:
        for lease in open_.leases:
            lease.done()


async def _decide(filter_: GroupFilter, slice_: RolloutSlice) -> FilterDecision:
    """The decision of a filter, sync or async, that returns a bool or a FilterDecision."""
    answer = filter_(slice_)
    decision: object = await answer if inspect.isawaitable(answer) else answer
    if isinstance(decision, bool | np.bool_):
        return FilterDecision(bool(decision), None if decision else "custom")
    if not isinstance(decision, FilterDecision):
        raise FilterError(f"it returned {type(decision).__name__}; a filter must return a bool or a FilterDecision")
    return decision
