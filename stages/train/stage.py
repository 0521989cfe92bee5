"""The train stage: takes fresh groups from the buffer, accumulates them as they arrive, steps, publishes weights.

Invariants:
- I2: a group enters a batch only if the gate lets it in, whatever the buffer's order (stages/train/held_groups.py).
- A group id enters at most one optimizer step; its lease is released after the step's report is in the ledger's stream
  and, if the step is saved at once, the report of its checkpoint too: until then it can be repeated.
- A version is announced only when its bytes lie complete in a slot; while an evaluation still needs version v, nothing
  newer is announced before every engine has applied v.
- Torch runs in one worker thread, so that the event loop keeps renewing leases during a step.
- What trains may be lost (the ranks of a trainer group): buffer, leases and version are here, and are not lost with it.
- A process that takes the place of a lost one (`TrainOptions.restarts`) stands where that one's last report left the
  ledger; it announces the same version again, and takes no group that has ended.
- A checkpoint holds the complete groups that wait here; a resumed run begins with them, and asks the gate again.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from configs.schema import Config, generates
from models.train.trainer_group.rank_spec import MEETING, Rendezvous, needs_trainer_group
from stages.agents.slime.hooks import logged, rollout_log, shown
from stages.base import Stage, StageContext, TrainOptions, beside
from stages.engines.colocation import TrainerTurn
from stages.errors import UntrainableGroup
from stages.messages import CheckpointReady, Outcome, RolloutSlice, StepDone
from stages.ports import Lease, Ports, Topic, read_value
from stages.sample_log import SampleLog, drop_after
from stages.topic_values import settings_at
from stages.train.asked_saves import AskedSaves
from stages.train.batch import Batch, slice_sequences
from stages.train.checkpoints import Checkpoints
from stages.train.held_groups import HeldGroups
from stages.train.saved_batches import save_batch
from stages.train.saved_groups import read_groups
from stages.train.weight_barrier import await_landing

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from models.train.interface import TrainBackend, TrainSequence
    from stages.train.publish_weights import WeightPublisher


class TrainStage(Stage):
    """Single writer of the policy."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        config = context.config
        self.batch_groups = config.rollout.rollout_batch_size
        self.total = config.rollout.num_rollout or 0
        self.supervised, self.generates = config.train.loss_type == "sft_loss", generates(config)
        self.options = context.given(TrainOptions)
        self.steps, self.run_generation = self.options.start_step, self.options.run_generation
        self.backend: TrainBackend  # from setup on
        self.weights: WeightPublisher | None = None
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._pinned = -1  # newest version that an evaluation needs
        self._reports = 0
        self._asked_saves = AskedSaves()
        self._losses: deque[float] = deque(maxlen=10)
        self.samples = SampleLog(config, context.run_dir)
        path = config.observe.custom_rollout_log_function_path
        self._log = None if path is None or self.supervised else rollout_log(path)

    @staticmethod
    def load_libraries(config: Config) -> None:
        from models.train.build import load_libraries
        from models.weights import shared_memory_writer as shared_memory_writer

        load_libraries(config)

    async def _in_torch(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._torch, lambda: function(*args, **kwargs))

    async def _load(self, topic: Topic) -> None:
        """Not in `setup`: a trainer group is met through the topic."""
        from stages.train.publish_weights import WeightPublisher

        self.backend = await self._in_torch(self._make_backend, topic)
        await self._in_torch(self.backend.setup)
        if self.options.resume_from:
            await self._in_torch(self.backend.load, Path(self.options.resume_from))
        if self.generates:
            source = Path(self.config.train.hf_checkpoint)
            self.weights = WeightPublisher(self.config, Path(self.options.slots), source, self.context.run_dir)

    def _make_backend(self, topic: Topic) -> TrainBackend:
        """The trainer, here or in the ranks of a trainer group. Torch is imported only in the processes that train."""
        if needs_trainer_group(self.config):
            from models.train.trainer_group.backend import TrainerGroupBackend

            return TrainerGroupBackend(
                partial(read_value, topic, MEETING, Rendezvous),
                self.context.run_dir / "trainer_group",
                saves_in_background=self.config.checkpoint.async_save,
            )
        from models.train.build import build_backend

        return build_backend(self.config, self.total)

    async def close(self) -> None:
        if hasattr(self, "backend"):
            await asyncio.to_thread(self.backend.close)  # the thread of torch may be waiting for a trainer group
        if self.weights is not None:
            self.weights.close()
        self._torch.shutdown(wait=True)

    async def run(self, ports: Ports) -> None:
        await self._load(ports.topic)
        again = self.options.restarts > 0
        if self.options.resume_from and not again:
            await asyncio.to_thread(drop_after, self.context.run_dir, self.steps)
        self.groups = HeldGroups(self.config, ports, self.activity, self._untrained)
        self.groups.know(self.options.admitted, self.options.open, self.options.repeat)
        await self._restore()
        self.checkpoints = Checkpoints(
            self.context.run_dir / "checkpoints",
            self.backend,
            self.groups,
            step=self.steps,
            background=self.config.checkpoint.async_save,
            in_torch=self._in_torch,
            timed=self._timed,
            report=partial(self._report, ports),
        )
        async with beside(self.groups.watch_drain(ports.topic), self.groups.read()):
            self.turn = TrainerTurn(self.config, ports.topic, self._in_torch, self.backend)
            if self.options.repeat:
                await self._repeat(ports)
            pinned, publishes = self._evaluates(self.steps) and not again, self.generates
            await self._report(ports, StepDone(self.steps, self.steps, (), {}, 0, pinned=pinned, publishes=publishes))
            await self._publish(ports, first=True)
            while self.steps < self.total and await self._train_batch(ports):
                pass
            await self._save_interrupted()
            await self.checkpoints.finish()
            await self.groups.settle_rest()

    async def _restore(self) -> None:
        """Take back the groups that the checkpoint kept, as far as the controller left them to this stage."""
        directory, restored = self.options.resume_from, self.options.restored
        if directory is not None and restored:
            for lease in await asyncio.to_thread(read_groups, Path(directory), restored):
                self.groups.add(lease)

    async def _save_interrupted(self) -> None:
        """A run that is stopped before its end goes on from its last step, and with the groups that it had by then.

        Before they are settled: the checkpoint's ledger has them open, and a resume undoes the settlements of a drain.
        Demonstrations cost nothing to make again.
        """
        early = self.steps < self.total and self.generates
        if self.groups.drained is not None and self.checkpoints.lacks(self.steps, groups=early):
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
            if waits and batch.pending >= max(1, self.batch_groups // 4):
                await self._compute(batch, self.backend.flush)  # nothing to do but wait: use the time
                continue
            lease = await self.groups.next(self.steps, missing)
            waited_s += time.perf_counter() - clock
            if lease is None:
                await self._in_torch(self.backend.discard)
                self.groups.put_back(batch.leases)  # settled after the checkpoint, which keeps them
                return False
            await self._enter(batch, lease)
        await self.turn.acquire()
        metrics = await self._stepped(batch)
        metrics["perf/wait_time"] = waited_s
        metrics["perf/train_time"] = batch.compute_s
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
        for _, sequences in sorted(batch.sequences.items()):
            await self._compute(batch, self.backend.accumulate, sequences)
        metrics: dict[str, float] = {}
        for _ in range(self.config.train.num_steps_per_rollout or 1):
            metrics = await self._compute(batch, self.backend.step)
        return metrics

    async def _repeat(self, ports: Ports) -> None:
        """Train the step again that the lost process had reported and not saved. Its groups have ended by it, and its
        version may be with the engines: nobody is told again, and the weights are the same, up to rounding."""
        batch, leases = await self._begun(ports), await self.groups.repeated()
        for lease in leases:
            await self._add(batch, lease, slice_sequences(self.config, lease.message))
        await self._stepped(batch)
        self.steps += 1
        await self.checkpoints.save(self.steps)
        for lease in leases:
            lease.done()

    def _take_settings(self, topic: Topic) -> float:
        """What the user changed for the next batch: its bound of staleness is kept to, its learning rate's factor
        returned."""
        changed = settings_at(topic, self.steps + 1)
        if changed is None:
            return 1.0
        self.groups.bound(changed.max_staleness)
        return changed.lr_scale

    @property
    def _waits_for_all(self) -> bool:
        """Whether nothing is computed before the batch is complete: the order counts, or the device is the engines'."""
        debug = self.config.debug  # saved and trained again, a batch must give the same to the bit
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
        """Take a group into the batch, or settle it: too old, or without advantages."""
        if await self.groups.refused(lease, self.steps):
            return
        try:
            sequences = slice_sequences(self.config, lease.message)
        except UntrainableGroup as error:
            await self.groups.settle(lease, "failed", str(error))
            return
        await self._add(batch, lease, sequences)

    async def _add(self, batch: Batch, lease: Lease[RolloutSlice], sequences: list[TrainSequence]) -> None:
        if self._waits_for_all:
            batch.add(lease, sequences)
        else:
            batch.add(lease)
            await self._compute(batch, self.backend.accumulate, sequences)

    async def _finish(self, ports: Ports, batch: Batch, metrics: dict[str, float], started_s: float) -> None:
        await self.checkpoints.finish()
        self.steps += 1
        reached = self._target_reached(metrics)
        last = reached or self.steps >= self.total
        interval = self.config.asynchrony.update_weights_interval
        due = self.generates and (last or self.steps % interval == 0)
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
            publishes=due,
        )
        await self._report(ports, report)
        if self._log is not None:
            samples = [sample for lease in batch.leases for sample in shown(lease.message)]
            said, wall_s = {**report.metrics}, metrics["perf/step_time"]
            await logged(
                "--custom-rollout-log-function-path", self._log, self.steps - 1, self.config, samples, said, wall_s
            )
        for group_id in batch.group_ids:  # where the arrows of a group end in the trace
            self.context.spans.add("trained", time.time(), 0.0, group=group_id, detail=f"step {self.steps}")
        if (file := self.config.debug.save_debug_rollout_data) is not None and not self.supervised:
            await asyncio.to_thread(save_batch, file, self.steps - 1, [lease.message for lease in batch.leases])
        await self.samples.trained(self.steps, [lease.message for lease in batch.leases])
        self.groups.ended(batch.leases)
        self.activity.items_out += len(batch.leases)
        self.activity.tokens += batch.trained_tokens
        if not last:
            self._take_settings(ports.topic)
            await self.groups.clear(self.steps)
        if due:
            await self._publish(ports)
        save, asked = self.config.checkpoint.save_interval, self._asked_saves.due(ports.topic)
        if last or asked or (save is not None and self.steps % save == 0):
            await self.checkpoints.save(self.steps)
        for lease in batch.leases:
            lease.done()
        if reached:
            self.total = self.steps

    async def _untrained(self, slice_: RolloutSlice, outcome: Outcome, detail: str) -> None:
        await self.samples.ended(self.steps, slice_, outcome, detail)

    def _target_reached(self, metrics: dict[str, float]) -> bool:
        """Whether a warm start may end early."""
        target = self.config.warm_start.warm_start_target_loss
        if not self.supervised or target is None:
            return False
        self._losses.append(metrics.get("train/loss", math.inf))
        return len(self._losses) == self._losses.maxlen and statistics.fmean(self._losses) < target

    def _evaluates(self, version: int) -> bool:
        evaluation = self.config.eval
        if not self.generates or not evaluation.eval_prompt_data or evaluation.eval_interval is None:
            return False
        if version == 0 and evaluation.skip_eval_before_train:
            return False
        return version % evaluation.eval_interval == 0 or version >= self.total

    async def _report(self, ports: Ports, report: StepDone | CheckpointReady) -> None:
        self._reports += 1  # a step may be told of twice: at the start of a run, and when a drain saves it again
        with self.activity.working(), self.activity.sending():
            number = f"{self.run_generation}.{self.options.restarts}/{self._reports}"
            await ports.outlets["settle"].send(report, f"{type(report).__name__}/{number}")

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
                given_up=lambda: self.groups.drained is not None,
            )
        interval = self.config.asynchrony.update_weights_interval
        due = not (first and self.options.restarts) or self.steps % interval == 0 or self.steps >= self.total
        pinned = self._evaluates(self.steps) and (due or self.steps == self.options.first_step)
        clock = time.perf_counter()
        with self._timed("publish_weights", f"version {self.steps}"):
            announcement = await self._in_torch(
                lambda: weights.write(self.steps, self.run_generation, self.backend.export_weights(), pinned=pinned)
            )
        await weights.announce(ports.topic, ports.weights, announcement)
        await self.turn.release()
        self._pinned = self.steps if pinned else self._pinned
        self.activity.extra["publish_s"] = time.perf_counter() - clock
        if weights.delta_ratio:
            self.activity.extra["delta_ratio"] = weights.delta_ratio
