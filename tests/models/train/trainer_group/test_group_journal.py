"""What has to be repeated after a loss: no call too few, none too many, whatever became of the saves."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import Manifest, commit_directory, draft_path, final_path, write_manifest
from models.train.trainer_group.journal import CallJournal, Point, committed, read_calls


def save(root: Path, step: int) -> Path:
    draft = draft_path(root, step)
    draft.mkdir(parents=True)
    (draft / "weights").write_bytes(b"w" * step)
    return draft


def commit(root: Path, step: int) -> None:
    write_manifest(draft_path(root, step), Manifest(step=step, version=step, run_generation=0))
    commit_directory(draft_path(root, step), final_path(root, step))


def test_calls_come_back_in_order_from_any_point(tmp_path: Path) -> None:
    journal, root = CallJournal(tmp_path / "trainer_group"), tmp_path / "checkpoints"
    calls = [bytes([number]) * number for number in range(6)]
    for number, call in enumerate(calls):
        journal.append(call)
        if number in (1, 3):
            journal.saved(save(root, number))
    start, first, second = journal.points
    assert start.directory is None
    assert list(journal.calls_after(start)) == [*calls[:2], first, *calls[2:4], second, *calls[4:]]
    assert list(journal.calls_after(first)) == [*calls[2:4], second, *calls[4:]]
    assert list(journal.calls_after(second)) == calls[4:]


def test_only_a_committed_save_makes_calls_superfluous(tmp_path: Path) -> None:
    journal, root = CallJournal(tmp_path / "trainer_group"), tmp_path / "checkpoints"
    for step in (1, 2, 3):
        journal.append(b"call %d" % step)
        journal.saved(save(root, step))
    journal.append(b"after")
    journal.drop_superfluous()
    assert [point.directory for point in journal.points] == [None, *(draft_path(root, step) for step in (1, 2, 3))]
    commit(root, 1)
    commit(root, 2)
    journal.drop_superfluous()
    assert [point.directory for point in journal.points] == [draft_path(root, 2), draft_path(root, 3)]
    assert list(journal.calls_after(journal.points[0])) == [b"call 3", journal.points[1], b"after"]
    assert len(list(journal.home.iterdir())) == 2
    journal.close()
    assert not journal.home.exists()


def test_a_load_makes_all_before_it_superfluous(tmp_path: Path) -> None:
    journal = CallJournal(tmp_path / "trainer_group")
    journal.append(b"before")
    journal.started_from(tmp_path / "step-00000004")
    journal.append(b"after")
    assert journal.points == [Point(tmp_path / "step-00000004", 1)]
    assert list(journal.calls_after(journal.points[0])) == [b"after"]


def test_a_directory_written_anew_is_no_older_point(tmp_path: Path) -> None:
    journal, root = CallJournal(tmp_path / "trainer_group"), tmp_path / "checkpoints"
    draft = save(root, 1)
    journal.saved(draft)
    journal.append(b"between")
    journal.saved(draft)
    assert [point.directory for point in journal.points] == [None, draft]
    assert list(journal.calls_after(journal.points[1])) == []


@pytest.mark.parametrize("cut", [1, 15, 16, 18, 20])
def test_an_unfinished_record_is_left_out(tmp_path: Path, cut: int) -> None:
    journal = CallJournal(tmp_path / "trainer_group")
    journal.append(b"first")
    journal.append(b"last!")  # 16 bytes of head, 5 of the call
    (path,) = journal.home.iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_calls(path)) == [b"first"]


def test_nothing_is_read_behind_a_damaged_record(tmp_path: Path) -> None:
    journal = CallJournal(tmp_path / "trainer_group")
    for call in (b"first", b"second", b"third"):
        journal.append(call)
    (path,) = journal.home.iterdir()
    data = bytearray(path.read_bytes())
    data[data.index(b"second")] ^= 1
    path.write_bytes(bytes(data))
    assert list(read_calls(path)) == [b"first"]


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    journal = CallJournal(tmp_path / "trainer_group")
    journal.append(b"first")
    whole = journal._file

    class Full:
        """A file with room for three more bytes."""

        def __init__(self) -> None:
            self.room = 3

        def write(self, data: Any) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written, self.room = whole.write(bytes(data)[: self.room]), 0
            return written

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

    journal._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        journal.append(b"second")
    journal._file = whole
    journal.append(b"third")
    assert list(journal.calls_after(journal.points[0])) == [b"first", b"third"]


def test_an_earlier_life_leaves_nothing(tmp_path: Path) -> None:
    CallJournal(tmp_path / "trainer_group").append(b"of a life that was killed")
    assert list(CallJournal(tmp_path / "trainer_group").calls_after(Point(None, 0))) == []


def test_a_draft_is_not_taken_for_committed_because_an_older_checkpoint_has_its_name(tmp_path: Path) -> None:
    save(tmp_path, 3)
    commit(tmp_path, 3)
    draft = save(tmp_path, 3)
    assert committed(draft) is None
    commit(tmp_path, 3)
    assert committed(draft) == final_path(tmp_path, 3)
    (final_path(tmp_path, 3) / "weights").unlink()
    assert committed(draft) is None
    assert committed(tmp_path / "elsewhere") is None
