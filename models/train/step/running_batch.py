"""One rollout batch on its way through the trainer: scores before its first update, then its optimizer steps.

Two ways, chosen by `spec.BatchNeeds`:
- streaming (one step, nothing needed of the whole batch): forward and backward run as sequences arrive;
- whole batch: old log-probs are computed as sequences arrive; at the first step the batch is completed (log-probs of a
  reference that takes the policy's place, advantages, the cut into steps), and each step gets its statistics before its
  first backward pass.

Invariants:
- which micro-batches are formed, and when, changes no sum;
- scores have no gradient and are of the weights of the batch's start, but for `refresh`, which is of the weights of a
  later step's start; each data-parallel rank computes its own, and all ranks write the results into their examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from models.algorithms.aggregation import StepSize
from models.algorithms.tokens import StepStatistics
from models.errors import BackendMisuse
from models.train.dp_group import Float32Array
from models.train.model_set import ModelSet
from models.train.spec import BatchNeeds, TrainSpec
from models.train.step.critic import decide_advantages, logged_means
from models.train.step.examples import Example, Rollout, RolloutKey, partition
from models.train.step.micro_batch_loss import StepTotals, token_counts, write_step_statistics
from models.train.step.micro_batches import Assigned, MicroBatch, Pending, assign_all, micro_batches, whole_groups

Score = Callable[[Sequence[MicroBatch]], list[Float32Array]]


class OldLogProbPass:
    """Log-probs of policy and reference and values of the critic, written into examples."""

    def __init__(self, models: ModelSet, *, bootstrap: bool) -> None:
        """`bootstrap`: whether the value behind the end of truncated sequences is wanted."""
        self._models = models
        self._bootstrap = bootstrap

    def fill(self, assigned: Assigned, needs: BatchNeeds) -> None:
        """Fill in what `needs` asks for, and the reference's log-probs if it stands beside the policy."""
        models = self._models
        if needs.old_log_probs:
            fields = ("current_log_probs",) if needs.student_is_sampler else ("current_log_probs", "old_log_probs")
            self._score(assigned, models.log_probs, *fields)
        if models.has_reference and not models.reference_apart:
            self._reference(assigned)
        if needs.values and models.critic is not None:
            self._values(assigned, models.critic.values)

    def fill_apart(self, examples: Sequence[Example]) -> None:
        """Fill in the log-probs of a reference that takes the policy's place; of the whole batch at one time."""
        if examples and self._models.has_reference and self._models.reference_apart:
            self._reference(self._assigned(examples))

    def _reference(self, assigned: Assigned) -> None:
        self._score(assigned, lambda own: self._models.log_probs(own, "reference"), "ref_log_probs")

    def refresh(self, examples: Sequence[Example]) -> None:
        """Fill in `current_log_probs` under the weights as they are now."""
        if examples:
            self._score(self._assigned(examples), self._models.log_probs, "current_log_probs")

    def _assigned(self, examples: Sequence[Example]) -> Assigned:
        return assign_all(examples, self._models.packing, self._models.dp_group.dp_size)

    def _score(self, assigned: Assigned, score: Score, *fields: str) -> None:
        """Run one model over this process's micro-batches; the results of all processes go into these fields."""
        dp_group = self._models.dp_group
        found = score(micro_batches(assigned.by_dp_rank, assigned.examples, dp_group.dp_rank))
        own = found[: len(assigned.by_dp_rank[dp_group.dp_rank])]  # without the blank ones behind
        parts = dp_group.gather_by_dp_rank(np.concatenate([np.zeros(0, np.float32), *own]))
        for layouts, values in zip(assigned.by_dp_rank, parts, strict=True):
            members = [assigned.examples[item] for layout in layouts for item in layout.items]
            cuts = np.cumsum(token_counts(members))[:-1]
            for example, one in zip(members, np.split(values, cuts) if members else [], strict=True):
                for field in fields:
                    setattr(example, field, one)

    def _values(self, assigned: Assigned, score: Score) -> None:
        """Values, and those behind the end of truncated sequences."""
        if not (self._bootstrap and any(example.truncated for example in assigned.examples)):
            self._score(assigned, score, "values")
            return
        # The value behind the end is read at the last token, which is an input only if something follows it.
        items = (item for layouts in assigned.by_dp_rank for layout in layouts for item in layout.items)
        examples = [assigned.examples[item] for item in items]
        longer = [_continued(example) if example.truncated else replace(example) for example in examples]
        self._score(self._assigned(longer), score, "values")
        for example, copy in zip(examples, longer, strict=True):
            assert copy.values is not None
            own = len(example.chosen)
            example.values = copy.values[:own]
            example.bootstrap = float(copy.values[own]) if len(copy.values) > own else 0.0


def _continued(example: Example) -> Example:
    """The example with a token behind its end, whose value is that of the end."""
    end = len(example.tokens)
    longer = np.append(example.tokens, np.int32(0))
    return replace(example, tokens=longer, chosen=np.append(example.chosen, end))


class RunningBatch:
    """A rollout batch from its first sequence to its last optimizer step."""

    def __init__(
        self, models: ModelSet, spec: TrainSpec, needs: BatchNeeds, *, steps: int, index: int, train_policy: bool = True
    ) -> None:
        """`steps`: of this batch; `index`: among all batches, from 0."""
        self._models = models
        self._old_log_probs = OldLogProbPass(models, bootstrap=spec.algorithm.bootstrap_truncated)
        self._spec, self._needs = spec, needs
        self._steps, self._index, self._train_policy = steps, index, train_policy
        self.seen: set[RolloutKey] = set()
        self._rollouts: list[Rollout] = []  # of a whole batch
        self._parts: list[list[Rollout]] = []  # steps still due, once the batch is cut
        self._completed = False
        self._pending = Pending()  # for backward
        self._unscored = Pending()  # of a whole batch, what still lacks old log-probs
        self._begin_step(StepSize())
        self._batch_metrics: dict[str, float] = {}

    def _begin_step(self, size: StepSize) -> None:
        self.size = size  # of the running step
        self.totals = StepTotals()
        self.staleness_sum = 0.0  # over its trainable tokens
        self._examples: list[Example] = []  # of the running step of a whole batch
        measures = self._index % self._spec.algorithm.entropy_interval == 0
        # The metrics of a batch are those of its last step.
        self._statistics = StepStatistics(entropy=measures and len(self._parts) <= 1)

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
        """Run full micro-batches, at least as many as a pass takes; or run all."""
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
        self.totals.count(own, assigned.costs(self._models.packing))

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
        spec = self._spec
        self._parts = partition(self._rollouts, self._steps, whole_groups=spec.whole_groups)
        if self._needs.old_log_probs and not self._needs.score_first_step:
            self._spare_first_step()
        self.work(everything=True)
        self._old_log_probs.fill_apart([example for rollout in self._rollouts for example in rollout.examples])
        if self._needs.advantages:
            self._batch_metrics = decide_advantages(self._rollouts, spec, self._needs, self._index)
        self._completed = True

    def _spare_first_step(self) -> None:
        """The pass that trains the first step finds its old log-probs. Those that are known already, since their
        sequences came early, are forgotten: no number hangs on when a sequence came."""
        first = [example for rollout in self._parts[0] for example in rollout.examples]
        for example in first:
            example.old_log_probs = example.current_log_probs = None
        own, waiting = {id(example) for example in first}, self._unscored.take_all()
        self._unscored.extend(example for example in waiting if id(example) not in own)
        if spared := [example for example in waiting if id(example) in own]:
            assigned = assign_all(spared, self._models.packing, self._models.dp_group.dp_size)
            self._old_log_probs.fill(assigned, replace(self._needs, old_log_probs=False))

    def _next_part(self) -> None:
        """Make the next part of the batch the running step, and establish its statistics."""
        spec = self._spec
        self._begin_step(sum((rollout.size for rollout in self._parts[0]), StepSize()))
        self._examples = [example for rollout in self._parts[0] for example in rollout.examples]
        self._take(self._examples)
        if self._needs.statistics == "none":
            return
        if self._needs.statistics == "current" and len(self._parts) < self._steps:  # a step has been made
            self._old_log_probs.refresh(self._examples)
        found = write_step_statistics(self._examples, spec.algorithm, spec.correction, spec.aggregation)
        self._statistics = replace(found, entropy=self._statistics.entropy)

    def decided_metrics(self, mean_denominator: float) -> dict[str, float]:
        """Metrics of the batch's advantages, for the running step."""
        if not self._needs.advantages:
            return {}
        return self._batch_metrics | logged_means(self._examples, mean_denominator)

    def finish_step(self) -> bool:
        """Leave the running step; whether the batch is finished."""
        self._parts = self._parts[1:]
        return not self._parts
