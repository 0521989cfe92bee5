"""What models say of examples before the first backward pass of their batch: no gradient, done as sequences arrive.

Invariants: within a batch, everything here is of the weights of its start, but for `refresh`, which is of the weights
of a later step's start; each data-parallel rank computes its own, and the results are written into the examples of
all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from models.train.dp_group import Float32Array
from models.train.model_set import ModelSet
from models.train.spec import BatchNeeds
from models.train.step.examples import Example
from models.train.step.micro_batch_loss import token_counts
from models.train.step.micro_batches import MicroBatch, assign, assign_layouts, micro_batches
from models.train.step.packing import Layout, Packing, plan

# --------------------------------------------------------------------------------------------------
# Examples that wait for a full micro-batch.
#
# Invariants: what goes in comes out once; with `everything` unset, only micro-batches that nothing could be added to
# come out, `at_least` for every data-parallel rank; asking costs nothing until enough tokens have arrived to fill them.


@dataclass(frozen=True)
class Assigned:
    """Micro-batches by data-parallel rank. The layouts' items index `examples`."""

    by_dp_rank: list[list[Layout]]
    examples: list[Example]

    def __bool__(self) -> bool:
        return any(self.by_dp_rank)


def assign_all(examples: Sequence[Example], packing: Packing, dp_size: int) -> Assigned:
    """Micro-batches of all of these examples."""
    by_dp_rank = assign([one.tokens for one in examples], [one.prompt for one in examples], packing, dp_size)
    return Assigned(by_dp_rank, list(examples))


class Pending:
    """A queue of examples that empties itself by micro-batches."""

    def __init__(self) -> None:
        self._examples: list[Example] = []
        self._tokens = 0  # model inputs of the examples, each with its own prompt
        self._plan_at = 0  # tokens at which a micro-batch may be full; at first unknown

    def extend(self, examples: Iterable[Example]) -> None:
        """Add examples."""
        for example in examples:
            self._examples.append(example)
            self._tokens += example.input_length

    def take_all(self) -> list[Example]:
        """Remove and return all examples, without a plan."""
        examples, self._examples, self._tokens, self._plan_at = self._examples, [], 0, 0
        return examples

    def take(self, packing: Packing, dp_size: int, *, everything: bool, at_least: int = 1) -> Assigned:
        """Remove and return full micro-batches, `at_least` for each data-parallel rank, or all.

        Where that is more than one, as many stay behind, so that the last ones of a batch are not fewer either.
        """
        behind = at_least * dp_size if at_least > 1 else 0
        wanted = at_least * dp_size + behind
        due = max(self._plan_at, packing.max_tokens * wanted)
        if not self._examples or (not everything and self._tokens < due):
            return Assigned([[]] * dp_size, [])
        tokens = self._tokens
        examples = self.take_all()
        if everything:
            return assign_all(examples, packing, dp_size)
        layouts = plan([one.tokens for one in examples], [one.prompt for one in examples], packing)
        full = (len(layouts) - 1) // dp_size * dp_size
        full = full - behind if full >= wanted else 0
        rest = layouts[full:]
        self.extend(examples[item] for layout in rest for item in layout.items)
        if not full:  # common prompts left room: look again when as much as fits has come
            self._plan_at = tokens + packing.max_tokens * wanted - sum(layout.padded_tokens for layout in rest)
        return Assigned(assign_layouts(layouts[:full], packing, dp_size), examples)


def whole_groups(examples: Sequence[Example], packing: Packing, dp_size: int) -> Assigned:
    """Micro-batches that hold whole groups: as many as the token budget takes, one at least."""
    ordered = sorted(examples, key=lambda example: example.key)
    place = {id(example): at for at, example in enumerate(ordered)}
    layouts = [
        layout.renumbered([place[id(example)] for example in held]) for layout, held in _whole_groups(ordered, packing)
    ]
    return Assigned(assign_layouts(layouts, packing, dp_size), ordered)


def _whole_groups(ordered: Sequence[Example], packing: Packing) -> Iterator[tuple[Layout, list[Example]]]:
    held: list[Example] = []
    layout: Layout | None = None
    for _, members in itertools.groupby(ordered, key=lambda example: example.key[0]):
        group = list(members)
        wider = _one_layout(held + group, packing)
        if layout is not None and wider.padded_tokens > packing.max_tokens:
            yield layout, held
            held, wider = [], _one_layout(group, packing)
        held, layout = held + group, wider
    if layout is not None:
        yield layout, held


def _one_layout(examples: Sequence[Example], packing: Packing) -> Layout:
    """All examples in one micro-batch, whatever its size."""
    longest = max(example.input_length for example in examples)
    unbounded = replace(packing, max_tokens=8 * longest * len(examples), max_sequences=None)
    (layout,) = plan([example.tokens for example in examples], [example.prompt for example in examples], unbounded)
    return layout


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
