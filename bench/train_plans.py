"""Packing and dealing without a model: what is computed for a batch, and who waits for whom.

Each is compared with the plain way on the same batch; the cost is `Packing.cost`, tokens and attention together.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bench.report import Series
from models.train.step.micro_batches import balance
from models.train.step.packing import Layout, Packing, Unit, plan, units_of

Ids = npt.NDArray[np.int32]
OURS, PADDED, FIRST_COME = "packed, prompts shared", "padded", "packed first come"


def packings(tokens: Sequence[Ids], prompts: Sequence[int], packing: Packing) -> list[Series]:
    """Micro-batches of one batch by several ways, and what they cost; `padded` is the baseline."""
    apart = replace(packing, share_prompts=False)
    lengths = [len(ids) - 1 for ids in tokens]
    ways: dict[str, list[Layout]] = {
        PADDED: _padded(lengths, packing.max_tokens),
        "padded, sorted by length": _padded(sorted(lengths, reverse=True), packing.max_tokens),
        FIRST_COME: _first_come(lengths, packing.max_tokens),
        "packed": plan(tokens, prompts, apart),
        OURS: plan(tokens, prompts, packing),
    }
    longest = max(lengths)
    setting = (
        f"packing of {len(tokens):,} sequences of {min(lengths):,} to {longest:,} tokens, "
        f"{packing.max_tokens:,} tokens a micro-batch"
    )
    alone = sum(lengths)
    base = _cost(ways[PADDED], packing)
    out = []
    for name, layouts in ways.items():
        computed, used = sum(one.padded_tokens for one in layouts), sum(one.used_tokens for one in layouts)
        for what, unit, value in (
            ("padding_frac", "%", 100.0 * (1.0 - used / computed)),
            ("shared_prompt_frac", "%", 100.0 * (1.0 - used / alone)),
            ("micro-batches", "", float(len(layouts))),
            ("estimated cost", "% of padded", 100.0 * _cost(layouts, packing) / base),
        ):
            out.append(Series(setting, f"{name}: {what}", unit, [value]))
    return out


def _cost(layouts: Sequence[Layout], packing: Packing) -> float:
    return sum(len(one.rows) * packing.cost(one.row_length) for one in layouts)


def _padded(lengths: Sequence[int], budget: int) -> list[Layout]:
    """One sequence in a row, in the order in which they come, rows as long as the longest."""
    layouts: list[Layout] = []
    rows: list[tuple[Unit, ...]] = []
    widest = 0
    for item, length in enumerate(lengths):
        if rows and (len(rows) + 1) * max(widest, length) > budget:
            layouts.append(Layout(tuple(rows), widest))
            rows, widest = [], 0
        rows.append((Unit((item,), 0, length),))
        widest = max(widest, length)
    return [*layouts, Layout(tuple(rows), widest)]


def _first_come(lengths: Sequence[int], budget: int) -> list[Layout]:
    """Rows of one length for all, as long as the longest sequence; the next sequence goes where the last one went."""
    width = max(lengths)
    filled: list[list[Unit]] = [[]]
    for item, length in enumerate(lengths):
        if sum(unit.length for unit in filled[-1]) + length > width:
            filled.append([])
        filled[-1].append(Unit((item,), 0, length))
    rows = [tuple(row) for row in filled]
    together = max(1, budget // width)
    return [Layout(tuple(rows[at : at + together]), width) for at in range(0, len(rows), together)]


def dealings(tokens: Sequence[Ids], prompts: Sequence[int], packing: Packing, shares: Sequence[int]) -> list[Series]:
    """Costliest share of the mean share, by estimated FLOPs. A step waits for the costliest."""
    units = units_of(tokens, prompts, packing)
    out = []
    for count in shares:
        setting = f"costliest share of {len(tokens):,} sequences"
        ways = {
            "by number": _loads_by(units, count, packing, lambda unit: len(unit.members)),
            "by tokens": _loads_by(units, count, packing, lambda unit: unit.length),
            "by estimated FLOPs": _loads_of(balance(tokens, prompts, packing, count), units, packing),
        }
        for name, loads in ways.items():
            out.append(
                Series(setting, f"{count} shares: {name}", "% of mean", [100.0 * max(loads) / (sum(loads) / count)])
            )
    return out


def _loads_by(units: Sequence[Unit], count: int, packing: Packing, size: Callable[[Unit], float]) -> list[float]:
    """Costs of the shares, when each unit goes to the one who has least of what `size` counts; the largest first."""
    heap = [(0.0, share) for share in range(count)]
    loads = [0.0] * count
    for unit in sorted(units, key=lambda unit: (-size(unit), unit.members)):
        least, share = heapq.heappop(heap)
        loads[share] += packing.cost(unit.length)
        heapq.heappush(heap, (least + size(unit), share))
    return loads


def _loads_of(dealt: Sequence[Sequence[int]], units: Sequence[Unit], packing: Packing) -> list[float]:
    of_item = {unit.members[0]: packing.cost(unit.length) for unit in units}
    return [sum(of_item.get(item, 0.0) for item in share) for share in dealt]
