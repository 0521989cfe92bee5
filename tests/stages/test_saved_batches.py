"""Rollout batches on disk: what comes back, under which ids, and what may not be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stages.errors import SavedBatchError
from stages.train.saved_groups import SavedBatches, load_batch, save_batch
from tests.stages.stage_rig import make_config, make_sample, make_slice


def batches(template: str, **changes: Any) -> SavedBatches:
    settings = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 9, **changes}
    return SavedBatches(
        make_config(
            rollout=settings,
            asynchrony={"max_staleness": settings.pop("max_staleness", 1)},
            debug={"load_debug_rollout_data": template},
        )
    )


def test_a_batch_comes_back_in_the_order_of_its_groups_under_dense_ids(tmp_path: Path) -> None:
    template = str(tmp_path / "kept" / "{rollout_id:04d}.msgpack")
    saved = [make_slice(group, make_sample(0, reward=1.0, version=1), make_sample(1, reward=0.0)) for group in (9, 4)]
    save_batch(template, 2, saved)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["0002.msgpack"]
    assert [slice_.group.group_id for slice_ in load_batch(template, 2)] == [4, 9]
    source = batches(template, max_staleness=2)
    first, second = source.group(4), source.group(5)
    assert (first.group.group_id, second.group.group_id) == (4, 5)
    assert (first.group.prompt_index, second.group.prompt_index) == (4, 9), "the saved groups 4 and 9"
    for ours, theirs in zip(second.samples, saved[0].samples, strict=True):
        for name in ours.__struct_fields__:
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_batch_size": 3}, "holds 2 groups, but --rollout-batch-size is 3; set it to 2"),
        ({"n_samples_per_prompt": 4}, "groups of 2 rollouts, but --n-samples-per-prompt is 4; set it to 2"),
    ],
)
def test_another_shape_is_refused_with_the_right_one(tmp_path: Path, changes: dict[str, int], words: str) -> None:
    template = str(tmp_path / "{rollout_id}")
    save_batch(template, 0, [make_slice(0), make_slice(1)])
    with pytest.raises(SavedBatchError, match=words):
        batches(template, **changes).group(0)


def test_no_token_is_trained_that_is_too_old(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}")
    save_batch(template, 3, [make_slice(0), make_slice(1)])  # of version 0
    with pytest.raises(SavedBatchError, match=r"token of version 0, .* --max-staleness to at least 3"):
        batches(template, max_staleness=2).group(6)
    assert batches(template, max_staleness=3).group(6).group.group_id == 6


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"x" + b[1:], lambda b: b[:40], lambda b: b""])
def test_a_damaged_file_is_said_to_be_one(tmp_path: Path, damage: Any) -> None:
    template = str(tmp_path / "{rollout_id}")
    save_batch(template, 0, [make_slice(0)])
    file = tmp_path / "0"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SavedBatchError, match=f"{file} cannot be read as a batch"):
        load_batch(template, 0)
    with pytest.raises(SavedBatchError, match="cannot be read"):
        load_batch(template, 1)


def test_the_format_names_the_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a program with other messages is refused, not read as something else."""
    from stages.train import saved_groups

    class Other(msgspec.Struct):
        group: int

    template = str(tmp_path / "{rollout_id}")
    monkeypatch.setattr(saved_groups, "_FORMAT", saved_groups.fingerprint(Other))
    save_batch(template, 0, [make_slice(0)])
    monkeypatch.undo()
    with pytest.raises(SavedBatchError, match="its messages are others"):
        load_batch(template, 0)
