"""What models say of examples before the first backward pass of their batch: no gradient, done as sequences arrive.

Invariants: within a batch, everything here is of the weights of its start, but for `refresh`, which is of the weights
of a later step's start; each data-parallel rank computes its own, and the results are written into the examples of
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from models.train.dp_group import Float32Array
from models.train.model_set import ModelSet
from models.train.packing.micro_batches import MicroBatch, micro_batches
from models.train.step.batch_needs import BatchNeeds
from models.train.step.columns import token_counts
from models.train.step.examples import Example
from models.train.step.pending import Assigned, assign_all

Score = Callable[[Sequence[MicroBatch]], list[Float32Array]]
Write = Callable[[Example, Float32Array], None]


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
            self._score(assigned, models.log_probs, lambda example, found: _set_old(example, found, needs))
        if models.has_reference and not models.reference_apart:
            self._reference(assigned)
        if needs.values and models.critic is not None:
            self._values(assigned, models.critic.values)

    def fill_apart(self, examples: Sequence[Example]) -> None:
        """Fill in the log-probs of a reference that takes the policy's place; of the whole batch at one time."""
        if examples and self._models.has_reference and self._models.reference_apart:
            self._reference(self._assigned(examples))

    def _reference(self, assigned: Assigned) -> None:
        self._score(assigned, lambda own: self._models.log_probs(own, "reference"), _set("ref_log_probs"))

    def refresh(self, examples: Sequence[Example]) -> None:
        """Fill in `current_log_probs` under the weights as they are now."""
        if examples:
            self._score(self._assigned(examples), self._models.log_probs, _set("current_log_probs"))

    def _assigned(self, examples: Sequence[Example]) -> Assigned:
        return assign_all(examples, self._models.packing, self._models.dp_group.dp_size)

    def _score(self, assigned: Assigned, score: Score, write: Write) -> None:
        """Run one model over this process's micro-batches, and write what was found by all."""
        dp_group = self._models.dp_group
        found = score(micro_batches(assigned.by_dp_rank, assigned.examples, dp_group.dp_rank))
        own = found[: len(assigned.by_dp_rank[dp_group.dp_rank])]  # without the blank ones behind
        parts = dp_group.gather_by_dp_rank(np.concatenate([np.zeros(0, np.float32), *own]))
        for layouts, values in zip(assigned.by_dp_rank, parts, strict=True):
            members = [assigned.examples[item] for layout in layouts for item in layout.items]
            cuts = np.cumsum(token_counts(members))[:-1]
            for example, one in zip(members, np.split(values, cuts) if members else [], strict=True):
                write(example, one)

    def _values(self, assigned: Assigned, score: Score) -> None:
        """Values, and those behind the end of truncated sequences."""
        if not (self._bootstrap and any(example.truncated for example in assigned.examples)):
            self._score(assigned, score, _set("values"))
            return
        # The value behind the end is read at the last token, which is an input only if something follows it.
        examples = [
            assigned.examples[item] for layouts in assigned.by_dp_rank for layout in layouts for item in layout.items
        ]
        longer = [_continued(example) if example.truncated else replace(example) for example in examples]
        self._score(self._assigned(longer), score, _set("values"))
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


def _set(field: str) -> Write:
    def write(example: Example, values: Float32Array) -> None:
        setattr(example, field, values)

    return write


def _set_old(example: Example, values: Any, needs: BatchNeeds) -> None:
    example.current_log_probs = values
    if not needs.student_is_sampler:
        example.old_log_probs = values
