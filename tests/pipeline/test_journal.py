"""The journal's audit is the oracle of every fault test, so it has tests of its own: it must see what went wrong."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import msgspec
import pytest

from configs.schema import Config
from models.disk import draft_path, final_path
from pipeline.facts.run_directory import RunDir
from pipeline.record.journal import (
    Admitted,
    Audit,
    Committed,
    Ended,
    Event,
    Journal,
    JournalDamaged,
    RolledBack,
    Stepped,
    audit,
    read_journal,
)
from pipeline.record.recorder import Recorder
from stages.messages import CheckpointReady, Settled, StepDone
from stages.prompts.ledger import Ledger


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
    books = audited(tmp_path, *admitted(0, 1), *trained(1, 0), Ended(0, "discarded", 1), *trained(2, 0, 1))
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
    """The stopped run discards its rest at the checkpoint's own step; the checkpoint knows it as open."""
    drained = [*admitted(0, 1, 2), Ended(2, "discarded", 1), *trained(1, 0), Committed(1), Ended(1, "discarded", 1)]
    assert audited(tmp_path, *drained).outcomes == {"discarded": 2, "trained": 1}
    books = audited(tmp_path, RolledBack(1, 2, next_group=3, reopened=(1,)), *trained(2, 1))
    assert books.outcomes == {"discarded": 1, "trained": 2}
    assert books.open == 0


def test_a_checkpoint_that_reopens_a_trained_group_does_not_hide_its_second_training(tmp_path: Path) -> None:
    books = audited(
        tmp_path, *admitted(0), *trained(1, 0), Committed(1), RolledBack(1, 2, 1, reopened=(0,)), *trained(2, 0)
    )
    assert books.twice == (0,)


@pytest.mark.parametrize("damage", [b"garbage\n", b'{"type":"commit","step":3,"crc":"00000000"}\n', b"12"])
def test_reading_ends_at_a_damaged_line(tmp_path: Path, damage: bytes) -> None:
    books = audited(tmp_path, *admitted(0, 1), *trained(1, 0))
    path = tmp_path / "ledger.jsonl"
    with path.open("ab") as file:
        file.write(damage)
    assert audit(path) == books
    assert len(list(read_journal(path))) == 4


@pytest.mark.parametrize("torn", [b'{"type":"commit","step":3,"crc":"00000000"}\n', b"12", b"\0" * 40, b"x\ny\n\0"])
def test_what_a_crash_tore_does_not_hide_what_follows(tmp_path: Path, torn: bytes) -> None:
    audited(tmp_path, *admitted(0, 1), *trained(1, 0), Committed(1))
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(torn)
    books = audited(tmp_path, RolledBack(1, 2, next_group=2, reopened=(1,), restored=(1,)), *trained(2, 1))
    assert (books.outcomes, books.open, books.twice) == ({"trained": 2}, 0, ())
    assert sum(isinstance(event, RolledBack) for event in read_journal(tmp_path / "ledger.jsonl")) == 1


def test_the_last_line_of_a_killed_run_may_lack_only_its_end(tmp_path: Path) -> None:
    audited(tmp_path, *admitted(0, 1), *trained(1, 0))
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert audited(tmp_path, Stepped(1, "hash 1", 1)).batches == {1: "hash 1"}


def test_each_line_is_json_and_no_flipped_bit_of_it_is_taken_for_what_was_written(tmp_path: Path) -> None:
    audited(tmp_path, Admitted(0, 7), Ended(0, "failed", 1, 'a "reason", "crc": in { words }'), Committed(1))
    path = tmp_path / "ledger.jsonl"
    content = path.read_bytes()
    written = list(read_journal(path))
    first, second, _ = map(json.loads, content.splitlines())
    assert first == {"type": "admit", "group": 0, "position": 7, "requeued": 0, "crc": first["crc"]}
    assert int(first["crc"], 16) == zlib.crc32(b'{"type":"admit","group":0,"position":7,"requeued":0}')
    assert second["detail"] == 'a "reason", "crc": in { words }'
    last = content.rindex(b"{")
    for place in range(last, len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        assert list(read_journal(path)) == written[:2], content[place:]


def test_a_journal_of_an_earlier_version_is_refused_and_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'5c2dbd5e {"type":"commit","step":3}\n')
    for reads in (Journal, audit):
        with pytest.raises(JournalDamaged, match=r"was written by an earlier version of Sluice.*; resume the run with"):
            reads(path)
    assert path.read_bytes() == b'5c2dbd5e {"type":"commit","step":3}\n'


def test_a_line_that_is_damaged_in_the_middle_is_no_torn_tail(tmp_path: Path) -> None:
    audited(tmp_path, *admitted(0, 1), *trained(1, 0))
    path = tmp_path / "ledger.jsonl"
    damaged = path.read_bytes().replace(b'"position":0', b'"position":7', 1)
    path.write_bytes(damaged)
    with pytest.raises(JournalDamaged, match=r"damaged before line 2, which is whole.*; restore the file, or move it"):
        Journal(path)
    assert path.read_bytes() == damaged, "nothing is cut away that may be evidence"


async def test_what_came_before_a_checkpoint_is_in_the_journal_when_the_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed just after the rename, the run is resumed from this checkpoint, and its books must balance."""
    on_disk: list[bytes] = []

    def killed(root: Path, keep: int) -> None:
        on_disk.append((tmp_path / "run" / "ledger.jsonl").read_bytes())

    monkeypatch.setattr("pipeline.record.recorder.prune", killed)
    config = msgspec.convert({"observe": {"use_tensorboard": False, "trace": False}}, Config)
    ledger = Ledger()
    with RunDir(tmp_path / "run").open(resume=False) as rundir, Recorder(config, rundir) as recorder:
        for position in range(3):
            recorder.admitted(ledger.admit(position=position))
        recorder.settled([(0, Settled(0, "trained", step=1))])
        ledger.settle(0, "trained")
        await recorder.step(StepDone(1, 1, (0,), {}, tokens=4, token_hash="h"))
        recorder.admitted(ledger.admit(position=3))
        draft = draft_path(rundir.checkpoints, 1)
        draft.mkdir()
        await recorder.commit(CheckpointReady(1, 1, str(draft)), ledger.snapshot())
        assert final_path(rundir.checkpoints, 1).is_dir()
    (tmp_path / "ledger.jsonl").write_bytes(on_disk[0])
    open_ = tuple(group.group_id for group in ledger.open_groups())
    books = audited(tmp_path, RolledBack(1, 1, ledger.next_group, reopened=open_))
    assert (books.admitted, books.open, books.trained, books.batches) == (4, 3, {0: 1}, {1: "h"})
