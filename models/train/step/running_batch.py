"""One rollout batch on its way through the trainer: what arrives, when it is computed, what a step consists of.

Two ways, chosen by `needs.BatchNeeds`:
- streaming (one step, nothing needed of the whole batch): forward and backward run as sequences arrive;
- whole batch: old log-probs are computed as sequences arrive; at the first step the batch is completed (log-probs of a
  reference that takes the policy's place, advantages, the cut into steps), and each step gets its statistics before its
  first backward pass.

Invariant: which micro-batches are formed, and when, changes no sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.algorithms.aggregation import StepSize
from models.algorithms.tokens import StepStatistics
from models.errors import BackendMisuse
from models.train.model_set import ModelSet
from models.train.spec import BatchNeeds, TrainSpec
from models.train.step.advantages import decide_advantages, logged_means
from models.train.step.examples import Example, Rollout, RolloutKey, partition
from models.train.step.micro_batch_loss import StepTotals, write_step_statistics
from models.train.step.micro_batches import micro_batches
from models.train.step.old_log_probs import Assigned, OldLogProbPass, Pending, whole_groups


class RunningBatch:
    """A rollout batch from its first sequence to its last optimizer step."""

    def __init__(
        self, models: ModelSet, spec: TrainSpec, needs: BatchNeeds, *, steps: int, train_policy: bool = True
    ) -> None:
        self._models = models
        self._old_log_probs = OldLogProbPass(models, bootstrap=spec.algorithm.bootstrap_truncated)
        self._spec = spec
        self._needs = needs
        self._steps = steps
        self._train_policy = train_policy
        self.seen: set[RolloutKey] = set()
        self._rollouts: list[Rollout] = []  # of a whole batch
        self._parts: list[list[Rollout]] = []  # steps still due, once the batch is cut
        self._completed = False
        self._first = True  # no step has been made
        self._pending = Pending()  # for backward
        self._unscored = Pending()  # of a whole batch, what still lacks old log-probs
        self._begin_step(StepSize())
        self._batch_metrics: dict[str, float] = {}

    def _begin_step(self, size: StepSize) -> None:
        self.size = size  # of the running step
        self.totals = StepTotals()
        self.staleness_sum = 0.0  # over its trainable tokens
        self._examples: list[Example] = []  # of the running step of a whole batch
        self._statistics = StepStatistics()

    @property
    def steps_due(self) -> int:
        """Steps that are left once the batch is cut; 0 before."""
        return len(self._parts)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts in. Raises `BackendMisuse` for one that is there already."""
        for rollout in rollouts:
            if rollout.key in self.seen:
                raise BackendMisuse(
                    f"rollout {rollout.key[1]} of group {rollout.key[0]} was handed over twice in one batch; "
                    "all sequences of a rollout belong in one call of accumulate"
                )
        self.seen.update(rollout.key for rollout in rollouts)
        examples = [example for rollout in rollouts for example in rollout.examples]
        if self._needs.whole_batch:
            self._rollouts.extend(rollouts)
            self._unscored.extend(examples)
        else:
            self.size = sum((rollout.size for rollout in rollouts), self.size)
            self._take(examples)

    def _take(self, examples: Sequence[Example]) -> None:
        """Into the running step."""
        self.staleness_sum += sum(float(e.staleness.sum()) for e in examples if e.staleness is not None)
        self._pending.extend(examples)

    def flush(self) -> None:
        """Run also micro-batches that are not full, unless a pass takes several: it waits for them."""
        self.work(everything=self._models.pass_micro_batches == 1)

    def work(self, *, everything: bool) -> None:
        """Run what is possible: full micro-batches, as many as a pass takes at least, or all."""
        packing, dp_size = self._models.packing, self._models.dp_group.dp_size
        at_least = self._models.pass_micro_batches
        if self._needs.whole_batch and not self._completed:
            if assigned := self._unscored.take(packing, dp_size, everything=everything, at_least=at_least):
                self._old_log_probs.fill(assigned, self._needs)
        elif self._spec.whole_groups:
            self._backward(whole_groups(self._pending.take_all(), packing, dp_size))
        else:
            self._backward(self._pending.take(packing, dp_size, everything=everything, at_least=at_least))

    def _backward(self, assigned: Assigned) -> None:
        if not assigned:
            return
        own = micro_batches(assigned.by_dp_rank, assigned.examples, self._models.dp_group.dp_rank)
        if self._train_policy:
            self._models.backward(own, self._statistics, self.totals)
        if self._models.critic is not None:
            self._models.critic.backward(own)
        self.totals.count(own)

    # ------------------------------------------------------------------ the step

    def run_step(self) -> None:
        """Run all that is left of the running step; `finish_step` begins the next. Its numbers are then those of all
        data-parallel ranks.
        """
        if self._needs.whole_batch:
            if not self._completed:
                self._complete()
            self._next_part()
        self.work(everything=True)
        self.totals.combine(self._models.dp_group)

    def _complete(self) -> None:
        """The batch is there: compute the last old log-probs, decide what hangs on all of it, cut it into steps."""
        self.work(everything=True)
        self._old_log_probs.fill_apart([example for rollout in self._rollouts for example in rollout.examples])
        spec = self._spec
        if self._needs.advantages:
            self._batch_metrics = decide_advantages(
                self._rollouts, spec.algorithm, self._needs, opd_kl_coef=spec.opd_kl_coef
            )
        self._parts = partition(self._rollouts, self._steps, whole_groups=spec.whole_groups)
        self._completed = True

    def _next_part(self) -> None:
        """Make the next part of the batch the running step, and establish its statistics."""
        spec = self._spec
        self._begin_step(sum((rollout.size for rollout in self._parts[0]), StepSize()))
        self._examples = [example for rollout in self._parts[0] for example in rollout.examples]
        self._take(self._examples)
        if self._needs.statistics == "none":
            return
        if self._needs.statistics == "current" and not self._first:
            self._old_log_probs.refresh(self._examples)
        self._statistics = write_step_statistics(self._examples, spec.algorithm, spec.correction, spec.aggregation)

    def decided_metrics(self, mean_denominator: float) -> dict[str, float]:
        """Metrics of what was decided for the batch, for the running step."""
        if not self._needs.advantages:
            return {}
        return self._batch_metrics | logged_means(self._examples, mean_denominator)

    def finish_step(self) -> bool:
        """Leave the running step; whether the batch is finished."""
        self._first = False
        self._parts = self._parts[1:]
        return not self._parts
