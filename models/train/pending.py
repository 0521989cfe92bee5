"""Examples that wait for a full micro-batch.

Invariants: what goes in comes out once; with `everything` unset, only micro-batches that nothing could be added to come
out; asking costs nothing until enough tokens have arrived to fill one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
