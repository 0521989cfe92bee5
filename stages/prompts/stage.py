"""The prompt stage: admits groups while the gate is open, and settles each exactly once.

It is the only writer of the ledger, so there is one replica of it, and it lives in the controller's process.

Invariants: a group id is admitted once; its terminal state is journalled before anything else hears of it; a checkpoint
is committed with the ledger exactly as it was after the trainer's step of that checkpoint, because the trainer's
reports arrive in one ordered stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec
import numpy as np

from stages.base import Stage, StageContext
from stages.data.order import PromptOrder
from stages.data.prompt_set import PreparedPrompt
from stages.engine_entries import KEYS, carrying
from stages.errors import NoVerdicts, Starved
from stages.messages import (
    CheckpointReady,
    EvalDone,
    Float32Array,
    Int32Array,
    PromptGroup,
    Report,
    RolloutSlice,
    Sample,
    Settled,
    StepDone,
    UInt8Array,
    VersionRun,
    wire,
    without_prompt,
)
from stages.ports import Outlet, Ports
from stages.prompts.curriculum import PassRateCurriculum
from stages.prompts.ledger import Ledger, LedgerSnapshot, OpenGroup
from stages.prompts.staleness_gate import StalenessGate

__all__ = ["PromptStage", "Prompts", "RunHooks", "Starved", "sampling_seed"]

_MASK = (1 << 63) - 1


class Prompts(Protocol):
    def __len__(self) -> int: ...

    def get(self, index: int) -> PreparedPrompt: ...


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
    """Seed of a group: a fixed mixing of the run's seed and the group's id (splitmix64's finaliser)."""
    z = (run_seed * 0x9E3779B97F4A7C15 + group_id * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & ((1 << 64) - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (z ^ (z >> 31)) & _MASK


class PromptStage(Stage):
    """Source of groups and keeper of the ledger."""

    def __init__(
        self,
        context: StageContext,
        prompts: Prompts,
        gate: StalenessGate,
        hooks: RunHooks,
        *,
        snapshot: LedgerSnapshot | None = None,
        restored: Collection[int] = (),
        eos_id: int | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`restored`: groups open in `snapshot` that the trainer holds complete: settled like all, not asked again."""
        super().__init__(context)
        data = context.config.data
        self.prompts, self.gate, self.hooks = prompts, gate, hooks
        self.ledger = Ledger(snapshot)
        self.order = PromptOrder(len(prompts), data.rollout_seed, data.rollout_shuffle)
        self.curriculum = PassRateCurriculum(data, self.order, snapshot.pass_rates if snapshot else None)
        self.supervised = context.config.train.loss_type == "sft_loss"
        self.eos_id, self.encode = eos_id, encode
        self.version = -1  # newest version that every live engine has applied
        self.steps = self.ledger.trained // gate.batch
        self.evals_pending = 0
        self.trainer_up = False
        self.idle_groups = 0  # settled since a batch was last trained, without being trained
        self.reasons: Counter[str] = Counter()
        self.completed = asyncio.Event()  # nothing is open and nothing more will be admitted
        self.draining: str | None = None
        self._again = deque(g for g in self.ledger.open_groups() if g.group_id not in restored)  # submit as they are
        self._requeue: deque[int] = deque(snapshot.requeue if snapshot else ())  # prompts to be asked once more
        self._wake = asyncio.Event()

    @property
    def capacity(self) -> int:
        if self.draining is not None:
            return 0
        version = self.steps if self.supervised else self.version
        if version < 0:
            return 0
        return self.gate.capacity(version=version, trained=self.ledger.trained, open_groups=self.ledger.open)

    def snapshot(self) -> LedgerSnapshot:
        """The ledger, the prompts that wait for their second chance, and what the curriculum knows."""
        return msgspec.structs.replace(
            self.ledger.snapshot(), requeue=tuple(self._requeue), pass_rates=dict(self.curriculum.rates)
        )

    def drain(self, reason: str) -> None:
        """Admit no more; what is out is settled by whoever holds it. Unblocks everybody through the topic `drain`."""
        if self.draining is None:
            self.draining = reason
            self._wake.set()

    async def run(self, ports: Ports) -> None:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_engines(ports))
            admit = tasks.create_task(self._admit(ports))
            await self._settle(ports)
            watch.cancel()
            admit.cancel()

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
            while self._again and self.draining is None and (self.supervised or self.version >= 0):
                await self._submit(self._again.popleft(), ports.outlets["out"])
            async with asyncio.TaskGroup() as sends:  # the hub's answers overlap
                while self.capacity > 0:
                    sends.create_task(self._submit(self._admit_one(), ports.outlets["out"]))
            if self.draining is not None and not drained:
                drained = True
                await ports.topic.publish("drain", self.draining.encode())
                while self._again:
                    self.close_groups(
                        [Settled(self._again.popleft().group_id, "surplus", "drained before it was submitted")]
                    )
            self._check_end()
            await self._wake.wait()
            self._wake.clear()

    def _admit_one(self) -> OpenGroup:
        position = self._requeue.popleft() if self._requeue else self.curriculum.next_position(self.ledger.cursor)
        again = position < self.ledger.cursor
        group = self.ledger.admit(position=position, requeued=1 if again else 0)
        self.hooks.admitted(group)
        return group

    async def _submit(self, group: OpenGroup, outlet: Outlet[PromptGroup | RolloutSlice]) -> None:
        epoch, index = self.order.index(group.position)
        prompt = self.prompts.get(index)
        rollout = self.config.rollout
        message = PromptGroup(
            group_id=group.group_id,
            prompt_index=index,
            epoch=epoch,
            prompt=prompt.prompt,
            prompt_ids=wire(prompt.prompt_ids, Int32Array),
            label=prompt.label,
            n_samples=1 if self.supervised else rollout.n_samples_per_prompt,
            seed=sampling_seed(self.config.run.seed, group.group_id),
            metadata=prompt.metadata,
            tools=prompt.tools,
            requeued=group.requeued,
        )
        self.activity.items_out += 1
        if self.supervised:
            await outlet.send(self._demonstration(message, prompt), str(group.group_id))
        else:
            await outlet.send(message, str(group.group_id))

    def _demonstration(self, group: PromptGroup, prompt: PreparedPrompt) -> RolloutSlice:
        """The label as if it were a rollout: what supervised training learns."""
        ids = prompt.label_ids.tolist()
        if self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        before = len(prompt.prompt_ids)
        mask = self._demonstration_mask(group, prompt.label or "", len(ids))
        sample = Sample(
            index=0,
            status="completed",
            response=prompt.label or "",
            token_ids=wire([*prompt.prompt_ids.tolist(), *ids], Int32Array),
            prompt_length=before,
            loss_mask=wire([*([0] * before), *mask], UInt8Array),
            log_probs=wire(np.zeros(before + len(ids)), Float32Array),
            version_runs=(VersionRun(-1, before), VersionRun(self.steps, len(ids))),
            reward=0.0,
        )
        return RolloutSlice(without_prompt(group), (sample,))

    def _demonstration_mask(self, group: PromptGroup, text: str, n: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """[n] 1 where the text is the model's own; 0 where `metadata.tool_spans` (characters) says a tool wrote it."""
        mask = np.ones(n, dtype=np.uint8)
        if self.encode is not None:
            for start, end in group.row_metadata.get("tool_spans", ()):
                mask[len(self.encode(text[:start])) : len(self.encode(text[:end]))] = 0
        return mask

    async def _settle(self, ports: Ports) -> None:
        """Waits for reports; ends when the settle stream ends, after everything else has."""
        inlet = ports.inlets["settle"]
        while (lease := await inlet.receive()) is not None:
            report: Report = lease.message
            match report:
                case Settled():
                    self.close_groups([report])
                case StepDone():
                    await self._step(report)
                case EvalDone():
                    self.evals_pending = max(0, self.evals_pending - 1)
                    await self.hooks.evaluated(report)
                case CheckpointReady():
                    await self.hooks.commit(report, self.snapshot())
            lease.done()
            self._wake.set()

    async def _step(self, report: StepDone) -> None:
        if report.step <= self.steps and report.groups:
            return  # delivered twice
        self.trainer_up = True
        if report.groups:
            self.steps = report.step
            if report.last:
                self.gate = dataclasses.replace(self.gate, total=report.step)
            share = report.tokens // len(report.groups)
            rates = report.pass_rates
            if not rates and not self.curriculum.rates and self.curriculum.on:
                raise NoVerdicts(
                    "--curriculum pass_rate needs a grader that says which responses are correct, and nothing in batch "
                    f"{report.step} says so; return is_correct beside the score, or leave --curriculum out"
                )
            self.close_groups(
                [Settled(g, "trained", step=report.step, tokens=share, pass_rate=rates.get(g)) for g in report.groups]
            )
            self.idle_groups = 0
            self.reasons.clear()
        self.evals_pending += report.pinned
        await self.hooks.step(report)

    def close_groups(self, reports: Sequence[Settled]) -> None:
        """Give groups their terminal state: journal first, then the ledger."""
        self.hooks.settled([(self.steps, report) for report in reports])
        for report in reports:
            group = self.ledger.settle(report.group_id, report.outcome, report.tokens)
            if group is None:
                continue
            self.curriculum.observe(self.order.index(group.position)[1], report.pass_rate)
            if report.outcome == "trained":
                continue
            self.idle_groups += 1
            self.reasons[f"{report.outcome}: {report.detail}"] += 1
            requeue = self.config.asynchrony.async_unused_samples_handler == "requeue"
            if report.outcome in ("stale", "surplus") and requeue and group.requeued == 0:
                self._requeue.append(group.position)
        self._wake.set()
        self._check_starvation()

    def _check_starvation(self) -> None:
        limit = self.config.filter.max_filter_rounds * self.gate.batch
        if self.draining is None and self.idle_groups > limit:
            worst = "; ".join(f"{n} x {reason}" for reason, n in self.reasons.most_common(3))
            raise Starved(
                f"{self.idle_groups} groups in a row were settled without being trained ({worst}); "
                f"look at the rewards, or raise --max-filter-rounds (now {self.config.filter.max_filter_rounds})"
            )

    def _check_end(self) -> None:
        total = self.gate.total
        trained_out = total is not None and self.steps >= total
        if trained_out and self.ledger.open and self.evals_pending == 0 and self.draining is None:
            self.drain("all rollout batches are trained")
        if not self.trainer_up and self.draining is None:
            return
        if self.ledger.open == 0 and (self.draining is not None or (trained_out and self.evals_pending == 0)):
            self.completed.set()
