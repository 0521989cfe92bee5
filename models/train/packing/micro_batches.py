"""Sequences are assigned to data-parallel ranks, balanced by estimated FLOPs, and those of each rank are packed into
micro-batches.

Invariants:
- pure, and a function of its arguments alone: every process finds the same assignment;
- every sequence lies in exactly one micro-batch of one data-parallel rank;
- all data-parallel ranks have equally many micro-batches, some of them blank: collectives inside a model (sharded
  parameters, experts, pipelines) need every process to run as often as the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.train.packing.packing import Layout, Packing, plan, units_of
from models.train.packing.rows import PackedRows, pack_rows
from models.train.step.examples import Example

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class MicroBatch:
    """What goes through a model at one time."""

    rows: PackedRows
    layout: Layout
    members: tuple[Example, ...]  # in the order of the rows; none: it is blank, runs, and counts for nothing

    @property
    def blank(self) -> bool:
        return not self.members


def assign(tokens: Sequence[Ids], prompts: Sequence[int], packing: Packing, dp_size: int) -> list[list[Layout]]:
    """Micro-batches of each data-parallel rank for all of these sequences; their number may still differ."""
    if dp_size == 1:
        return [plan(tokens, prompts, packing)]
    assigned = []
    for items in balance(tokens, prompts, packing, dp_size):
        layouts = plan([tokens[item] for item in items], [prompts[item] for item in items], packing)
        assigned.append([layout.renumbered(items) for layout in layouts])
    return assigned


def balance(tokens: Sequence[Ids], prompts: Sequence[int], packing: Packing, dp_size: int) -> list[list[int]]:
    """Indices of the sequences of each data-parallel rank: longest processing time first (Graham 1969), or by number.

    Sequences that are computed together stay together. The cost is that of `Packing.cost`.
    """
    units = sorted(units_of(tokens, prompts, packing), key=lambda unit: (-unit.length, unit.members))
    loads = [(0.0, dp_rank) for dp_rank in range(dp_size)]
    assigned: list[list[int]] = [[] for _ in range(dp_size)]
    for unit in units:
        load, dp_rank = heapq.heappop(loads)
        assigned[dp_rank].extend(unit.members)
        cost = packing.cost(unit.length) if packing.balance else len(unit.members)
        heapq.heappush(loads, (load + cost, dp_rank))
    return assigned


def assign_layouts(layouts: Sequence[Layout], packing: Packing, dp_size: int) -> list[list[Layout]]:
    """Micro-batches that are there already, equally many to each rank, in turns and back from the costliest on."""
    ordered = sorted(layouts, key=lambda layout: -len(layout.rows) * packing.cost(layout.row_length))
    assigned: list[list[Layout]] = [[] for _ in range(dp_size)]
    for at, layout in enumerate(ordered):
        turn, place = divmod(at, dp_size)
        assigned[place if turn % 2 == 0 else dp_size - 1 - place].append(layout)
    return assigned


def micro_batches(assigned: Sequence[Sequence[Layout]], examples: Sequence[Example], dp_rank: int) -> list[MicroBatch]:
    """Those of one data-parallel rank, blank ones behind, as many as the one with most has."""
    arrays = (
        [example.tokens for example in examples],
        [example.chosen for example in examples],
        [example.temperature for example in examples],
    )
    own = [
        MicroBatch(pack_rows(layout, *arrays), layout, tuple(examples[item] for item in layout.items))
        for layout in assigned[dp_rank]
    ]
    missing = max(len(layouts) for layouts in assigned) - len(own)
    return own + [blank(examples)] * missing if missing else own


def blank(examples: Sequence[Example]) -> MicroBatch:
    """As little work as possible, on the ids of the shortest sequence."""
    shortest = min(examples, key=lambda example: (example.input_length, example.key))
    ids, at = shortest.tokens[:2], np.array([1], dtype=np.int64)
    (layout,) = plan([ids], [1], Packing(max_tokens=1))
    return MicroBatch(pack_rows(layout, [ids], [at]), layout, ())
