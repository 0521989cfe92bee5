"""Rows as the processes of a Megatron layout take them: masks, padding, ends of flat rows, parts of a context."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.train.megatron.inputs import RowForm, context_columns, hidden_mask, lengthened, model_inputs
from models.train.step.micro_batches import PackedRows, attention_allowed, pack_rows
from models.train.step.packing import Layout, Unit

CPU = torch.device("cpu")


def rows_of(*units: Unit, length: int, tokens: list[list[int]], first: int) -> PackedRows:
    """One row."""
    ids = [np.array(one, dtype=np.int32) for one in tokens]
    chosen = [np.arange(first, len(one), dtype=np.int64) for one in ids]
    return pack_rows(Layout((tuple(units),), length), ids, chosen)


def shared() -> PackedRows:
    """Two responses after a common prompt of 2, and padding."""
    return rows_of(Unit((0, 1), 2, 5), length=7, tokens=[[5, 6, 7, 8], [5, 6, 9, 10, 11]], first=2)


def apart() -> PackedRows:
    """Two sequences in one row."""
    return rows_of(Unit((0,), 0, 3), Unit((1,), 0, 4), length=7, tokens=[[1, 2, 3, 4], [5, 6, 7, 8, 9]], first=1)


def single() -> PackedRows:
    return rows_of(Unit((0,), 0, 7), length=7, tokens=[[1, 2, 3, 4, 5, 6, 7, 8]], first=1)


def test_responses_after_a_common_prompt_do_not_see_each_other() -> None:
    rows = shared()
    assert rows.unit is not None
    assert rows.branch is not None
    mask = hidden_mask(rows, CPU)
    assert mask is not None
    assert torch.equal(~mask, torch.from_numpy(attention_allowed(rows.unit, rows.branch)))


def test_sequences_of_one_row_do_not_see_each_other() -> None:
    mask = hidden_mask(apart(), CPU)
    assert mask is not None
    expected = torch.zeros(7, 7, dtype=torch.bool)
    expected[:3, :3] = torch.ones(3, 3).tril().bool()
    expected[3:, 3:] = torch.ones(4, 4).tril().bool()
    assert torch.equal(~mask[0, 0], expected)


def test_one_sequence_in_a_row_needs_no_mask() -> None:
    inputs = model_inputs(single(), RowForm(CPU))
    assert inputs.mask is None
    assert inputs.position_ids is None
    assert inputs.kept is None


@pytest.mark.parametrize("rows", [shared(), apart(), single()])
def test_longer_rows_predict_the_same_tokens(rows: PackedRows) -> None:
    longer = lengthened(rows, 4)
    assert longer.input_ids.shape == (1, 8)
    assert longer.input_ids.reshape(-1)[longer.source].tolist() == rows.input_ids.reshape(-1)[rows.source].tolist()
    mask, before = hidden_mask(longer, CPU), hidden_mask(rows, CPU)
    if before is not None:
        assert mask is not None
        assert torch.equal(mask[:, :, :7, :7], before)
        assert bool(mask[0, 0, :7, 7].all())  # nothing looks at what was added
        assert not bool(mask[0, 0].all(dim=1).any())  # and no row of the mask is empty
    assert lengthened(rows, 7) is rows


def test_longer_rows_of_several_keep_their_places() -> None:
    rows = pack_rows(
        Layout(((Unit((0,), 0, 3),), (Unit((1,), 0, 3),)), 3),
        [np.array([1, 2, 3, 4], dtype=np.int32), np.array([5, 6, 7, 8], dtype=np.int32)],
        [np.array([2]), np.array([3])],
    )
    inputs = model_inputs(rows, RowForm(CPU, multiple=4))
    by_position = inputs.input_ids.t().reshape(-1)  # as hidden states lie: position first
    assert by_position[inputs.places].tolist() == [2, 7]
    assert inputs.targets.tolist() == [3, 8]


def test_a_flat_row_says_where_its_sequences_end() -> None:
    inputs = model_inputs(apart(), RowForm(CPU, multiple=4, flat=True))
    assert inputs.ends is not None
    assert inputs.ends.tolist() == [0, 3, 7, 8]  # the last is padding
    assert inputs.longest == 4
    assert inputs.mask is None
    assert inputs.position_ids is None


@pytest.mark.parametrize("size", [2, 4])
def test_each_context_process_computes_a_head_and_a_tail(size: int) -> None:
    parts = [context_columns(16, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(16))
    sums = [int(part.sum()) for part in parts]  # of what is seen: balanced
    assert len(set(sums)) == 1


def test_context_processes_share_the_chosen_tokens() -> None:
    rows = rows_of(Unit((0,), 0, 6), length=6, tokens=[[1, 2, 3, 4, 5, 6, 7]], first=3)
    seen: list[int] = []
    for rank in range(2):
        inputs = model_inputs(rows, RowForm(CPU, multiple=4, context_rank=rank, context_size=2))
        assert inputs.input_ids.shape == (1, 4)
        assert inputs.kept is not None
        assert inputs.position_ids is not None
        at = inputs.input_ids.t().reshape(-1)[inputs.places]
        assert (at + 1).tolist() == inputs.own_targets.tolist()  # each id is followed by the next
        assert (inputs.input_ids[0, inputs.places] - 1).tolist() == inputs.position_ids[0, inputs.places].tolist()
        seen += inputs.kept.tolist()
    assert sorted(seen) == list(range(4))
