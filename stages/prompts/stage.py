"""The prompt stage: admits groups while the gate is open, and settles each exactly once.

It is the only writer of the ledger, so there is one replica of it, and it lives in the controller's process.

Invariants: a group id is admitted once; its terminal state is journalled before any other part is notified; a
checkpoint is committed with the ledger exactly as it was after the trainer's step of that checkpoint, because the
trainer's reports arrive in one ordered stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from configs.schema import generates
from models.engines.noise import GOLDEN, MIX_1, MIX_2, mix
from stages.base import Stage, StageContext, beside
from stages.data.prompt_set import PromptSet
from stages.errors import NoVerdicts, Starved
from stages.messages import CheckpointReady, EvalDone, PromptGroup, Report, RolloutSlice, Settled, StepDone
from stages.ports import Outlet, Ports, Topic
from stages.prompts.ledger import Ledger, LedgerSnapshot, OpenGroup
from stages.prompts.prompt_sources import DrawnPrompts, PassRateCurriculum, demonstration, order_of
from stages.staleness_gate import StalenessGate
from stages.topic_values import KEYS, PINNED, Sampling, carrying
from stages.train.saved_groups import SavedBatches

_MASK = (1 << 63) - 1


class RunHooks(Protocol):
    """What the controller does with what the prompt stage learns."""

    def admitted(self, group: OpenGroup) -> None:
        """Journal an admission."""

    def settled(self, groups: Sequence[tuple[int, Settled]]) -> None:
        """Journal terminal states, before they count."""

    async def step(self, report: StepDone) -> None: ...

    async def evaluated(self, report: EvalDone) -> None: ...

    async def commit(self, report: CheckpointReady, ledger: LedgerSnapshot) -> None:
        """Make the checkpoint final: the trainer's files and this ledger in one atomic manifest."""


def sampling_seed(run_seed: int, group_id: int) -> int:
    """Seed of a group: a fixed mixing of the run's seed and the group's id."""
    return mix(run_seed * GOLDEN + group_id * MIX_1 + MIX_2) & _MASK


class PromptStage(Stage):
    """Source of groups and keeper of the ledger."""

    def __init__(
        self,
        context: StageContext,
        prompts: PromptSet | DrawnPrompts,
        gate: StalenessGate,
        hooks: RunHooks,
        *,
        snapshot: LedgerSnapshot | None = None,
        restored: Collection[int] = (),
        eos_id: int | None = None,
        encode: Callable[[str], list[int]] | None = None,
        saved: SavedBatches | None = None,
    ) -> None:
        """`saved`: batches that take the place of generation.

        `restored`: groups open in `snapshot` that the trainer holds complete: settled like all, not generated again."""
        super().__init__(context)
        data = context.config.data
        self.prompts, self.gate, self.hooks = prompts, gate, hooks
        self.ledger = Ledger(snapshot)
        self.drawn = prompts if isinstance(prompts, DrawnPrompts) else None
        self.order = order_of(data, prompts)
        self.curriculum = PassRateCurriculum(data, self.order, snapshot.pass_rates if snapshot else None)
        self.supervised = context.config.train.loss_type == "sft_loss"
        self.eos_id, self.encode, self.saved = eos_id, encode, saved
        self.generates = generates(context.config)
        self.version = -1  # newest version that every live engine has applied
        self.steps = self.ledger.steps(gate.batch)
        self._restored = restored
        self.evals_pending = set[int]()  # versions
        self.trainer_up = False
        self.idle_groups = 0  # settled since a batch was last trained, without being trained
        self.reasons: Counter[str] = Counter()
        self.completed = asyncio.Event()  # nothing is open and nothing more will be admitted
        self.draining: str | None = None
        self.paused = False
        rollout = context.config.rollout
        self.sampling = Sampling(rollout.rollout_temperature, rollout.rollout_top_p)  # of groups that are submitted
        self._bounds: deque[tuple[int, int]] = deque()  # of staleness, and from which batch on
        self._again = deque(g for g in self.ledger.open_groups() if g.group_id not in restored)  # submit as they are
        # Prompts that wait for their second visit:
        self._requeue: deque[int] = deque(snapshot.requeue if snapshot else ())
        self._wake = asyncio.Event()

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        return self._room(self.ledger.open)

    def _room(self, open_groups: int) -> int:
        if self.draining is not None or self.paused:
            return 0
        version = self.version if self.generates else self.steps
        if version < 0:
            return 0
        trained = self.ledger.trained + len(self.ledger.rollbacks) * self.gate.batch
        return self.gate.capacity(version=version, trained=trained, open_groups=open_groups)

    def snapshot(self) -> LedgerSnapshot:
        """The ledger, the prompts that wait for their second chance, what the curriculum knows, and what a data source
        gave."""
        return msgspec.structs.replace(
            self.ledger.snapshot(),
            requeue=tuple(self._requeue),
            pass_rates=dict(self.curriculum.rates),
            drawn={} if self.drawn is None else self.drawn.kept(),
        )

    def drain(self, reason: str) -> None:
        """Admit no more; the holder of each open group settles it. Unblocks all stages through the topic `drain`."""
        if self.draining is None:
            self.draining = reason
            self._wake.set()

    def bound(self, max_staleness: int, from_step: int) -> None:
        """Admit by another bound as soon as the trainer is at batch `from_step`, which keeps to it."""
        self._bounds.append((from_step, max_staleness))
        self._take_bounds()

    def _take_bounds(self) -> None:
        while self._bounds and self._bounds[0][0] <= self.steps + 1:
            self.gate = dataclasses.replace(self.gate, max_staleness=self._bounds.popleft()[1])
            self._wake.set()

    def pause(self, paused: bool) -> None:
        """Admit no new group until `resume`; open groups continue."""
        self.paused = paused
        self._wake.set()

    async def run(self, ports: Ports) -> None:
        async with beside(self._watch_engines(ports), self._admit(ports)):
            await self._settle(ports)

    async def _watch_engines(self, ports: Ports) -> None:
        """Waits for a change of the topic; runs until cancelled."""
        revision = 0
        while True:
            revision = await ports.topic.wait(revision, *KEYS)
            version = min((entry.version for entry in carrying(ports.topic).values()), default=-1)
            if version != self.version:
                self.version = version
                self._wake.set()

    async def _admit(self, ports: Ports) -> None:
        """Waits for the gate to open: an applied version, a settlement or a drain wakes it."""
        drained = False
        while True:
            while self._again and self._room(self.ledger.open - len(self._again)) > 0:
                # Some groups open in the checkpoint were admitted for later versions, not reached yet in this run:
                # they wait for the gate like new groups.
                await self._submit(self._again.popleft(), ports.outlets["out"])
            if self.drawn is not None:
                await self.drawn.reach(self.ledger.cursor + self.capacity)
            async with asyncio.TaskGroup() as sends:  # the hub's answers overlap
                while self.capacity > 0 and self._has_prompt:
                    sends.create_task(self._submit(self._admit_one(), ports.outlets["out"]))
            if self.draining is not None and not drained:
                drained = True
                await ports.topic.publish("drain", self.draining.encode())
                while self._again:
                    self.close_groups(
                        [Settled(self._again.popleft().group_id, "discarded", "stopped before it was submitted")]
                    )
            self._check_end()
            await self._wake.wait()
            self._wake.clear()

    @property
    def _has_prompt(self) -> bool:
        """Whether the next prompt is available; a data source is called for it first."""
        return self.drawn is None or bool(self._requeue) or self.ledger.cursor < self.drawn.reached

    def _admit_one(self) -> OpenGroup:
        position = self._requeue.popleft() if self._requeue else self.curriculum.next_position(self.ledger.cursor)
        again = position < self.ledger.cursor
        group = self.ledger.admit(position=position, requeued=1 if again else 0)
        self.hooks.admitted(group)
        return group

    async def _submit(self, group: OpenGroup, outlet: Outlet[PromptGroup | RolloutSlice]) -> None:
        epoch, index = self.order.index(group.position)
        prompt = self.prompts.get(index)
        n_samples = 1 if self.supervised else self.config.rollout.n_samples_per_prompt
        fresh = prompt.group(group.group_id, index, n_samples, sampling_seed(self.config.run.seed, group.group_id))
        drawn = msgspec.structs.asdict(self.sampling) | {"admitted_s": time.time()}
        message = msgspec.structs.replace(fresh, epoch=epoch, requeued=group.requeued, **drawn)
        self.activity.items_out += 1
        sent: PromptGroup | RolloutSlice = message
        if self.saved is not None:
            sent = await asyncio.to_thread(self.saved.group, group.group_id)
        elif self.supervised:
            sent = demonstration(message, prompt, self.steps, eos_id=self.eos_id, encode=self.encode)
        await outlet.send(sent, message.key)

    async def _settle(self, ports: Ports) -> None:
        """Waits for reports; ends when the settle stream ends, after everything else has."""
        inlet = ports.inlets["settle"]
        while (lease := await inlet.receive()) is not None:
            report: Report = lease.message
            match report:
                case Settled():
                    self.close_groups([report])
                case StepDone():
                    await self._step(report, ports.topic)
                case EvalDone():
                    self.evals_pending.discard(report.version)
                    await self.hooks.evaluated(report)
                case CheckpointReady():
                    if self.drawn is not None:
                        await self.drawn.save(report.step)  # and nothing is waited for before the snapshot
                    await self.hooks.commit(report, self.snapshot())
            lease.done()
            self._wake.set()

    async def _step(self, report: StepDone, topic: Topic) -> None:
        if report.step <= self.steps and report.groups:
            return  # delivered twice
        self.trainer_up = True
        if report.rolled_back and report.step > self.steps:
            self.steps, self.ledger.rollbacks = report.step, (*self.ledger.rollbacks, report.step)
            self._take_bounds()
            # A version that the trainer reported and did not get to announce is never evaluated.
            self.evals_pending = {at for at in self.evals_pending if topic.get(f"{PINNED}{at}") is not None}
            detail = "the run went back to a checkpoint"
            # Of these the checkpoint of the resume held the rollouts, so that the trainer alone could settle them.
            kept = [group.group_id for group in self.ledger.open_groups() if group.group_id in self._restored]
            self.close_groups([Settled(group_id, "stale", detail) for group_id in kept])
        if report.groups:
            self.steps = report.step
            self._take_bounds()
            self.version = self.version if self.generates else report.step
            if report.last:
                self.gate = dataclasses.replace(self.gate, total=report.step)
            share = report.tokens // len(report.groups)
            rates = report.pass_rates
            if not rates and not self.curriculum.rates and self.curriculum.on:
                raise NoVerdicts(
                    "--curriculum pass_rate needs a grader that judges which responses are correct, and no response of "
                    f"batch {report.step} has a verdict; return is_correct beside the score, or leave --curriculum out"
                )
            self.close_groups(
                [Settled(g, "trained", step=report.step, tokens=share, pass_rate=rates.get(g)) for g in report.groups]
            )
            self.idle_groups = 0
            self.reasons.clear()
        if report.pinned:
            self.evals_pending.add(report.version)
        await self.hooks.step(report)

    def close_groups(self, reports: Sequence[Settled]) -> None:
        """Give groups their terminal state: journal first, then the ledger."""
        self.hooks.settled([(self.steps, report) for report in reports])
        for report in reports:
            group = self.ledger.settle(report.group_id, report.outcome, report.tokens)
            if group is None:
                continue
            self.curriculum.observe(self.order.index(group.position)[1], report.pass_rate)
            if report.outcome != "trained":
                self.idle_groups += 1
                self.reasons[f"{report.outcome}: {report.detail}"] += 1
            requeue = self.config.asynchrony.async_unused_samples_handler != "drop"
            if report.outcome in ("stale", "discarded") and requeue and group.requeued == 0:
                self._requeue.append(group.position)
            elif self.drawn is not None:
                self.drawn.forget(group.position)
        self._wake.set()
        self._check_starvation()

    def _check_starvation(self) -> None:
        limit = self.config.filter.max_filter_rounds * self.gate.batch
        if self.draining is None and self.idle_groups > limit:
            worst = "; ".join(f"{n} x {reason}" for reason, n in self.reasons.most_common(3))
            raise Starved(
                f"{self.idle_groups} groups in a row were not trained ({worst}); "
                f"look at the rewards, or raise --max-filter-rounds (now {self.config.filter.max_filter_rounds})"
            )

    def _check_end(self) -> None:
        total = self.gate.total
        trained_out = total is not None and self.steps >= total
        if trained_out and self.ledger.open and not self.evals_pending and self.draining is None:
            self.drain("all rollout batches are trained")
        if not self.trainer_up and self.draining is None:
            return
        if self.ledger.open == 0 and (self.draining is not None or (trained_out and not self.evals_pending)):
            self.completed.set()
