"""Micro-batches: their arrays, their assignment to data-parallel ranks, and the queue of examples that fills them.

How sequences of one row are kept apart:
- one sequence in every row: nothing is needed, padding stands at the right end, where causal attention cannot see it;
- several units: position ids restart at 0; what a token attends to follows from the restarts;
- responses after a common prompt: `unit` and `branch` say which tokens a token attends to. Each response continues the
  positions of its prompt.

No torch here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from models.train.dp_group import Float32Array
from models.train.step.examples import Example
from models.train.step.packing import Layout, Packing, Unit, plan, units_of

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedRows:
    """Model input of one micro-batch of B rows of length L, with N chosen tokens."""

    input_ids: Int64Array  # [B, L]
    position_ids: Int64Array | None  # [B, L], None if every row is one sequence
    unit: Int64Array | None  # [B, L] number of the unit within the micro-batch, -1 = padding; None without branches
    branch: Int64Array | None  # [B, L] 0 = prompt, i = i-th response of the unit; None without branches
    source: Int64Array  # [N] flat position in [B * L] whose output predicts the chosen token
    targets: Int64Array  # [N] ids of the chosen tokens, by sequence in the order of `Layout.items`
    temperatures: Float32Array | None = None  # [N] by which their logits are divided, NaN: as configured; None: all so


class _Segment(NamedTuple):
    """A run of consecutive tokens of one sequence in one row."""

    ids: npt.NDArray[np.int32]
    place: int  # flat position of its first token
    position: int  # position id of its first token
    unit: int
    branch: int


def pack_rows(
    layout: Layout,
    tokens: Sequence[npt.NDArray[np.int32]],
    chosen: Sequence[npt.NDArray[np.int64]],
    temperatures: Sequence[float | None] = (),
) -> PackedRows:
    """Build the arrays of one micro-batch.

    `tokens[i]` [T_i]: all ids of sequence i; its last one is never an input. `chosen[i]`: ascending indices into it, at
    least 1 and, in a shared unit, at least the prompt's length, of the tokens whose log-probs are wanted.
    `temperatures[i]`: by which the logits of sequence i are divided, None: as configured, as all are without any.
    """
    segments, sources = _segments(layout, tokens, chosen)
    width, size = layout.row_length, layout.padded_tokens
    lengths = np.fromiter((len(segment.ids) for segment in segments), dtype=np.int64, count=len(segments))
    within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    columns = np.array([segment[1:] for segment in segments], dtype=np.int64).reshape(-1, 4)
    starts, first_positions, units, branches = np.repeat(columns, lengths, axis=0).T
    place = within + starts
    input_ids = np.zeros(size, dtype=np.int64)
    input_ids[place] = np.concatenate([segment.ids for segment in segments])

    shape = (len(layout.rows), width)
    position_ids: Int64Array | None = None
    unit: Int64Array | None = None
    branch: Int64Array | None = None
    if any(len(row) > 1 or len(row[0].members) > 1 for row in layout.rows):
        used = np.array([sum(member.length for member in row) for row in layout.rows], dtype=np.int64)
        # Padding counts as one more sequence, whose positions begin at 0.
        positions = (np.arange(width, dtype=np.int64)[None, :] - used[:, None]).reshape(-1)
        positions[place] = within + first_positions
        position_ids = positions.reshape(shape)
    if any(len(member.members) > 1 for row in layout.rows for member in row):
        flat_unit, flat_branch = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
        flat_unit[place], flat_branch[place] = units, branches
        unit, branch = flat_unit.reshape(shape), flat_branch.reshape(shape)
    drawn_at: Float32Array | None = None
    if any(temperatures):
        own = [temperatures[item] or math.nan for item in layout.items]
        drawn_at = np.repeat(np.array(own, dtype=np.float32), [len(chosen[item]) for item in layout.items])
    return PackedRows(
        input_ids=input_ids.reshape(shape),
        position_ids=position_ids,
        unit=unit,
        branch=branch,
        source=np.concatenate(sources),
        targets=np.concatenate([tokens[item][chosen[item]] for item in layout.items]).astype(np.int64),
        temperatures=drawn_at,
    )


def lengthened(rows: PackedRows, multiple: int) -> PackedRows:
    """The same rows, with padding at their ends until their length is a multiple of `multiple`."""
    height, length = rows.input_ids.shape
    missing = -length % multiple
    if not missing:
        return rows
    behind, positions = ((0, 0), (0, missing)), rows.position_ids
    if positions is not None:  # what is added is a sequence of its own, whose positions begin at 0
        positions = np.hstack([positions, np.tile(np.arange(missing, dtype=np.int64), (height, 1))])
    return replace(
        rows,
        input_ids=np.pad(rows.input_ids, behind),
        position_ids=positions,
        unit=None if rows.unit is None else np.pad(rows.unit, behind, constant_values=-1),
        branch=None if rows.branch is None else np.pad(rows.branch, behind),
        source=rows.source // length * missing + rows.source,
    )


def _segments(
    layout: Layout, tokens: Sequence[npt.NDArray[np.int32]], chosen: Sequence[npt.NDArray[np.int64]]
) -> tuple[list[_Segment], list[Int64Array]]:
    """Segments of all rows, and the flat positions that predict the chosen tokens of each sequence."""
    segments: list[_Segment] = []
    sources: list[Int64Array] = []
    number = 0
    for row, units in enumerate(layout.rows):
        place = row * layout.row_length
        for unit in units:
            prompt = unit.prompt
            end_of_prompt = place + prompt - 1
            if prompt:
                segments.append(_Segment(tokens[unit.members[0]][:prompt], place, 0, number, 0))
                place += prompt
            for branch, item in enumerate(unit.members, start=1):
                ids = tokens[item][prompt:-1]
                segments.append(_Segment(ids, place, prompt, number, branch if prompt else 0))
                source = chosen[item] + (place - prompt - 1)
                if prompt:
                    # The first response token is predicted at the prompt's end, wherever the response stands.
                    source[chosen[item] == prompt] = end_of_prompt
                sources.append(source)
                place += len(ids)
            number += 1
    return segments, sources


# --------------------------------------------------------------------------------------------------
# Sequences are assigned to data-parallel ranks, balanced by estimated FLOPs, and those of each rank are packed into
# micro-batches.
#
# Invariants:
# - pure, and a function of its arguments alone: every process finds the same assignment;
# - every sequence lies in exactly one micro-batch of one data-parallel rank;
# - all data-parallel ranks have equally many micro-batches, some of them blank: collectives inside a model (sharded
#   parameters, experts, pipelines) need every process to run as often as the others.


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
        layouts.sort(key=lambda layout: -_cost(layout, packing))  # ranks that meet in each pass then wait least
        assigned.append([layout.renumbered(items) for layout in layouts])
    return assigned


def _cost(layout: Layout, packing: Packing) -> float:
    return len(layout.rows) * packing.cost(layout.row_length)


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
    ordered = sorted(layouts, key=lambda layout: -_cost(layout, packing))
    assigned: list[list[Layout]] = [[] for _ in range(dp_size)]
    for at, layout in enumerate(ordered):
        turn, place = divmod(at, dp_size)
        assigned[place if turn % 2 == 0 else dp_size - 1 - place].append(layout)
    return assigned


def micro_batches(assigned: Sequence[Sequence[Layout]], examples: Sequence[Example], dp_rank: int) -> list[MicroBatch]:
    """Those of one data-parallel rank, blank ones behind, as many as the one with most has."""
    tokens, chosen = [example.tokens for example in examples], [example.chosen for example in examples]
    temperatures = [example.temperature for example in examples]
    own = []
    for layout in assigned[dp_rank]:
        rows = pack_rows(layout, tokens, chosen, temperatures)
        own.append(MicroBatch(rows, layout, tuple(examples[item] for item in layout.items)))
    missing = max(len(layouts) for layouts in assigned) - len(own)
    return own + [blank()] * missing if missing else own


def blank() -> MicroBatch:
    """As little work as possible: one token, of an id that every vocabulary has."""
    ids, at = np.zeros(2, dtype=np.int32), np.array([1], dtype=np.int64)
    layout = Layout(((Unit((0,), 0, 1),),), 1)
    return MicroBatch(pack_rows(layout, [ids], [at]), layout, ())


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

    def costs(self, packing: Packing) -> list[float]:
        """Of each data-parallel rank."""
        return [sum(_cost(layout, packing) for layout in layouts) for layouts in self.by_dp_rank]

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
    layouts = [layout.renumbered([place[id(one)] for one in held]) for layout, held in _whole_groups(ordered, packing)]
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
