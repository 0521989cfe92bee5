"""The train stage: takes fresh groups from the buffer, accumulates them as they arrive, steps, publishes weights.

Invariants:
- I2: a group enters a batch only if the gate lets it in, whatever the buffer's order (stages/train/held_groups.py).
- A group id enters at most one step of the ledger; its lease is released after the report of that step is in the
  ledger's stream.
- A version is announced only when its bytes lie complete in a slot; while an evaluation still needs version v, nothing
  newer is announced before every engine has applied v.
- Torch runs in one worker thread, so that the event loop keeps renewing leases during a step.
- A restarted trainer (`TrainOptions.incarnation`) reaches the step that the ledger counts by training the batches since
  the newest saved state again (stages/train/checkpoints.py). It reports none of them, announces the version of that
  step again, and takes no settled group.
- A checkpoint holds the complete groups that wait here; a resumed run begins with them and checks the gate again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from msgspec.structs import replace

from configs.schema import generates, served_checkpoint
from models.train.trainer_group.rank_spec import MEETING, Rendezvous, needs_trainer_group
from stages.base import Stage, StageContext, TrainOptions, beside
from stages.engines.colocation import TrainerTurn
from stages.errors import UntrainableGroup
from stages.messages import CheckpointReady, Outcome, RolloutSlice, StepDone
from stages.ports import Lease, Ports, Topic, read_value
from stages.rollouts import without_older
from stages.sample_log import drop_after
from stages.topic_values import settings_at, updates_ended
from stages.train.batch import Batch, BatchLog, for_trainer
from stages.train.checkpoints import Checkpoints, Recovery
from stages.train.held_groups import HeldGroups
from stages.train.saved_groups import read_groups
from stages.train.schedule import Due, Schedule, TargetLoss
from stages.train.weights import WeightPublisher, await_landing, prover_of

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from models.train.interface import TrainBackend


class TrainStage(Stage):
    """Single writer of the policy."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        config = context.config
        self.batch_groups = config.rollout.rollout_batch_size
        self.generates = generates(config)
        self.options = context.given(TrainOptions)
        self.steps, self.run_generation = self.options.start_step, self.options.run_generation
        first = self.options.first_step
        self.schedule = Schedule(config, first=self.steps if first is None else first)
        self.ended = False
        self.recovery = Recovery(context.run_dir, Path(config.train.hf_checkpoint))
        self.backend: TrainBackend  # from setup on
        self.weights: WeightPublisher | None = None
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._reports = 0
        self._target = TargetLoss(config)
        self.log = BatchLog(config, context.run_dir, context.spans)

    async def _in_torch(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._torch, lambda: function(*args, **kwargs))

    async def _load(self, topic: Topic) -> None:
        """Not in `setup`: a trainer group is met through the topic."""
        self.backend = await self._in_torch(self._make_backend, topic)
        await self._in_torch(self.backend.setup)
        state = Path(self.options.resume_from) if self.options.resume_from else None
        if self.options.begun and (found := self.recovery.newest_state(self.options.trained)) is not None:
            self.steps, state = max((self.steps, state), found) if state is not None else found
        if state is not None:
            await self._in_torch(self.backend.load, state)
        if self.generates:
            source, slots = Path(served_checkpoint(self.config)), Path(self.options.slots)
            write, prove = partial(self.backend.write_slot, slots, source), prover_of(self.config, self.backend)
            self.weights = WeightPublisher(self.config, slots, self.context.run_dir, write, prove)

    def _make_backend(self, topic: Topic) -> TrainBackend:
        """The trainer, here or in the ranks of a trainer group. Torch is imported only in the processes that train."""
        if needs_trainer_group(self.config):
            from models.train.trainer_group.calls import TrainerGroupBackend

            return TrainerGroupBackend(partial(read_value, topic, MEETING, Rendezvous), self.options.incarnation)
        from models.train.build import build_backend

        return build_backend(self.config, self.schedule.total, self.context.run_dir)

    async def close(self) -> None:
        if hasattr(self, "backend"):
            await asyncio.to_thread(self.backend.close)  # the thread of torch may be waiting for a trainer group
        if self.weights is not None:
            self.weights.close()
        self._torch.shutdown(wait=True)

    async def run(self, ports: Ports) -> None:
        await self._load(ports.topic)
        begun = self.options.begun
        if not begun:
            await asyncio.to_thread(self.recovery.clear)
            if self.options.resume_from:
                await asyncio.to_thread(drop_after, self.context.run_dir, self.steps)
        self.groups = HeldGroups(self.config, ports, self.activity, self._untrained, self.options)
        if self.options.resume_from and self.options.restored:  # the groups that the controller left to this stage
            checkpoint = Path(self.options.resume_from)
            for lease in await asyncio.to_thread(read_groups, checkpoint, self.options.restored):
                self.groups.add(lease)
        report = partial(self._report, ports)
        self.checkpoints = Checkpoints(self.context, self.backend, self.groups, self._in_torch, self._timed, report)
        async with beside(self.groups.watch_drain(ports.topic), self.groups.read()):
            self.turn = TrainerTurn(self.config, ports.topic, self._in_torch, self.backend)
            await self._repeat(ports)
            due = self.schedule.due(self.steps)
            back = begun and self.steps == self.options.floor > 0  # for the first time, or lost before its checkpoint
            due = replace(due, evaluate=due.evaluate and not back)
            first = StepDone(self.steps, self.steps, (), {}, 0, publishes=self.generates, rolled_back=back)
            await self._report(ports, replace(first, pinned=due.evaluate and not begun))
            await self._publish(ports, due)
            if back:  # a resume must not begin with what was left
                await self._save()
            await self.turn.release()
            self.ended = due.end
            while not self.ended and await self._train_batch(ports):
                pass
            await self._save_interrupted()
            await self.checkpoints.finish()
            await self.groups.settle_rest()
            await updates_ended(ports.topic, self.config.run.drain_s / 2)  # before `close` removes the slots

    async def _untrained(self, slice_: RolloutSlice, outcome: Outcome, detail: str) -> None:
        await self.log.samples.ended(self.steps, slice_, outcome, detail)

    async def _save_interrupted(self) -> None:
        """Save a run that stops before its end, so that it resumes from its last step with its complete groups. Before
        groups are settled: the checkpoint's ledger has them open. Demonstrations cost nothing to repeat."""
        early = not self.ended and self.generates
        if self.groups.drained is not None and self.checkpoints.lacks(self.steps, groups=early):
            await self.turn.acquire()
            await self.checkpoints.save(self.steps)

    @contextmanager
    def _timed(self, name: str, detail: str = "") -> Iterator[None]:
        with self.activity.working(), self.span(name, detail=detail):
            yield

    async def _train_batch(self, ports: Ports) -> bool:
        """Train one rollout batch; False if the run ended before it was full (its groups are then discarded)."""
        started_s, waited_s = time.perf_counter(), 0.0
        batch = await self._begun(ports)
        while len(batch.leases) < self.batch_groups:
            clock, missing = time.perf_counter(), self.batch_groups - len(batch.leases)
            waits = not self.groups.ready(missing) and not self._waits_for_all
            if waits and batch.sequences:
                await self._accumulate(batch)
                continue
            if waits and batch.pending >= max(1, self.batch_groups // 4):
                await self._compute(batch, self.backend.flush)  # compute while the next group is on its way
                continue
            lease = await self.groups.next(self.steps, missing)
            waited_s += time.perf_counter() - clock
            if lease is None:
                await self._in_torch(self.backend.discard)
                self.groups.put_back(batch.leases)  # the checkpoint keeps them; they are settled after it
                return False
            await self._enter(batch, lease)
        await self.turn.acquire()
        metrics = await self._stepped(batch)
        metrics |= {"perf/wait_time": waited_s, "perf/train_time": batch.compute_s}
        metrics |= batch.speed(metrics) | self.recovery.metrics
        await self._finish(ports, batch, metrics, started_s)
        return True

    async def _begun(self, ports: Ports) -> Batch:
        batch = Batch(self.config, self.steps)
        await self._in_torch(
            self.backend.begin_batch,
            rollouts=batch.expected_rollouts,
            steps=self.config.train.num_steps_per_rollout or 1,
            version=self.steps,
            lr_scale=self._take_settings(ports.topic),
        )
        return batch

    async def _stepped(self, batch: Batch) -> dict[str, float]:
        """The optimizer's steps of a batch that is complete."""
        await self._accumulate(batch)
        metrics: dict[str, float] = {}
        for _ in range(self.config.train.num_steps_per_rollout or 1):
            metrics = await self._compute(batch, self.backend.step)
        return metrics

    async def _repeat(self, ports: Ports) -> None:
        """Train again the batches that the lost trainer had reported and that the loaded state lacks. Their groups are
        settled in the ledger, and engines may have their versions, so nothing here is reported."""
        loaded = self.steps
        while self.steps < self.options.trained:
            batch = await self._begun(ports)
            for slice_ in await asyncio.to_thread(self.recovery.batch, self.steps + 1):
                batch.add(*for_trainer(self.config, slice_))
            await self._stepped(batch)
            self.steps += 1
        if self.steps > loaded and self.schedule.due(self.steps).save:
            await self._save()  # the trainer was lost before or during the save of this step

    async def _save(self) -> None:
        clock = time.perf_counter()
        await self.checkpoints.save(self.steps)
        self.recovery.saved(time.perf_counter() - clock)

    async def _save_recovery_point(self) -> None:
        def write(directory: Path) -> None:
            self.backend.save(directory)
            self.backend.finish_save()

        if await asyncio.to_thread(self.recovery.due):
            with self._timed("save", f"recovery point of step {self.steps}"):
                await self._in_torch(self.recovery.save, self.steps, write)

    def _take_settings(self, topic: Topic) -> float:
        """Apply what the user changed for the next batch; returns the factor of its learning rate."""
        changed = settings_at(topic, self.steps + 1)
        if changed is None:
            return 1.0
        self.groups.bound(changed.max_staleness)
        return changed.lr_scale

    @property
    def _waits_for_all(self) -> bool:
        """Whether computing must wait for the complete batch: the order counts, or the engines hold the device."""
        debug = self.config.debug  # a saved and replayed batch must give the same result to the bit
        replayed = debug.save_debug_rollout_data is not None or debug.load_debug_rollout_data is not None
        return self.config.run.deterministic or self.turn.on or replayed

    async def _compute(self, batch: Batch, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        clock = time.perf_counter()
        with self._timed("train", getattr(function, "__name__", "")):
            result = await self._in_torch(function, *args, **kwargs)
        batch.compute_s += time.perf_counter() - clock
        batch.pending = 0 if function in (self.backend.flush, self.backend.step) else batch.pending
        return result

    async def _enter(self, batch: Batch, lease: Lease[RolloutSlice]) -> None:
        """Add a group to the batch, or settle it if it is too old or has no advantages."""
        if await self.groups.refused(lease, self.steps):
            return
        slice_, masked, gate = lease.message, 0, self.groups.gate
        if gate.masks:
            slice_, masked = without_older(slice_, max(self.steps - gate.max_staleness, gate.floor))
        try:
            slice_, sequences = for_trainer(self.config, slice_)
        except UntrainableGroup as error:
            await self.groups.settle(lease, "failed", str(error))
            return
        batch.leases.append(lease)
        batch.add(slice_, sequences, masked)

    async def _accumulate(self, batch: Batch) -> None:
        """Hand over all groups that have come in one call: what comes at once is dealt to the ranks by cost."""
        groups = sorted(batch.sequences) if self._waits_for_all else list(batch.sequences)
        # One call before any step of the batch, so of the weights that it began with.
        chosen = groups[: max(0, self.log.samples.wanted(self.steps + 1) - len(batch.log_probs))]
        if written := [sequence for group_id in chosen for sequence in batch.sequences[group_id]]:
            scored = iter(await self._compute(batch, self.backend.logprobs, written))
            batch.log_probs |= {group_id: [next(scored) for _ in batch.sequences[group_id]] for group_id in chosen}
        sequences = [sequence for group_id in groups for sequence in batch.sequences.pop(group_id)]
        if sequences:
            await self._compute(batch, self.backend.accumulate, sequences)

    async def _finish(self, ports: Ports, batch: Batch, metrics: dict[str, float], started_s: float) -> None:
        """Report a trained batch, then publish and save what is due."""
        await self.checkpoints.finish()
        self.steps += 1
        due = self.schedule.due(
            self.steps,
            target_reached=self._target.reached(metrics),
            save_requested=self.checkpoints.requested(ports.topic),
        )
        if due.evaluate and not due.end and self.weights is not None and self.weights.evaluating(ports.topic):
            due = replace(due, evaluate=False)
            metrics["eval/skipped"] = 1.0
        await asyncio.to_thread(self.recovery.keep, self.steps, batch.slices)
        metrics["perf/step_time"] = time.perf_counter() - started_s
        await self._report(ports, self._step_report(batch, metrics, due))
        await self.log.trained(self.steps, batch, metrics)
        self.groups.ended(batch.leases)
        self.activity.items_out += len(batch.leases)
        self.activity.tokens += batch.trained_tokens
        if not due.end:
            self._take_settings(ports.topic)
            await self.groups.clear(self.steps)
        if due.publish:
            await self._publish(ports, due)
        await (self._save() if due.save else self._save_recovery_point())
        await self.turn.release()  # not before the save, for which the state must be on the device
        for lease in batch.leases:
            lease.done()
        self.ended = due.end

    def _step_report(self, batch: Batch, metrics: dict[str, float], due: Due) -> StepDone:
        return StepDone(
            step=self.steps,
            version=self.steps,
            groups=batch.group_ids,
            metrics=batch.metrics() | metrics,
            tokens=batch.trained_tokens,
            token_hash=batch.token_hash(),
            staleness=dict(batch.staleness),
            pinned=due.evaluate,
            last=due.end and self.steps < self.schedule.total,
            pass_rates=batch.pass_rates,
            publishes=due.publish,
        )

    async def _report(self, ports: Ports, report: StepDone | CheckpointReady) -> None:
        # Unique: a step may be reported twice, at the start of a run and when a drain saves it again.
        self._reports += 1
        with self.activity.working(), self.activity.sending():
            number = f"{self.run_generation}.{self.options.incarnation}/{self._reports}"
            await ports.outlets["settle"].send(report, f"{type(report).__name__}/{number}")

    async def _publish(self, ports: Ports, due: Due) -> None:
        """Write the weights into the free slot and announce them."""
        weights = self.weights
        if weights is None:
            return
        if weights.newest >= 0:
            await await_landing(ports.topic, weights.newest, weights.pinned, lambda: self.groups.drained is not None)
        clock = time.perf_counter()
        with self._timed("publish_weights", f"version {self.steps}"):
            announcement = await self._in_torch(weights.write, self.steps, self.run_generation, pinned=due.evaluate)
        await weights.announce(ports.topic, ports.weights, replace(announcement, floor=self.options.floor))
        self.activity.extra["publish_s"] = time.perf_counter() - clock
        if weights.delta_ratio:
            self.activity.extra["delta_ratio"] = weights.delta_ratio
