"""Examples that wait for a full micro-batch.

Invariants: what goes in comes out once; with `everything` unset, only micro-batches that nothing could be added to come
out; asking costs nothing until enough tokens have arrived to fill one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from models.train.batch import Example
from models.train.packing import Layout, Packing, plan


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

    def take(self, packing: Packing, *, everything: bool) -> Iterator[tuple[Layout, list[Example]]]:
        """Remove and yield full micro-batches (or all); the layout's items index the list that comes with it."""
        if not self._examples or (not everything and self._tokens < max(self._plan_at, packing.max_tokens)):
            return
        examples, tokens = self._examples, self._tokens
        layouts = plan([example.tokens for example in examples], [example.prompt for example in examples], packing)
        last = None if everything else layouts.pop()
        self._examples, self._tokens, self._plan_at = [], 0, 0
        if last is not None:
            self.extend(examples[item] for item in last.items)
            if not layouts:  # common prompts left room: look again when as much as fits has come
                self._plan_at = tokens + packing.max_tokens - last.padded_tokens
        for layout in layouts:
            yield layout, examples


def whole_groups(examples: Sequence[Example], packing: Packing) -> Iterator[tuple[Layout, list[Example]]]:
    """Micro-batches that hold whole groups: as many as the token budget takes, one at least."""
    ordered = sorted(examples, key=lambda example: example.key)
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
    unbounded = replace(packing, max_tokens=8 * longest * len(examples))
    (layout,) = plan([example.tokens for example in examples], [example.prompt for example in examples], unbounded)
    return layout
