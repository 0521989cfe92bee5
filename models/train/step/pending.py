"""Examples that wait for a full micro-batch.

Invariants: what goes in comes out once; with `everything` unset, only micro-batches that nothing could be added to come
out, `at_least` for every data-parallel rank; asking costs nothing until enough tokens have arrived to fill them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from models.train.packing.micro_batches import assign, assign_layouts
from models.train.packing.packing import Layout, Packing, plan
from models.train.step.examples import Example


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
