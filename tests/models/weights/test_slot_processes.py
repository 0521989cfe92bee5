"""Weight slots among processes: a writer that never waits, killed owners, leftovers, and where the slots lie."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up import ROOT, checkpoint, publish

from models.errors import SlotDirectoryError, SlotSpaceError, TornWeights
from models.weights import layout as slot_directory
from models.weights.layout import (
    SHARED_MEMORY,
    DirectoryLease,
    choose_directory,
    list_left_behind,
    remove_if_stale,
    remove_stale,
)
from models.weights.shared_memory_reader import SlotManifest, SlotReader
from models.weights.shared_memory_writer import SlotWriter

pytestmark = pytest.mark.slow

WRITER_PROGRAM = """
import sys, torch, msgspec
from pathlib import Path
from models.weights.shared_memory_writer import SlotWriter
writer = SlotWriter(Path(sys.argv[1]), Path(sys.argv[2]))
specs = [item.spec for item in writer.layout.tensors]
for version in range(1, int(sys.argv[3]) + 1):
    tensors = ((spec.name, torch.full(spec.shape, float(version))) for spec in specs)
    sys.stdout.write(msgspec.json.encode(writer.write(version, 0, tensors)).decode() + "\\n")
    sys.stdout.flush()
sys.stdin.read()  # hold the slots until the test closes the pipe or kills this process
"""


def start_writer(slots: Path, source: Path, versions: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER_PROGRAM, str(slots), str(source), str(versions)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_reader_beside_a_writer_that_never_waits_accepts_only_whole_versions(tmp_path: Path) -> None:
    """The writer overwrites at full speed and knows nothing of readers: what passes the checks must be uniform."""
    tensors = {f"t{i}": torch.zeros(256, 1024) for i in range(4)}
    source = checkpoint(tmp_path / "source", tensors)
    process = start_writer(tmp_path / "slots", source, 300)
    accepted = torn = 0
    held: SlotManifest | None = None
    assert process.stdout is not None
    try:
        for _, line in zip(range(300), process.stdout, strict=False):
            manifest = slot_manifest(line)
            for claim in (manifest, held):
                if claim is None:
                    continue
                try:
                    slot = SlotReader(claim)
                    copies = [data.copy().view(np.float32) for _, data in slot.tensors()]
                    slot.check()
                except TornWeights:
                    torn += 1
                else:
                    accepted += 1
                    assert all((copy == claim.version).all() for copy in copies)
            held = manifest
    finally:
        process.communicate("")
    assert process.returncode == 0
    assert accepted >= 2  # at the end the writer rests, and both slots are whole
    assert accepted + torn == 599


def slot_manifest(line: str) -> SlotManifest:
    return SlotManifest(**json.loads(line))


def test_a_killed_owners_directory_is_removed_and_a_live_ones_is_not(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    slots = tmp_path / f"{slot_directory.PREFIX}run"
    process = start_writer(slots, source, 1)
    assert process.stdout is not None
    manifest = slot_manifest(process.stdout.readline())
    try:
        assert remove_stale(tmp_path) == []
        with pytest.raises(SlotDirectoryError, match=f"in use by process {process.pid}"):
            SlotWriter(slots, source)
        SlotReader(manifest)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert slots.exists()
    SlotReader(manifest)  # what a dead writer published stays whole
    assert remove_stale(tmp_path) == [slots]
    with pytest.raises(TornWeights, match=r"slot\.state is gone"):
        SlotReader(manifest)


def test_a_dead_runs_directory_is_taken_over(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    process = start_writer(tmp_path / "slots", source, 1)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        SlotReader(publish(writer, 5))


def test_the_directory_is_private_and_removed_on_close(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        publish(writer, 1)
        for path in (tmp_path / "slots", tmp_path / "slots" / "slot-0"):
            assert path.stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "slots" / "owner.pid").read_text() == f"{os.getpid()}\n"
    writer.close()
    assert os.listdir(tmp_path) == ["source"]


def test_a_directory_that_is_no_slot_directory_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / f"{slot_directory.PREFIX}mine"
    mine.mkdir()
    (mine / "data").write_text("keep")
    assert not remove_if_stale(mine)
    with pytest.raises(SlotDirectoryError, match="in use by another program"):
        DirectoryLease(mine)
    link = tmp_path / f"{slot_directory.PREFIX}link"
    link.symlink_to(mine)
    assert remove_stale(tmp_path) == []
    assert (mine / "data").read_text() == "keep"


def test_shared_memory_is_chosen_only_with_room_for_two(tmp_path: Path, monkeypatch) -> None:
    shared, fallback = tmp_path / "shm", tmp_path / "run"
    shared.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(4000, 1800, 2200))
    name = f"{slot_directory.PREFIX}x"
    assert choose_directory("x", fallback, 1000, shared_memory=shared) == shared / name
    assert choose_directory("x", fallback, 1001, shared_memory=shared) == fallback / name
    assert choose_directory("x", fallback, 1, shared_memory=tmp_path / "absent") == fallback / name


def test_no_room_is_an_error_before_the_first_write(tmp_path: Path, monkeypatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    source = checkpoint(tmp_path / "source")
    with pytest.raises(SlotSpaceError, match=r"no room for two slots of \d+ bytes"):
        SlotWriter(tmp_path / "slots", source)
    assert os.listdir(tmp_path) == ["source"]


def test_the_reader_needs_no_torch() -> None:
    modules = "models.weights.shared_memory_reader, models.weights.layout"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_what_a_killed_runs_processes_left_in_shared_memory_goes_with_its_directory(tmp_path: Path) -> None:
    """And nothing else that is listed: neither what lies elsewhere, nor what lives."""
    mine, elsewhere = SHARED_MEMORY / f"sem.mp-sluice-test-{os.getpid()}", tmp_path / "precious"
    for path in (mine, elsewhere):
        path.write_text("x")
    lease = DirectoryLease(tmp_path / f"{slot_directory.PREFIX}run")
    try:
        list_left_behind(lease.directory, [mine, elsewhere])
        list_left_behind(lease.directory, [SHARED_MEMORY / "gone already"])
        assert remove_stale(tmp_path) == []
        assert mine.exists()
        os.close(lease._lock)  # as the kernel does when the owner is killed
        assert remove_stale(tmp_path) == [lease.directory]
        assert not mine.exists()
        assert elsewhere.exists()
    finally:
        mine.unlink(missing_ok=True)


def test_a_draft_is_left_to_its_maker_for_a_while(tmp_path: Path) -> None:
    """Its maker may be about to lock it; one of a killed maker is empty, or has a lock that nobody holds."""
    young, empty, unlocked = (tmp_path / f".{slot_directory.PREFIX}{name}" for name in ("young", "empty", "unlocked"))
    for draft in (young, empty, unlocked):
        draft.mkdir()
    for draft in (young, unlocked):
        (draft / slot_directory.OWNER_FILE).touch()
    for draft in (empty, unlocked):
        os.utime(draft, (0, 0))
    assert remove_stale(tmp_path) == [unlocked]
    assert os.listdir(tmp_path) == [young.name]
