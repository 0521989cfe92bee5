"""The journal's audit is the oracle of every fault test, so it has tests of its own: it must see what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.record.journal import (
    Admitted,
    Audit,
    Committed,
    Ended,
    Event,
    Journal,
    RolledBack,
    Stepped,
    audit,
    read_journal,
)


def audited(tmp_path: Path, *events: Event) -> Audit:
    with Journal(tmp_path / "ledger.jsonl") as journal:
        journal.write(*events)
    return audit(tmp_path / "ledger.jsonl")


def admitted(*groups: int) -> list[Event]:
    return [Admitted(group, group) for group in groups]


def trained(step: int, *groups: int) -> list[Event]:
    return [*(Ended(group, "trained", step) for group in groups), Stepped(step, f"hash {step}", oldest=step % 2)]


def test_plain_run(tmp_path: Path) -> None:
    books = audited(tmp_path, *admitted(0, 1, 2, 3), *trained(1, 0, 2), Ended(1, "filtered", 1))
    assert books == Audit(4, {"trained": 2, "filtered": 1}, 1, {0: 1, 2: 1}, (), {1: "hash 1"}, 1)


def test_the_first_terminal_state_counts_and_a_second_training_is_reported(tmp_path: Path) -> None:
    books = audited(tmp_path, *admitted(0, 1), *trained(1, 0), Ended(0, "surplus", 1), *trained(2, 0, 1))
    assert books.outcomes == {"trained": 2}
    assert books.trained == {0: 1, 1: 2}
    assert books.twice == (0,)


def test_what_later_steps_trained_is_open_after_a_rollback(tmp_path: Path) -> None:
    before = [*admitted(0, 1, 2), *trained(1, 0), Committed(1), *trained(2, 1), *admitted(3)]
    books = audited(tmp_path, *before, RolledBack(1, 2, next_group=3, reopened=(1, 2)))
    assert (books.admitted, books.open, books.trained, books.batches) == (3, 2, {0: 1}, {1: "hash 1"})
    after = audited(tmp_path, *trained(2, 1, 2))
    assert (after.open, after.trained, after.twice) == (0, {0: 1, 1: 2, 2: 2}, ())


def test_a_drain_after_the_checkpoint_is_undone_by_a_resume(tmp_path: Path) -> None:
    """The drained run settles its rest as surplus at the checkpoint's own step; the checkpoint knows it as open."""
    drained = [*admitted(0, 1, 2), Ended(2, "surplus", 1), *trained(1, 0), Committed(1), Ended(1, "surplus", 1)]
    assert audited(tmp_path, *drained).outcomes == {"surplus": 2, "trained": 1}
    books = audited(tmp_path, RolledBack(1, 2, next_group=3, reopened=(1,)), *trained(2, 1))
    assert books.outcomes == {"surplus": 1, "trained": 2}
    assert books.open == 0


def test_a_checkpoint_that_reopens_a_trained_group_does_not_hide_its_second_training(tmp_path: Path) -> None:
    books = audited(
        tmp_path, *admitted(0), *trained(1, 0), Committed(1), RolledBack(1, 2, 1, reopened=(0,)), *trained(2, 0)
    )
    assert books.twice == (0,)


@pytest.mark.parametrize("damage", [b"garbage\n", b'00000000 {"type":"commit","step":3}\n', b"12"])
def test_reading_ends_at_a_damaged_line(tmp_path: Path, damage: bytes) -> None:
    books = audited(tmp_path, *admitted(0, 1), *trained(1, 0))
    path = tmp_path / "ledger.jsonl"
    with path.open("ab") as file:
        file.write(damage)
    assert audit(path) == books
    assert len(list(read_journal(path))) == 4
