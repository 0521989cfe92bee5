"""The train stage: takes fresh groups from the buffer, accumulates them as they arrive, steps, publishes weights.

Invariants:
- I2: a group enters batch t only if t - (oldest version of its trainable tokens) <= max_staleness, whatever the order
  of the buffer; else it is settled as stale, or as surplus where it is what over-sampling left of a synchronous batch.
- A group id enters at most one optimizer step; its lease is released after the step's report is in the ledger's stream.
- A version is announced only when its bytes lie complete in a slot; while an evaluation still needs version v, nothing
  newer is announced before every engine has applied v.
- Torch runs in one worker thread, so that the event loop keeps renewing leases during a step.
- What trains may be lost (the ranks of a trainer group): buffer, leases and version are here, and are not lost with it.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from models.checkpoint import draft_path
from models.train.trainer_group.rank_spec import needs_trainer_group
from stages.base import Stage, StageContext
from stages.engines.colocation import TrainerTurn
from stages.engines.weight_barrier import await_landing
from stages.errors import UntrainableGroup
from stages.messages import CheckpointReady, Outcome, Report, RolloutSlice, StepDone
from stages.options import TrainOptions
from stages.ports import Lease, Ports
from stages.prompts.staleness_gate import over_sampling
from stages.rollouts import oldest_version, settlement
from stages.train.batch import Batch, slice_sequences
from stages.train.buffer import GroupBuffer

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from models.train.interface import TrainBackend
    from stages.train.publish_weights import WeightPublisher


def first_of(report: Report) -> str:
    """Tells the report that opens a run from the one of its first batch."""
    return "first" if isinstance(report, StepDone) and not report.groups else ""


class TrainStage(Stage):
    """Single writer of the policy."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        config = context.config
        self.batch_groups = config.rollout.rollout_batch_size
        self.total = config.rollout.num_rollout or 0
        self.supervised = config.train.loss_type == "sft_loss"
        self.max_staleness = config.asynchrony.max_staleness or 0
        self.options = context.given(TrainOptions)
        self.steps, self.epoch = self.options.start_step, self.options.epoch
        self.backend: TrainBackend  # from setup on
        self.weights: WeightPublisher | None = None
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._buffer = GroupBuffer(config)
        self._seen: set[int] = set()
        self._arrived = asyncio.Event()
        self._ended = False
        self._drain: str | None = None
        self._pinned = -1  # newest version that an evaluation needs
        self._saved = self.steps
        self._saving: CheckpointReady | None = None  # begun, not reported
        self._losses: deque[float] = deque(maxlen=10)

    async def _in_torch(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._torch, lambda: function(*args, **kwargs))

    async def setup(self) -> None:
        from stages.train.publish_weights import WeightPublisher

        self.backend = await self._in_torch(self._make_backend)
        await self._in_torch(self.backend.setup)
        if self.options.resume_from:
            await self._in_torch(self.backend.load, Path(self.options.resume_from))
        if not self.supervised:
            source = Path(self.config.train.hf_checkpoint)
            self.weights = WeightPublisher(self.config, Path(self.options.slots), source, self.context.run_dir)

    def _make_backend(self) -> TrainBackend:
        """The trainer, here or in the ranks of a trainer group. Torch is imported only in the processes that train."""
        if needs_trainer_group(self.config):
            from models.train.trainer_group.backend import TrainerGroupBackend

            return TrainerGroupBackend(
                Path(self.options.trainer_group),
                self.context.run_dir / "trainer_group",
                saves_in_background=self.config.checkpoint.async_save,
            )
        from models.train.build import build_backend

        return build_backend(self.config, self.total)

    async def close(self) -> None:
        if hasattr(self, "backend"):
            await asyncio.to_thread(
                self.backend.close
            )  # not in the thread of torch, which may be waiting for a trainer group
        if self.weights is not None:
            self.weights.close()
        self._torch.shutdown(wait=True)

    async def run(self, ports: Ports) -> None:
        async with asyncio.TaskGroup() as tasks:
            self.turn = TrainerTurn(self.config, ports.topic, self._in_torch, self.backend)
            await self._report(ports, StepDone(self.steps, self.steps, (), {}, 0, pinned=self._evaluates(self.steps)))
            await self._publish(ports, first=True)
            watch = tasks.create_task(self._watch_drain(ports))
            reader = tasks.create_task(self._read(ports))
            while self.steps < self.total and await self._train_batch(ports):
                pass
            if self._drain is not None and self.steps > self._saved:
                await self._save(ports)  # an interrupted run can be resumed from its last step
            await self._finish_save(ports)
            await self._settle_rest(ports)
            await reader
            watch.cancel()

    async def _watch_drain(self, ports: Ports) -> None:
        """Waits for the topic `drain`; wakes the trainer, which settles what it cannot use. Ends then."""
        revision = 0
        while self._drain is None:
            revision = await ports.topic.wait(revision, "drain")
            reason = ports.topic.get("drain")
            self._drain = None if reason is None else reason.decode()
        self._arrived.set()

    async def _read(self, ports: Ports) -> None:
        """Waits for groups; ends with the inlet. After the last batch, what still comes is settled as surplus."""
        inlet = ports.inlets["in"]
        while (lease := await inlet.receive()) is not None:
            self.activity.items_in += 1
            group_id = lease.message.group.group_id
            if group_id in self._seen:
                lease.done()
                continue
            self._seen.add(group_id)
            self._buffer.push(lease)
            self._arrived.set()
        self._ended = True
        self._arrived.set()

    async def _next(self, missing: int) -> Lease[RolloutSlice] | None:
        """The next group for a batch that lacks so many.

        Waits for an arrival; None once the inlet has ended or the run drains.
        """
        while (lease := self._buffer.pop(self.steps, missing)) is None:
            if self._ended or self._drain is not None:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return lease

    async def _train_batch(self, ports: Ports) -> bool:
        """Train one rollout batch; False if the run ended before it was full (its groups are then surplus)."""
        batch = Batch(self.config, self.steps)
        steps = self.config.train.num_steps_per_rollout or 1
        started_s, waited_s = time.perf_counter(), 0.0
        await self._in_torch(
            self.backend.begin_batch, rollouts=batch.expected_rollouts, steps=steps, version=self.steps
        )
        while len(batch.leases) < self.batch_groups:
            clock, missing = time.perf_counter(), self.batch_groups - len(batch.leases)
            if (
                not self._buffer.ready(missing)
                and batch.pending >= max(1, self.batch_groups // 4)
                and not self._waits_for_all
            ):
                await self._compute(batch, self._flush)  # nothing to do but wait: use the time
                continue
            lease = await self._next(missing)
            waited_s += time.perf_counter() - clock
            if lease is None:
                await self._in_torch(self.backend.discard)
                for held in batch.leases:  # settled after the checkpoint, which a resumed run trains them from
                    self._buffer.push(held)
                return False
            await self._enter(ports, batch, lease)
        await self.turn.acquire()
        for _, sequences in sorted(batch.sequences.items()):
            await self._compute(batch, self.backend.accumulate, sequences)
        metrics: dict[str, float] = {}
        for _ in range(steps):
            metrics = await self._compute(batch, self.backend.step)
        metrics["perf/wait_time"] = waited_s
        metrics["perf/train_time"] = batch.compute_s
        await self._finish(ports, batch, metrics, started_s)
        return True

    @property
    def _waits_for_all(self) -> bool:
        """Whether nothing is computed before the batch is complete: the order counts, or the device is the engines'."""
        return self.config.run.deterministic or self.turn.on

    def _flush(self) -> None:
        self.backend.flush()

    async def _compute(self, batch: Batch, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        clock = time.perf_counter()
        with self.activity.working(), self.span("train", detail=getattr(function, "__name__", "")):
            result = await self._in_torch(function, *args, **kwargs)
        batch.compute_s += time.perf_counter() - clock
        batch.pending = 0 if function in (self._flush, self.backend.step) else batch.pending
        return result

    async def _enter(self, ports: Ports, batch: Batch, lease: Lease[RolloutSlice]) -> None:
        """Take a group into the batch, or settle it: too old, or without advantages."""
        if not self._buffer.fresh(self.steps, oldest_version(lease.message.samples)):
            await self._too_old(ports, lease)
            return
        try:
            sequences = slice_sequences(self.config, lease.message)
        except UntrainableGroup as error:
            await self._settle(ports, lease, "failed", str(error))
            return
        if self._waits_for_all:
            batch.add(lease, sequences)
        else:
            batch.add(lease)
            await self._compute(batch, self.backend.accumulate, sequences)

    async def _too_old(self, ports: Ports, lease: Lease[RolloutSlice]) -> None:
        oldest = oldest_version(lease.message.samples)
        detail = f"oldest token is of version {oldest}, batch {self.steps}, bound {self.max_staleness}"
        if self.max_staleness == 0 and over_sampling(self.config) > 0:
            await self._settle(ports, lease, "surplus", f"over-sampled: {detail}")
        else:
            await self._settle(ports, lease, "stale", detail)

    async def _clear(self, ports: Ports) -> None:
        """After a batch: what the next one could not take ends now, so that new prompts take its place."""
        for lease, reason in self._buffer.take_spares():
            await self._settle(ports, lease, "filtered", reason)
        for lease in self._buffer.take_old(self.steps):
            await self._too_old(ports, lease)

    async def _settle(self, ports: Ports, lease: Lease[RolloutSlice], outcome: Outcome, detail: str) -> None:
        slice_ = lease.message
        await ports.outlets["settle"].send(settlement(slice_, outcome, detail), str(slice_.group.group_id))
        lease.done()

    async def _finish(self, ports: Ports, batch: Batch, metrics: dict[str, float], started_s: float) -> None:
        await self._finish_save(ports)
        self.steps += 1
        reached = self._target_reached(metrics)
        last = reached or self.steps >= self.total
        interval = self.config.asynchrony.update_weights_interval
        due = not self.supervised and (last or self.steps % interval == 0)
        metrics["perf/step_time"] = time.perf_counter() - started_s
        report = StepDone(
            step=self.steps,
            version=self.steps,
            groups=batch.group_ids,
            metrics=batch.metrics() | metrics,
            tokens=batch.trained_tokens,
            token_hash=batch.token_hash(),
            staleness=batch.staleness,
            pinned=due and self._evaluates(self.steps),
            last=reached,
            pass_rates=batch.pass_rates,
        )
        await self._report(ports, report)
        for lease in batch.leases:
            lease.done()
        self.activity.items_out += len(batch.leases)
        self.activity.tokens += batch.trained_tokens
        if not last:
            await self._clear(ports)
        if due:
            await self._publish(ports)
        save = self.config.checkpoint.save_interval
        if last or (save is not None and self.steps % save == 0):
            await self._save(ports)
        if reached:
            self.total = self.steps

    def _target_reached(self, metrics: dict[str, float]) -> bool:
        """Whether a warm start may end early."""
        target = self.config.warm_start.warm_start_target_loss
        if not self.supervised or target is None:
            return False
        self._losses.append(metrics.get("train/loss", math.inf))
        return len(self._losses) == self._losses.maxlen and statistics.fmean(self._losses) < target

    def _evaluates(self, version: int) -> bool:
        evaluation = self.config.eval
        if self.supervised or not evaluation.eval_prompt_data or evaluation.eval_interval is None:
            return False
        if version == 0 and evaluation.skip_eval_before_train:
            return False
        return version % evaluation.eval_interval == 0 or version >= self.total

    async def _report(self, ports: Ports, report: StepDone | CheckpointReady) -> None:
        with self.activity.working(), self.activity.sending():
            await ports.outlets["settle"].send(
                report, f"{type(report).__name__}/{self.epoch}/{report.step}/{first_of(report)}"
            )

    async def _publish(self, ports: Ports, first: bool = False) -> None:
        """Write the weights into the free slot and announce them."""
        weights = self.weights
        if weights is None:
            return
        if not first:
            await await_landing(
                ports.topic,
                version=self.steps,
                newest=weights.newest,
                pinned=self._pinned,
                given_up=lambda: self._drain is not None,
            )
        pinned = self._evaluates(self.steps)
        clock = time.perf_counter()
        with self.activity.working(), self.span("publish_weights", detail=f"version {self.steps}"):
            announcement = await self._in_torch(
                lambda: weights.write(self.steps, self.epoch, self.backend.export_weights(), pinned=pinned)
            )
        await weights.announce(ports.topic, announcement)
        await self.turn.release()
        self._pinned = self.steps if pinned else self._pinned
        self.activity.extra["publish_s"] = time.perf_counter() - clock
        if weights.delta_ratio:
            self.activity.extra["delta_ratio"] = weights.delta_ratio

    async def _save(self, ports: Ports) -> None:
        """Write the trainer's state, or with `async_save` begin to."""
        await self._finish_save(ports)
        directory = draft_path(self.context.run_dir / "checkpoints", self.steps)
        self._saved = self.steps
        with self.activity.working(), self.span("save", detail=f"step {self.steps}"):
            await self._in_torch(self.backend.save, directory)
        self._saving = CheckpointReady(self.steps, self.steps, str(directory))
        if not self.config.checkpoint.async_save:
            await self._finish_save(ports)

    async def _finish_save(self, ports: Ports) -> None:
        """Report a checkpoint that was begun, once it is on disk.

        Before the report of the next step: the ledger that is committed with it is the one after its own.
        """
        report, self._saving = self._saving, None
        if report is None:
            return
        if self.config.checkpoint.async_save:
            with self.activity.working(), self.span("finish_save", detail=f"step {report.step}"):
                await self._in_torch(self.backend.finish_save)
        await self._report(ports, report)

    async def _settle_rest(self, ports: Ports) -> None:
        """After the last batch: everything that is here or still comes is surplus. Ends with the inlet."""
        while True:
            rest = self._buffer.take_all()
            for lease in rest:
                await self._settle(ports, lease, "surplus", self._drain or "all rollout batches are trained")
            if not rest and self._ended:
                return
            if not rest:
                self._arrived.clear()
                await self._arrived.wait()
