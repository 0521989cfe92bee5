"""Examples from sequences, the cut of a batch into steps, and the queue before the micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.algorithms.aggregation import StepSize
from models.train.step.examples import (
    Example,
    Intake,
    Rollout,
    partition,
    rollouts_of,
)
from models.train.step.micro_batches import Assigned, Pending
from models.train.step.packing import Packing


def example(index: int, length: int, prompt: int = 1) -> Example:
    tokens = np.full(length + 1, index, dtype=np.int32)
    values = np.zeros(1, dtype=np.float32)
    return Example(tokens, prompt, np.array([length]), values, values, coefficient=1.0)


def test_examples_hold_the_trainable_tokens_only(one) -> None:  # type: ignore[no-untyped-def]
    sequence = one(tokens=[9, 8, 1, 2, 3], mask=[1, 0, 1], rollout_log_probs=[-1, -2, -3], advantage=0.5)
    dark = one(tokens=[9, 8, 1], mask=[0])
    other = one(rollout=1, tokens=[9, 4, 5, 6, 7], mask=[1, 1, 1, 1])
    first, second = rollouts_of([sequence, other, dark], Intake("rollout_mean", 32))
    assert first.key == (0, 0)
    assert first.size == StepSize(rollouts=1, sequences=2, tokens=2)
    (only,) = first.examples
    assert only.chosen.tolist() == [2, 4]
    assert only.rollout_log_probs.tolist() == [-1, -3]
    assert only.prompt == 2
    assert only.coefficient == 0.5  # over the rollout, its masked sequence included
    assert second.examples[0].coefficient == 0.25
    assert first.size + second.size == StepSize(rollouts=2, sequences=3, tokens=6)


@given(st.integers(0, 20), st.integers(1, 6), st.randoms())
def test_partition_is_even_complete_and_blind_to_order(count: int, parts: int, random: object) -> None:
    rollouts = [Rollout(key=(i // 3, i), size=StepSize(1, 1, 1), examples=()) for i in range(count)]
    shuffled = list(rollouts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    cut = partition(shuffled, parts)
    assert len(cut) == parts
    assert [rollout for part in cut for rollout in part] == rollouts
    sizes = [len(part) for part in cut]
    assert max(sizes) - min(sizes) <= 1


def numbers(assigned: Assigned) -> list[int]:
    """The first ids of all sequences."""
    items = [item for layouts in assigned.by_dp_rank for layout in layouts for item in layout.items]
    return [int(assigned.examples[item].tokens[0]) for item in items]


@given(
    st.lists(st.lists(st.integers(1, 30), max_size=4), max_size=15),
    st.integers(1, 80),
    st.booleans(),
    st.integers(1, 3),
)
def test_what_goes_in_comes_out_once_and_early_ones_are_full(
    calls: list[list[int]], budget: int, share: bool, shares: int
) -> None:
    packing = Packing(max_tokens=budget, share_prompts=share)
    pending, out, number = Pending(), [], 0
    for call in calls:
        pending.extend(example(number + offset, length) for offset, length in enumerate(call))
        number += len(call)
        assigned = pending.take(packing, shares, everything=False)
        assert len({len(layouts) for layouts in assigned.by_dp_rank}) == 1
        assert all(
            one.padded_tokens <= budget or len(one.items) == 1 for layouts in assigned.by_dp_rank for one in layouts
        )
        out += numbers(assigned)
    out += numbers(pending.take(packing, shares, everything=True))
    assert sorted(out) == list(range(number))
    assert not pending.take(packing, shares, everything=True)


def test_nothing_comes_out_before_the_budget_is_full() -> None:
    pending, packing = Pending(), Packing(max_tokens=20)
    pending.extend([example(0, 9), example(1, 9)])
    assert not pending.take(packing, 1, everything=False)
    pending.extend([example(2, 9)])
    assert len(numbers(pending.take(packing, 1, everything=False))) == 2
    assert numbers(pending.take(packing, 1, everything=True)) == [2]


def test_two_shares_get_equally_many_full_micro_batches_or_none() -> None:
    pending, packing = Pending(), Packing(max_tokens=20)
    pending.extend([example(0, 9), example(1, 9), example(2, 9)])
    assert not pending.take(packing, 2, everything=False)
    pending.extend([example(3, 9), example(4, 9)])
    assigned = pending.take(packing, 2, everything=False)
    assert [len(layouts) for layouts in assigned.by_dp_rank] == [1, 1]
    assert sorted(numbers(assigned)) == [0, 1, 2, 3]


@pytest.mark.parametrize("mode", ["token_mean", "constant"])
def test_plain_sums_weigh_every_token_alike(one, mode: str) -> None:  # type: ignore[no-untyped-def]
    batch = [one(rollout=i, tokens=range(1, 4 + i), mask=[1] * (i + 1)) for i in range(3)]
    assert {e.coefficient for r in rollouts_of(batch, Intake(mode, 32)) for e in r.examples} == {1.0}  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 4), max_size=6), st.integers(1, 4))
def test_whole_groups_stay_in_one_step(sizes: list[int], parts: int) -> None:
    rollouts = [Rollout((g, r), StepSize(1, 1, 1), ()) for g, size in enumerate(sizes) for r in range(size)]
    cut = partition(rollouts, parts, whole_groups=True)
    assert [rollout.key for part in cut for rollout in part] == [rollout.key for rollout in rollouts]
    homes = [{rollout.key[0] for rollout in part} for part in cut]
    assert sum(map(len, homes)) == len(sizes)
    assert max(map(len, homes)) - min(map(len, homes)) <= 1
