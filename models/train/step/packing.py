"""Variable-length sequences become rows of equal length, with as few tokens as possible.

Two savings, both exact:
- sequences with the same prompt form a *unit*: the prompt is computed once, each response sees it and itself;
- several short units share a row, where longer rows cost less than padding.

Invariants:
- every sequence lies whole in exactly one unit, every unit in exactly one row of exactly one micro-batch;
- rows * row_length of a micro-batch is within the token budget, unless a single sequence exceeds it: this sequence
  travels alone, since leaving it out would bias training against long responses.

No torch here; `micro_batches.py` makes the arrays.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from configs.schema.train import ParallelConfig, TrainConfig

# Row lengths tried, as multiples of the longest unit, when the shortest choice leaves more than this unfilled.
_ROW_MULTIPLES: Final = (1.0, 1.5, 2.0, 3.0, 4.0)
_GOOD_FILL: Final = 0.95


@dataclass(frozen=True)
class Packing:
    """What the model allows, and what it costs."""

    max_tokens: int  # budget of a micro-batch, padding included
    pack: bool = True  # several units in one row: wrong for recurrent layers
    share_prompts: bool = True  # several responses after one prompt: needs a free choice of the attention mask
    single_row: bool = False  # one row without padding (FlashAttention 2)
    quadratic_tokens: int = 512  # row length at which attention costs as much as everything else
    max_sequences: int | None = None  # of a micro-batch, instead of the budget
    row_multiple: int = 1  # row lengths are rounded up to multiples of it
    balance: bool = True  # by cost, where there are several data-parallel ranks; else by number

    def cost(self, length: int) -> float:
        """Relative cost of a row of `length` tokens."""
        return length * (1.0 + length / self.quadratic_tokens)

    def both(self, other: Packing) -> Packing:
        """What two models that see the same rows allow together."""
        return replace(
            self,
            pack=self.pack and other.pack,
            share_prompts=self.share_prompts and other.share_prompts,
            single_row=self.single_row or other.single_row,
            row_multiple=math.lcm(self.row_multiple, other.row_multiple),
        )


def with_budget(packing: Packing, train: TrainConfig, parallel: ParallelConfig) -> Packing:
    """What the models allow, with what the configuration asks for."""
    return replace(
        packing,
        max_tokens=train.max_tokens_per_gpu,
        max_sequences=None if parallel.use_dynamic_batch_size else parallel.micro_batch_size,
        balance=parallel.balance_data,
    )


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences that are computed together: one alone, or several after their common prompt."""

    members: tuple[int, ...]
    prompt: int  # tokens of the common prompt; 0 if the sequence is alone
    length: int  # model inputs


@dataclass(frozen=True)
class Layout:
    """One micro-batch: which units lie in which row, from left to right."""

    rows: tuple[tuple[Unit, ...], ...]
    row_length: int

    @property
    def padded_tokens(self) -> int:
        return len(self.rows) * self.row_length

    @property
    def used_tokens(self) -> int:
        return sum(unit.length for row in self.rows for unit in row)

    @property
    def items(self) -> tuple[int, ...]:
        """Sequence indices in row order: the order of everything that is flattened from this layout."""
        return tuple(item for row in self.rows for unit in row for item in unit.members)

    def renumbered(self, items: Sequence[int]) -> Layout:
        """The same layout with `items[i]` in place of sequence i."""
        rows = tuple(
            tuple(replace(unit, members=tuple(items[member] for member in unit.members)) for unit in row)
            for row in self.rows
        )
        return replace(self, rows=rows)


def plan(tokens: Sequence[npt.NDArray[np.int32]], prompts: Sequence[int], packing: Packing) -> list[Layout]:
    """Micro-batches for sequences of ids (each at least 2 long; the last id is never an input).

    `prompts[i]`: how many ids of sequence i are its prompt (at least 1, fewer than all).
    """
    multiple = packing.row_multiple
    return [
        replace(layout, row_length=-(-layout.row_length // multiple) * multiple)
        for layout in _plan(tokens, prompts, packing)
    ]


def _plan(tokens: Sequence[npt.NDArray[np.int32]], prompts: Sequence[int], packing: Packing) -> list[Layout]:
    units = units_of(tokens, prompts, packing)
    units.sort(key=lambda unit: (-unit.length, unit.members))
    if packing.max_sequences is not None:
        starts = range(0, len(units), packing.max_sequences)
        return [_layout([[unit] for unit in units[at : at + packing.max_sequences]]) for at in starts]
    if packing.single_row:
        alone = [[unit] for unit in units if unit.length > packing.max_tokens]
        within = units[len(alone) :]
        rows, _ = _fit(within, packing.max_tokens, len(within), pack=True)
        return [_layout([row]) for row in alone + rows]
    layouts = []
    while units:
        layout, units = _next_layout(units, packing)
        layouts.append(layout)
    return layouts


def units_of(tokens: Sequence[npt.NDArray[np.int32]], prompts: Sequence[int], packing: Packing) -> list[Unit]:
    """Group sequences by prompt, as far as computing it once outweighs the longer row."""
    if not packing.share_prompts or not packing.pack or packing.single_row or packing.max_sequences is not None:
        return [Unit((item,), 0, len(ids) - 1) for item, ids in enumerate(tokens)]
    by_prompt: dict[bytes, list[int]] = {}
    for item, (ids, prompt) in enumerate(zip(tokens, prompts, strict=True)):
        by_prompt.setdefault(ids[:prompt].tobytes(), []).append(item)
    units = []
    for family in by_prompt.values():
        prompt = prompts[family[0]]
        members: list[int] = []
        length = prompt
        for item in family:
            response = len(tokens[item]) - 1 - prompt
            together, apart = length + response, prompt + response
            if members and (
                together > packing.max_tokens or packing.cost(together) > packing.cost(length) + packing.cost(apart)
            ):
                units.append(_unit(members, prompt, length))
                members, length = [], prompt
            members.append(item)
            length += response
        units.append(_unit(members, prompt, length))
    return units


def _unit(members: Sequence[int], prompt: int, length: int) -> Unit:
    return Unit(tuple(members), prompt if len(members) > 1 else 0, length)


def _next_layout(units: list[Unit], packing: Packing) -> tuple[Layout, list[Unit]]:
    """The cheapest micro-batch that starts with the longest remaining unit, and what is left over."""
    longest = units[0].length
    best: tuple[float, Layout, list[Unit]] | None = None
    for multiple in _ROW_MULTIPLES if packing.pack else (1.0,):
        row_length = int(longest * multiple)
        if best is not None and row_length > packing.max_tokens:
            break
        rows, rest = _fit(units, row_length, max(packing.max_tokens // row_length, 1), pack=packing.pack)
        layout = _layout(rows)
        used = layout.used_tokens
        cost = len(layout.rows) * packing.cost(layout.row_length) / used
        if best is None or cost < best[0]:
            best = (cost, layout, rest)
        if used >= _GOOD_FILL * layout.padded_tokens:
            break  # longer rows could save 5 % at most
    assert best is not None
    return best[1], best[2]


def _fit(units: Sequence[Unit], row_length: int, max_rows: int, *, pack: bool) -> tuple[list[list[Unit]], list[Unit]]:
    """Best-fit decreasing: each unit goes into the fullest row that still takes it, else into a new row."""
    if not pack:
        return [[unit] for unit in units[:max_rows]], list(units[max_rows:])
    rows: list[list[Unit]] = []
    rest: list[Unit] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row), ascending
    shortest = units[-1].length if units else 0
    for unit in units:
        at = bisect_left(spaces, (unit.length, -1))
        if at < len(spaces):
            space, row = spaces.pop(at)
            rows[row].append(unit)
        elif len(rows) < max_rows:
            space, row = row_length, len(rows)
            rows.append([unit])
        else:
            rest.append(unit)
            continue
        if space - unit.length >= shortest:
            insort(spaces, (space - unit.length, row))
    return rows, rest


def _layout(rows: Sequence[Sequence[Unit]]) -> Layout:
    return Layout(rows=tuple(map(tuple, rows)), row_length=max(sum(unit.length for unit in row) for row in rows))
