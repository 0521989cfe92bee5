"""Atomic checkpoints: order of durability, failure at every step, damage of every kind, a real full disk."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from models.checkpoint import (
    MANIFEST_FILE,
    CheckpointError,
    Manifest,
    commit_directory,
    draft_path,
    explain_disk_errors,
    final_path,
    latest_checkpoint,
    prune,
    read_manifest,
    remove_leftovers,
    resumable_checkpoint,
    verify_files,
    write_manifest,
)
from models.disk import write_whole
from tests.models.weights.made_up import flip


def make(root: Path, step: int, *, run_generation: int = 0, commit: bool = True) -> Path:
    draft = draft_path(root, step)
    (draft / "hf").mkdir(parents=True)
    (draft / "hf" / "model.safetensors").write_bytes(os.urandom(4096))
    (draft / "optimizer.bin").write_bytes(b"o" * step)
    whole = Manifest(step=step, version=step, run_generation=run_generation, ledger='{"open":3}', config_hash="abc")
    write_manifest(draft, whole)
    if commit:
        commit_directory(draft, final_path(root, step))
    return final_path(root, step)


def test_files_then_directory_then_rename_then_parent(tmp_path: Path, monkeypatch) -> None:
    log: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        log.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        log.append(f"rename {Path(source).relative_to(tmp_path)}")
        real_rename(source, target)

    make(tmp_path, 1, commit=False)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    commit_directory(draft_path(tmp_path, 1), final_path(tmp_path, 1))
    draft = ".step-00000001.draft"
    files = ["hf/model.safetensors", "hf", "optimizer.bin", MANIFEST_FILE]
    assert sorted(log[:4]) == sorted(f"sync {draft}/{name}" for name in files)
    assert log.index(f"sync {draft}/hf/model.safetensors") < log.index(f"sync {draft}/hf")
    assert log[4:] == [f"sync {draft}", f"rename {draft}", "sync ."]


@pytest.mark.parametrize("replace", [False, True])
def test_a_failure_at_any_system_call_leaves_a_complete_checkpoint(tmp_path: Path, monkeypatch, replace: bool) -> None:
    """Fail the n-th fsync or rename for every n: the latest checkpoint is the old one or the new one, never none."""
    step = 1 if replace else 2
    n = 0
    messages: list[str] = []
    while True:
        root = tmp_path / str(n)
        old = read_manifest(make(root, 1))
        make(root, step, run_generation=1, commit=False)
        calls = 0

        def failing(real, n=n):
            def call(*args):
                nonlocal calls
                calls += 1
                if calls == n + 1:
                    raise OSError(errno.EIO, "Input/output error")
                return real(*args)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(os.fsync))
            patch.setattr(os, "rename", failing(os.rename))
            try:
                commit_directory(draft_path(root, step), final_path(root, step))
            except CheckpointError as error:
                messages.append(str(error))
        latest = latest_checkpoint(root)
        manifest = read_manifest(latest)
        verify_files(latest, manifest)
        assert manifest == old or manifest.run_generation == 1
        if calls <= n:
            break
        n += 1
    assert len(messages) == n >= 7
    assert all("Input/output error" in text and "earlier checkpoints are untouched" in text for text in messages)


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    old = read_manifest(make(tmp_path, 1))
    make(tmp_path, 1, run_generation=1, commit=False)
    real, calls = os.rename, 0

    def killed(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt  # not an OSError: no handler runs, as with a signal that ends the process
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            commit_directory(draft_path(tmp_path, 1), final_path(tmp_path, 1))
    assert read_manifest(latest_checkpoint(tmp_path)) == old
    commit_directory(draft_path(tmp_path, 1), final_path(tmp_path, 1))
    assert latest_checkpoint(tmp_path) == final_path(tmp_path, 1)
    assert read_manifest(final_path(tmp_path, 1)).run_generation == 1


def test_an_incomplete_or_damaged_directory_is_passed_over(tmp_path: Path) -> None:
    good = make(tmp_path, 1)
    no_manifest = make(tmp_path, 2)
    (no_manifest / MANIFEST_FILE).unlink()
    truncated = make(tmp_path, 3)
    os.truncate(truncated / "hf" / "model.safetensors", 100)
    lost = make(tmp_path, 4)
    (lost / "optimizer.bin").unlink()
    flipped = make(tmp_path, 5)
    file = flipped / MANIFEST_FILE
    file.write_bytes(file.read_bytes().replace(b'"step":5', b'"step":9'))
    make(tmp_path, 6, commit=False)
    (draft := draft_path(tmp_path, 7)).mkdir()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        commit_directory(draft, final_path(tmp_path, 7))
    assert latest_checkpoint(tmp_path) == good
    with pytest.raises(CheckpointError, match="has 100 bytes, expected 4096"):
        read_manifest(truncated)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is missing"):
        read_manifest(lost)
    with pytest.raises(CheckpointError, match="damaged: checksum"):
        read_manifest(flipped)
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(flipped)


def test_another_format_is_refused_with_its_number(tmp_path: Path) -> None:
    for other in (1, 99):
        write_manifest(tmp_path, Manifest(step=1, version=1, run_generation=0, format_version=other))
        words = f"format_version {other}, this program reads 2; continue with the version"
        with pytest.raises(CheckpointError, match=words):
            read_manifest(tmp_path)


def test_latest_goes_by_run_generation_first_and_prune_keeps_the_newest(tmp_path: Path) -> None:
    make(tmp_path, 10)
    make(tmp_path, 20)
    make(tmp_path, 15, run_generation=1)  # resumed from 10: step 20 of run generation 0 never happened
    assert latest_checkpoint(tmp_path) == final_path(tmp_path, 15)
    assert prune(tmp_path, 2, spare={10}) == []
    assert prune(tmp_path, 2) == [final_path(tmp_path, 10)]
    assert prune(tmp_path, 1) == [final_path(tmp_path, 20)]
    assert os.listdir(tmp_path) == ["step-00000015"]
    with pytest.raises(ValueError, match="at least the newest"):
        prune(tmp_path, 0)
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_disk_full_gives_its_room_back_and_names_the_cure(tmp_path: Path, monkeypatch) -> None:
    good = make(tmp_path, 1)
    make(tmp_path, 2, commit=False)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step-00000002.*No space left.*lower --keep-last-n"):
        commit_directory(draft_path(tmp_path, 2), final_path(tmp_path, 2))
    assert not draft_path(tmp_path, 2).exists()
    assert latest_checkpoint(tmp_path) == good


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_write_to_a_really_full_device_is_explained(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="No space left on device; earlier checkpoints are untouched"),
        explain_disk_errors(tmp_path / "c"),
    ):
        Path("/dev/full").write_bytes(b"x" * 10)


def test_a_partly_removed_checkpoint_is_out_of_sight(tmp_path: Path, monkeypatch) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    assert latest_checkpoint(tmp_path) == final_path(tmp_path, 2)
    assert not final_path(tmp_path, 1).exists()


def check_every_flip_is_noticed(state: Path, root: Path) -> list[str]:
    """Commit a training state, flip one byte of each of its files in turn, and ask for what can be resumed.

    Returns the names of the files.
    """
    draft = draft_path(root, 1)
    shutil.copytree(state, draft)
    write_manifest(draft, Manifest(step=1, version=1, run_generation=0))
    commit_directory(draft, final := final_path(root, 1))
    assert resumable_checkpoint(root, print)
    rng = random.Random(0)
    files = sorted(path for path in final.rglob("*") if path.is_file())
    for path in files:
        place = -rng.randint(1, path.stat().st_size)
        flip(path, place)
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be resumed") as caught:
            resumable_checkpoint(root, print)
        assert str(path) in str(caught.value)
        flip(path, place)
    assert resumable_checkpoint(root, print)
    return [str(path.relative_to(final)) for path in files]


def test_leftovers_of_killed_runs_go_and_the_only_copy_of_a_checkpoint_stays(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)
    make(tmp_path, 3).rename(tmp_path / ".step-00000003.replaced")  # killed between the two renames
    shutil.copytree(final_path(tmp_path, 2), tmp_path / ".step-00000002.replaced")
    make(tmp_path, 4, commit=False)
    (tmp_path / ".step-00000000.removed").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".step-00000003.replaced", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("name", ["hf/model.safetensors", "optimizer.bin", MANIFEST_FILE])
def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path: Path, name: str) -> None:
    """And the newest one is resumed in silence as long as it is sound."""
    good, newest = make(tmp_path, 1), make(tmp_path, 2)
    reported: list[str] = []
    assert resumable_checkpoint(tmp_path / "nowhere", reported.append) is None
    assert resumable_checkpoint(tmp_path, reported.append) == (newest, read_manifest(newest))
    assert reported == []
    flip(newest / name)
    assert resumable_checkpoint(tmp_path, reported.append) == (good, read_manifest(good))
    [line] = reported
    assert "skipped" in line
    assert str(newest / name) in line


def test_nothing_but_damaged_checkpoints_is_an_error_and_no_new_beginning(tmp_path: Path) -> None:
    flip(make(tmp_path, 1) / "optimizer.bin")
    (make(tmp_path, 2) / MANIFEST_FILE).unlink()
    before = sorted(tmp_path.rglob("*"))
    words = r"can be resumed: .*2 has no manifest.*optimizer.bin is damaged.*restore"
    with pytest.raises(CheckpointError, match=words):
        resumable_checkpoint(tmp_path, print)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fills_keeps_the_old_content_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "file", b"old")
    write = Path.write_bytes

    def fills(path: Path, content: bytes) -> int:
        write(path, content[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fills)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"old")]
