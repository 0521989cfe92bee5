"""Packing plans and arrays: every token exactly once, the budget kept, work saved where it can be."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from models.train.step.micro_batches import attention_allowed, pack_rows
from models.train.step.packing import Layout, Packing, Unit, plan, units_of

packings = st.builds(
    Packing,
    max_tokens=st.integers(1, 200),
    pack=st.booleans(),
    share_prompts=st.booleans(),
    single_row=st.booleans(),
    quadratic_tokens=st.integers(10, 1000),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[npt.NDArray[np.int32]], list[int]]:
    """Sequences of ids with their prompt lengths; some share a prompt."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    tokens, prompts = [], []
    for _ in range(draw(st.integers(0, 6))):
        prompt = rng.integers(1, 1000, draw(st.integers(1, 12)))
        for _ in range(draw(st.integers(1, 5))):
            response = rng.integers(1, 1000, draw(st.integers(1, 12)))
            tokens.append(np.concatenate([prompt, response]).astype(np.int32))
            prompts.append(len(prompt))
    return tokens, prompts


def of_lengths(sizes: list[int], budget: int, **fields: object) -> list[Layout]:
    """A plan for sequences without common prompts, of `sizes` inputs each."""
    tokens = [np.full(size + 1, item, dtype=np.int32) for item, size in enumerate(sizes)]
    return plan(tokens, [1] * len(sizes), Packing(max_tokens=budget, **fields))  # type: ignore[arg-type]


@given(batches(), packings)
def test_every_sequence_once_and_the_budget_kept(
    batch: tuple[list[npt.NDArray[np.int32]], list[int]], packing: Packing
) -> None:
    tokens, prompts = batch
    layouts = plan(tokens, prompts, packing)
    assert sorted(item for layout in layouts for item in layout.items) == list(range(len(tokens)))
    for layout in layouts:
        assert all(sum(unit.length for unit in row) <= layout.row_length for row in layout.rows)
        alone = len(layout.items) == 1 and len(tokens[layout.items[0]]) - 1 > packing.max_tokens
        assert layout.padded_tokens <= packing.max_tokens or alone
        units = [unit for row in layout.rows for unit in row]
        if packing.single_row:
            assert len(layout.rows) == 1
            assert layout.padded_tokens == layout.used_tokens
        elif not packing.pack:
            assert all(len(row) == 1 for row in layout.rows)
        for unit in units:
            if len(unit.members) == 1:
                assert unit.prompt == 0
                assert unit.length == len(tokens[unit.members[0]]) - 1
            else:
                assert packing.share_prompts
                assert len({tokens[item][: unit.prompt].tobytes() for item in unit.members}) == 1
                assert unit.length == unit.prompt + sum(len(tokens[i]) - 1 - unit.prompt for i in unit.members)


@given(batches(), packings)
def test_arrays_show_each_sequence_its_own_past_and_nothing_else(
    batch: tuple[list[npt.NDArray[np.int32]], list[int]], packing: Packing
) -> None:
    tokens, prompts = batch
    rng = np.random.default_rng(0)
    chosen = [
        prompt + np.flatnonzero(rng.random(len(ids) - prompt) < 0.7)
        for ids, prompt in zip(tokens, prompts, strict=True)
    ]
    for layout in plan(tokens, prompts, packing):
        rows = pack_rows(layout, tokens, chosen)
        shape = (len(layout.rows), layout.row_length)
        assert rows.input_ids.shape == shape
        positions = np.tile(np.arange(shape[1]), (shape[0], 1)) if rows.position_ids is None else rows.position_ids
        if rows.unit is not None and rows.branch is not None:
            allowed = attention_allowed(rows.unit, rows.branch)[:, 0]
        else:  # what transformers derives from restarts
            number = np.cumsum(np.diff(positions, axis=1, prepend=positions[:, :1] - 1) != 1, axis=1)
            allowed = (number[:, :, None] == number[:, None, :]) & np.tril(np.ones((shape[1], shape[1]), bool))
        assert allowed.any(axis=-1).all()
        sources = iter(rows.source.tolist())
        for item in layout.items:
            for pick in chosen[item]:
                row, column = divmod(next(sources), shape[1])
                visible = np.flatnonzero(allowed[row, column])
                np.testing.assert_array_equal(rows.input_ids[row, visible], tokens[item][:pick])
                np.testing.assert_array_equal(positions[row, visible], np.arange(pick))
        np.testing.assert_array_equal(rows.targets, np.concatenate([tokens[i][chosen[i]] for i in layout.items]))


def test_uniform_sequences_get_a_row_each_without_padding() -> None:
    (layout,) = of_lengths([9] * 64, 16384)
    assert layout.row_length == 9
    assert len(layout.rows) == 64


def test_short_sequences_fill_up_the_rows_of_long_ones() -> None:
    (layout,) = of_lengths([100] + [10] * 30, 16384)
    assert layout.row_length == 100
    assert len(layout.rows) == 4


def test_uneven_sequences_leave_little_padding() -> None:
    sizes = np.random.default_rng(0).integers(6, 11, 256).tolist()
    assert sum(layout.padded_tokens for layout in of_lengths(sizes, 16384)) < 1.1 * sum(sizes)


def test_a_sequence_beyond_the_budget_travels_alone() -> None:
    layouts = of_lengths([5, 50, 5], 16)
    assert sorted(layout.items for layout in layouts) == [(0, 2), (1,)]


def test_a_prompt_is_computed_once_for_its_responses() -> None:
    prompt = np.arange(100, dtype=np.int32)
    tokens = [np.concatenate([prompt, [i, i, i]]).astype(np.int32) for i in range(8)]
    (unit,) = units_of(tokens, [100] * 8, Packing(max_tokens=4096))
    assert unit == Unit(tuple(range(8)), 100, 100 + 8 * 2)


def test_long_responses_are_not_joined_for_a_short_prompt() -> None:
    """A row of all of them would cost more attention than the prompt saves."""
    prompt = np.arange(10, dtype=np.int32)
    tokens = [np.concatenate([prompt, np.full(1000, i)]).astype(np.int32) for i in range(4)]
    units = units_of(tokens, [10] * 4, Packing(max_tokens=100_000, quadratic_tokens=512))
    assert [unit.members for unit in units] == [(0,), (1,), (2,), (3,)]


def test_plain_rows_need_neither_positions_nor_masks() -> None:
    tokens = [np.arange(n, dtype=np.int32) for n in (4, 6)]
    layout = Layout(((Unit((0,), 0, 3),), (Unit((1,), 0, 5),)), 5)
    rows = pack_rows(layout, tokens, [np.array([1, 3]), np.array([5])])
    assert rows.position_ids is None
    assert rows.unit is None
    assert rows.source.tolist() == [0, 2, 9]


def test_nothing_to_pack() -> None:
    for pack, single in itertools.product((True, False), repeat=2):
        assert of_lengths([], 10, pack=pack, single_row=single) == []


def test_a_reference_can_only_forbid() -> None:
    free, bound = Packing(max_tokens=9, quadratic_tokens=7), Packing(max_tokens=1, share_prompts=False)
    assert free.both(bound) == Packing(max_tokens=9, quadratic_tokens=7, share_prompts=False)
    assert free.both(Packing(max_tokens=1, pack=False)).pack is False
    assert free.both(free) == free
