"""Sequences assigned to data-parallel ranks: all of them once, equally much work, equally many micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.train.huggingface.updates import gradient_scale
from models.train.step.examples import Example
from models.train.step.micro_batch_loss import StepTotals
from models.train.step.micro_batches import assign, assign_layouts, balance, micro_batches
from models.train.step.packing import Packing, plan

APART = Packing(max_tokens=64, share_prompts=False, quadratic_tokens=8)
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=25)


def ids_of(sizes: list[int]) -> list[np.ndarray]:
    return [np.full(size, at % 90, dtype=np.int32) for at, size in enumerate(sizes)]


@given(lengths, st.integers(2, 5))
def test_shares_differ_by_no_more_than_the_costliest_sequence(sizes: list[int], shares: int) -> None:
    assigned = balance(ids_of(sizes), [1] * len(sizes), APART, shares)
    assert sorted(item for share in assigned for item in share) == list(range(len(sizes)))
    loads = [sum(APART.cost(sizes[item] - 1) for item in share) for share in assigned]
    assert max(loads) - min(loads) <= max(APART.cost(size - 1) for size in sizes) + 1e-9


def test_one_long_sequence_weighs_as_much_as_many_short_ones() -> None:
    """By number, the long one would get as many beside it as the other rank has; it is assigned first."""
    sizes = [9] * 8 + [33]
    long, short = sorted(balance(ids_of(sizes), [1] * 9, APART, 2), key=lambda items: 8 not in items)
    assert (long, len(short)) == ([8], 8)
    by_number = balance(ids_of(sizes), [1] * 9, Packing(64, share_prompts=False, balance=False), 2)
    assert sorted(map(len, by_number)) == [4, 5]


@given(lengths, st.integers(2, 5))
@example([2, 3, 4, 5, 40], 2)  # from the cheapest on, one rank would get all of the costly ones
def test_micro_batches_that_are_there_are_assigned_equally(sizes: list[int], shares: int) -> None:
    layouts = [layout for ids in ids_of(sizes) for layout in plan([ids], [1], APART)]
    assigned = assign_layouts(layouts, APART, shares)
    assert sorted(map(id, layouts)) == sorted(id(layout) for share in assigned for layout in share)
    assert max(map(len, assigned)) - min(map(len, assigned)) <= 1
    loads = [sum(APART.cost(layout.row_length) for layout in share) for share in assigned]
    assert max(loads) - min(loads) <= max(APART.cost(size - 1) for size in sizes) + 1e-9


@given(lengths, st.integers(1, 5))
def test_all_shares_run_equally_often_and_blank_ones_count_for_nothing(sizes: list[int], shares: int) -> None:
    examples = [
        Example(ids, 1, np.array([len(ids) - 1]), np.zeros(1, np.float32), np.zeros(1, np.float32), 1.0, (0, at))
        for at, ids in enumerate(ids_of(sizes))
    ]
    assigned = assign([example.tokens for example in examples], [1] * len(examples), APART, shares)
    made = [micro_batches(assigned, examples, share) for share in range(shares)]
    assert len({len(batches) for batches in made}) == 1
    members = [example.key for batches in made for batch in batches for example in batch.members]
    assert sorted(members) == [example.key for example in examples]
    assert all(batch.rows.input_ids.size == 1 for batches in made for batch in batches if batch.blank)
    totals = StepTotals()
    for batches in made:
        totals.count(batches)
    assert totals.costs["micro_batches"] == sum(not batch.blank for batches in made for batch in batches)
    assert totals.costs["used_tokens"] == totals.costs["sequence_tokens"] == sum(size - 1 for size in sizes)


@pytest.mark.parametrize(
    ("norm", "denominator", "clip", "scale"), [(2.0, 4.0, 1.0, 0.125), (0.5, 4.0, 1.0, 0.25), (9.0, 2.0, 0.0, 0.5)]
)
def test_gradients_are_divided_and_clipped(norm: float, denominator: float, clip: float, scale: float) -> None:
    """By hand: a norm of 2 is halved to 1 beside the division; a bound of 0 is none."""
    assert gradient_scale(norm, denominator, clip) == scale


@given(lengths, st.integers(2, 8))
def test_rows_are_as_long_as_a_multiple_and_lose_nothing(sizes: list[int], multiple: int) -> None:
    """For what divides each row over processes."""
    layouts = plan(ids_of(sizes), [1] * len(sizes), replace(APART, row_multiple=multiple))
    assert all(layout.row_length % multiple == 0 for layout in layouts)
    assert sorted(item for layout in layouts for item in layout.items) == list(range(len(sizes)))
