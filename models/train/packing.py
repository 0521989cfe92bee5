"""Variable-length sequences become rows of equal length, several short ones in one row where that saves work.

A model sees the rows with position ids that restart at 0 with every sequence; transformers' attention masks (eager,
sdpa) and FlashAttention 2 derive the block-diagonal causal mask from those restarts, so that no sequence attends to
another.

Invariants:
- every sequence lies whole in exactly one row of exactly one micro-batch;
- rows * row_length of a micro-batch is within the token budget, unless a single sequence alone exceeds it: that one
  travels alone, since leaving it out would bias training against long responses;
- a row of one sequence needs no position ids: padding stands at its right end, where causal attention cannot see it.

No torch here: plans and index arrays are NumPy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

# Row lengths tried, as multiples of the longest sequence, when the shortest choice leaves more than this unfilled.
_ROW_MULTIPLES: Final = (1.0, 1.5, 2.0, 3.0, 4.0)
_GOOD_FILL: Final = 0.95


@dataclass(frozen=True)
class Layout:
    """One micro-batch: which sequences lie in which row, from left to right."""

    rows: tuple[tuple[int, ...], ...]
    row_length: int

    @property
    def padded_tokens(self) -> int:
        return len(self.rows) * self.row_length

    @property
    def items(self) -> tuple[int, ...]:
        """Sequence indices in row order: the order of everything that is flattened from this layout."""
        return tuple(item for row in self.rows for item in row)


@dataclass(frozen=True)
class PackedRows:
    """Model input of one micro-batch of B rows of length L, and where its N chosen tokens are predicted."""

    input_ids: Int64Array  # [B, L]
    position_ids: Int64Array | None  # [B, L], None if no row holds more than one sequence
    source: Int64Array  # [N] flat position in [B * L] whose output predicts the chosen token
    targets: Int64Array  # [N] ids of the chosen tokens, by sequence in the order of `Layout.items`


def plan(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    pack: bool = True,
    single_row: bool = False,
    quadratic_tokens: int = 512,
) -> list[Layout]:
    """Micro-batches for sequences of the given `lengths` (inputs of the model, each at least 1).

    `pack=False` puts each sequence in a row of its own (models whose state would leak from one sequence into the next).
    `single_row` makes each micro-batch one row without padding (FlashAttention 2). `quadratic_tokens` is the row length
    at which attention costs as much as everything else; it decides between padding and longer rows.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if single_row:
        alone = [[item] for item in order if lengths[item] > max_tokens]
        within = order[len(alone) :]
        rows, _ = _fit(within, lengths, max_tokens, len(within), pack=True)
        return [_layout([row], lengths) for row in alone + rows]
    layouts = []
    while order:
        layout, order = _next_layout(order, lengths, max_tokens, pack=pack, quadratic_tokens=quadratic_tokens)
        layouts.append(layout)
    return layouts


def _next_layout(
    order: list[int], lengths: Sequence[int], max_tokens: int, *, pack: bool, quadratic_tokens: int
) -> tuple[Layout, list[int]]:
    """The cheapest micro-batch that starts with the longest remaining sequence, and what is left over."""
    longest = lengths[order[0]]
    best: tuple[float, Layout, list[int]] | None = None
    for multiple in _ROW_MULTIPLES if pack else (1.0,):
        row_length = int(longest * multiple)
        if best is not None and row_length > max_tokens:
            break
        rows, rest = _fit(order, lengths, row_length, max(max_tokens // row_length, 1), pack=pack)
        layout = _layout(rows, lengths)
        filled = sum(lengths[item] for item in layout.items)
        cost = layout.padded_tokens * (1.0 + layout.row_length / quadratic_tokens) / filled
        if best is None or cost < best[0]:
            best = (cost, layout, rest)
        if filled >= _GOOD_FILL * layout.padded_tokens:
            break  # longer rows could save 5 % at most
    assert best is not None
    return best[1], best[2]


def _fit(
    order: Sequence[int], lengths: Sequence[int], row_length: int, max_rows: int, *, pack: bool
) -> tuple[list[list[int]], list[int]]:
    """Best-fit decreasing: each sequence goes into the fullest row that still takes it, else into a new row."""
    if not pack:
        return [[item] for item in order[:max_rows]], list(order[max_rows:])
    rows: list[list[int]] = []
    rest: list[int] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row), ascending
    shortest = lengths[order[-1]] if order else 0
    for item in order:
        length = lengths[item]
        at = bisect_left(spaces, (length, -1))
        if at < len(spaces):
            space, row = spaces.pop(at)
            rows[row].append(item)
        elif len(rows) < max_rows:
            space, row = row_length, len(rows)
            rows.append([item])
        else:
            rest.append(item)
            continue
        if space - length >= shortest:
            insort(spaces, (space - length, row))
    return rows, rest


def _layout(rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> Layout:
    return Layout(
        rows=tuple(tuple(row) for row in rows),
        row_length=max(sum(lengths[item] for item in row) for row in rows),
    )


def pack_rows(
    layout: Layout, tokens: Sequence[npt.NDArray[np.int32]], chosen: Sequence[npt.NDArray[np.int64]]
) -> PackedRows:
    """Build the arrays of one micro-batch.

    `tokens[i]` [T_i]: all ids of sequence i; its last one is never an input. `chosen[i]`: indices into it (at least 1)
    of the tokens whose log-probs are wanted.
    """
    items, width = layout.items, layout.row_length
    inputs = [tokens[item][:-1] for item in items]
    sizes = np.fromiter((len(part) for part in inputs), dtype=np.int64, count=len(items))
    row_of = np.repeat(np.arange(len(layout.rows)), [len(row) for row in layout.rows])
    before = np.cumsum(sizes) - sizes  # tokens before each sequence, all rows
    used = np.bincount(row_of, weights=sizes, minlength=len(layout.rows)).astype(np.int64)
    row_start = np.cumsum(used) - used
    start = row_of * width + before - row_start[row_of]  # flat place of each sequence's first token

    running = np.arange(int(sizes.sum()), dtype=np.int64)
    place = running + np.repeat(start - before, sizes)
    input_ids = np.zeros(len(layout.rows) * width, dtype=np.int64)
    input_ids[place] = np.concatenate(inputs)
    position_ids = None
    if len(items) > len(layout.rows):
        columns = np.arange(width, dtype=np.int64)
        positions = (columns[None, :] - used[:, None]).reshape(-1)  # padding counts as one more sequence
        positions[place] = running - np.repeat(before, sizes)
        position_ids = positions.reshape(len(layout.rows), width)

    picks = [chosen[item] for item in items]
    counts = np.fromiter((len(part) for part in picks), dtype=np.int64, count=len(items))
    return PackedRows(
        input_ids=input_ids.reshape(len(layout.rows), width),
        position_ids=position_ids,
        source=np.concatenate(picks) - 1 + np.repeat(start, counts),
        targets=np.concatenate([tokens[item][pick] for item, pick in zip(items, picks, strict=True)]).astype(np.int64),
    )
