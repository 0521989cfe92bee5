"""The file of groups in a checkpoint: what comes back, and what is left to be generated again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from models.checkpoint import CheckpointError
from stages.messages import Extra, Float32Array, RolloutSlice, wire
from stages.train import saved_groups
from stages.train.saved_groups import BUFFER_FILE, read_groups, restorable, write_groups
from tests.stages.stage_rig import make_sample, make_slice
from transport.codec import Codec


def groups(*ids: int, n_samples: int = 2) -> list[RolloutSlice]:
    """Groups of which no two are equal, with every kind of field filled in."""
    return [
        make_slice(
            group_id,
            *(
                make_sample(
                    index,
                    runs=[(group_id, 3), (group_id + 1, index)],
                    mask=[1, 0, 1] + [1] * index,
                    reward=group_id / 7,
                    reward_parts={"form": 0.25},
                    teacher_log_probs=wire([-1.5] * (6 + index), Float32Array),
                    extras={"image": np.arange(group_id * 6, dtype="<u2").reshape(3, 2, -1).view(Extra)},
                )
                for index in range(n_samples)
            ),
            metadata='{"level": 3}',
        )
        for group_id in ids
    ]


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    written = groups(7, 2, 9)
    write_groups(tmp_path, written)
    assert restorable(tmp_path, 2) == {2, 7, 9}
    found = read_groups(tmp_path, {2, 7, 9})
    same = Codec(RolloutSlice).encode
    assert [same(lease.message) for lease in found] == [same(one) for one in written]
    assert all(isinstance(s.log_probs, Float32Array) for lease in found for s in lease.message.samples)
    for lease in found:
        lease.done()


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    write_groups(tmp_path, groups(7, 2, 9))
    assert [lease.message.group.group_id for lease in read_groups(tmp_path, {9, 7})] == [7, 9]


def test_groups_of_another_size_are_generated_again(tmp_path: Path) -> None:
    write_groups(tmp_path, [*groups(1), *groups(2, n_samples=4)])
    assert restorable(tmp_path, 2) == {1}
    assert restorable(tmp_path, 4) == {2}


def test_a_checkpoint_without_the_file_restores_nothing(tmp_path: Path) -> None:
    assert restorable(tmp_path, 2) == frozenset()


def test_groups_of_a_program_with_other_messages_are_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Before(msgspec.Struct):
        group: int
        samples: tuple[str, ...]

    with monkeypatch.context() as patch:
        patch.setattr(saved_groups, "_FORMAT", saved_groups.fingerprint(Before))
        write_groups(tmp_path, groups(1))
    assert restorable(tmp_path, 2) == frozenset()


def test_the_format_knows_the_fields_of_nested_messages() -> None:
    class Inside(msgspec.Struct):
        n: int

    class Inner(msgspec.Struct):
        n: float

    def around(kind: type[msgspec.Struct]) -> bytes:
        return saved_groups.fingerprint(msgspec.defstruct("Outside", [("parts", tuple[kind, ...])]))  # type: ignore[valid-type]

    assert around(Inside) != around(msgspec.defstruct("Inside", [("m", int)]))
    assert around(Inside) != around(Inner)


@pytest.mark.parametrize("size", [10, 40, 120])
def test_a_file_that_ends_too_early_is_an_error_and_never_a_shorter_list(tmp_path: Path, size: int) -> None:
    write_groups(tmp_path, groups(1, 2))
    with (tmp_path / BUFFER_FILE).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(CheckpointError, match=r"buffer\.msgpack .*; use another checkpoint"):
        read_groups(tmp_path, {1, 2})
