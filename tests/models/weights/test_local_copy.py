"""Copies of slots of another host: valid only when they are what was announced, and never while they are written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from models.errors import DigestMismatch, TornWeights
from models.weights.layout import WEIGHTS_FILE
from models.weights.shared_memory_reader import STATE_FILE, LocalCopies, SlotManifest, SlotReader
from models.weights.shared_memory_writer import SlotWriter
from tests.models.weights.made_up import checkpoint, values


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotWriter]:
    with closing(SlotWriter(tmp_path / "slots", checkpoint(tmp_path / "source"))) as writer:
        yield writer


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[LocalCopies]:
    made = LocalCopies(tmp_path / "copies")
    yield made
    made.close()
    assert not (tmp_path / "copies").exists()


def write(slots: SlotWriter, version: int) -> SlotManifest:
    return slots.write(version, 0, iter(values(version).items()))


def fetch(copies: LocalCopies, slot: SlotManifest) -> Path:
    directory = copies.begin()
    for file in Path(slot.path).iterdir():
        if file.name != STATE_FILE:
            shutil.copyfile(file, directory / file.name)
    return directory


def contents(slot: SlotManifest) -> list[bytes]:
    reader = SlotReader(slot)
    return [data.tobytes() for _, data in reader.tensors()]


def test_a_copy_is_read_like_the_original(slots: SlotWriter, copies: LocalCopies) -> None:
    for version in range(5):  # over both directories, and over what they held
        original = write(slots, version)
        assert copies.find(original) is None
        fetch(copies, original)
        copy = copies.finish(original)
        assert copy.path != original.path
        assert contents(copy) == contents(original)
        assert copies.find(original) == copy
        assert (Path(copy.path) / "config.json").is_file(), "an engine loads the directory"


def test_the_copy_before_the_last_is_found_until_it_is_overwritten(slots: SlotWriter, copies: LocalCopies) -> None:
    kept = []
    for version in range(2):
        kept.append(write(slots, version))
        fetch(copies, kept[-1])
        copies.finish(kept[-1])
    first, second = (copies.find(original) for original in kept)
    assert first is not None
    assert second is not None
    reader = SlotReader(first)
    copies.begin()
    with pytest.raises(TornWeights, match="is being written"):
        reader.check()
    assert copies.find(kept[0]) is None
    assert contents(second)


def test_what_is_not_as_announced_is_no_copy(slots: SlotWriter, copies: LocalCopies) -> None:
    """The trainer overwrites a slot while it is fetched; a byte is damaged on its way."""
    original = write(slots, 0)
    directory = fetch(copies, original)
    with (directory / WEIGHTS_FILE).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(DigestMismatch, match="announced was"):
        copies.finish(original)
    assert copies.find(original) is None
    with pytest.raises(TornWeights):
        SlotReader(msgspec.structs.replace(original, path=str(directory)))
    fetch(copies, original)
    assert copies.finish(original).path == str(directory), "the next try takes the same place"
