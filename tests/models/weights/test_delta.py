"""Differences of versions: exact for any bytes, and nothing wrong is ever handed out."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from models.errors import DeltaError, DigestMismatch, TornWeights
from models.weights import delta
from models.weights.delta_mirror import DeltaMirror, way_to
from models.weights.layout import WEIGHTS_FILE, TensorSpec
from models.weights.shared_memory_reader import STATE_FILE, LocalCopies, SlotManifest, SlotReader
from models.weights.shared_memory_writer import SlotWriter
from tests.models.weights.made_up import checkpoint, flip, publish

N = 40_000


@given(st.data())
def test_any_bytes_come_back(data: st.DataObject) -> None:
    element = data.draw(st.sampled_from([1, 2, 4]))
    count = data.draw(st.integers(0, 60)) * element
    old, new = (np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), np.uint8) for _ in range(2))
    chunk_bytes = data.draw(st.sampled_from([4, 16, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_BYTES", chunk_bytes)
        chunks = delta.compress(old, new, element)
        assert bool(chunks) == (old.tobytes() != new.tobytes())
        if chunks:
            assert delta.restore(old, chunks, element).tobytes() == new.tobytes()


class Memory:
    """Tensors that lie nowhere."""

    def __init__(self, **arrays: np.ndarray) -> None:
        self.arrays = arrays

    def tensors(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        for name, array in self.arrays.items():
            yield TensorSpec(name, "F32", array.shape), array.view(np.uint8).reshape(-1)


def test_a_file_holds_what_changed_and_says_from_where(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    same, moved = random.normal(size=N).astype("<f4"), random.normal(size=N).astype("<f4")
    base = Memory(same=same, moved=moved)
    new = Memory(same=same, moved=moved * np.float32(1 + 1e-6))
    done = delta.write_delta(tmp_path / "d", base, new, labels=("0.1", "0.2"), digests=("b", "r"))
    header = delta.read_header(tmp_path / "d")
    assert (header.base, header.base_digest, header.label, header.digest) == ("0.1", "b", "0.2", "r")
    assert [len(item.chunks) for item in header.tensors] == [0, 1]
    assert done.ratio > 4, "of four bytes at most one has changed"
    restored = dict(delta.apply_delta(tmp_path / "d", base))
    for (_, wanted), found in zip(new.tensors(), restored.values(), strict=True):
        assert found.tobytes() == wanted.tobytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "d"]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "flipped": lambda path: path.write_bytes(b"\xff" * 60 + path.read_bytes()[60:]),
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "foreign"])
def test_a_damaged_file_is_reported(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "d"
    old, new = np.zeros(N, "<f4"), np.random.default_rng(1).normal(size=N).astype("<f4")
    delta.write_delta(path, Memory(a=old), Memory(a=new), labels=("0.1", "0.2"), digests=("b", "r"))
    DAMAGE.get(damage, str)(path)
    with pytest.raises(DeltaError, match="take the full weights"):
        list(delta.apply_delta(path, Memory(b=old) if damage == "foreign" else Memory(a=old)))


class Trainer:
    """Slots and the directory of differences; versions whose weights hardly differ."""

    def __init__(self, root: Path) -> None:
        random = torch.Generator().manual_seed(0)
        self.first = {"a.weight": torch.randn(64, 32, generator=random), "b.scale": torch.randn(7, generator=random)}
        self.slots = SlotWriter(root / "slots", checkpoint(root / "source", self.first))
        self.store = delta.DeltaStore(root / "deltas", full_every=3)
        self.ratios: list[float] = []

    @property
    def directory(self) -> Path:
        return self.store.directory

    def values(self, version: int) -> dict[str, torch.Tensor]:
        return {"a.weight": self.first["a.weight"] * (1 + 1e-6 * version), "b.scale": self.first["b.scale"]}

    def publish(self, version: int) -> SlotManifest:
        manifest = self.slots.write(version, 0, iter(self.values(version).items()))
        self.ratios.append(self.store.publish(manifest).ratio)
        return manifest


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.slots.close()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[DeltaMirror]:
    made = DeltaMirror(f"test-{os.getpid()}-{tmp_path.name}", tmp_path)  # of this worker: others name theirs alike
    yield made
    made.close()


async def take(mirror: DeltaMirror, trainer: Trainer, manifest: SlotManifest) -> None:
    """The version as the mirror hands it out, checked against the trainer's."""
    async with mirror.lent(manifest, trainer.directory) as found:
        loaded = load_file(Path(found.path) / "model.safetensors")
        for name, tensor in trainer.values(manifest.version).items():
            assert torch.equal(loaded[name], tensor)
        SlotReader(found)
        assert found.digest == manifest.digest


async def test_a_follower_reads_differences_only(trainer: Trainer, mirror: DeltaMirror) -> None:
    first = trainer.publish(0)
    await take(mirror, trainer, first)
    for version in range(1, 9):
        manifest = trainer.publish(version)
        start, steps = way_to((0, version), (0, version - 1), trainer.directory)
        assert (start, len(steps)) == (None, 1)
        await take(mirror, trainer, manifest)
    assert min(trainer.ratios[1:]) > 1.5


async def test_one_that_comes_late_begins_with_full_weights(trainer: Trainer, mirror: DeltaMirror) -> None:
    for version in range(6):
        manifest = trainer.publish(version)
    assert sorted(delta.full_versions(trainer.directory)) == [(0, 0), (0, 3)]
    assert way_to((0, 5), None, trainer.directory)[0] == (0, 3)
    await take(mirror, trainer, manifest)


async def test_one_that_missed_versions_takes_all_differences(trainer: Trainer, mirror: DeltaMirror) -> None:
    await take(mirror, trainer, trainer.publish(0))
    for version in (2, 4, 5):  # versions need not follow each other without gaps
        manifest = trainer.publish(version)
    assert way_to((0, 4), (0, 0), trainer.directory) == (
        None,
        [trainer.directory / "0.2-from-0.0.delta", trainer.directory / "0.4-from-0.2.delta"],
    )
    await take(mirror, trainer, manifest)


def test_what_is_kept_is_bounded_and_reaches_every_version(trainer: Trainer) -> None:
    (trainer.directory / "notes.txt").write_text("not ours")
    for version in range(20):
        trainer.publish(version)
        full = delta.full_versions(trainer.directory)
        assert len(full) <= 2
        assert len(delta.differences(trainer.directory)) <= 2 * trainer.store.full_every
        for target in range(min(full)[1], version + 1):
            way_to((0, target), None, trainer.directory)
    assert (trainer.directory / "notes.txt").exists()
    assert not [path for path in trainer.directory.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("damage", ["flipped", "gone", "other result"])
async def test_a_broken_chain_is_left_for_full_weights(damage: str, trainer: Trainer, mirror: DeltaMirror) -> None:
    await take(mirror, trainer, trainer.publish(0))
    for version in (1, 2, 3):
        manifest = trainer.publish(version)
    path = trainer.directory / "0.2-from-0.1.delta"
    if damage in DAMAGE:
        DAMAGE[damage](path)
    else:  # a whole file of another pair: its base is not what lies here after version 1
        path.write_bytes((trainer.directory / "0.3-from-0.2.delta").read_bytes())
    await take(mirror, trainer, manifest)


async def test_without_any_way_the_error_says_so(trainer: Trainer, mirror: DeltaMirror) -> None:
    manifest = trainer.publish(0)
    for path in delta.full_versions(trainer.directory).values():
        path.rename(path.with_name("elsewhere"))
    with pytest.raises(DeltaError, match=r"has no way to version 0\.0"):
        await take(mirror, trainer, manifest)


async def test_bytes_of_another_digest_are_not_handed_out(trainer: Trainer, mirror: DeltaMirror) -> None:
    await take(mirror, trainer, trainer.publish(0))
    manifest = trainer.publish(1)
    lie = SlotManifest(0, 1, manifest.path, "0" * 32, manifest.generation)
    with pytest.raises(DigestMismatch, match="announced was 0000"):
        await take(mirror, trainer, lie)
    await take(mirror, trainer, manifest)


async def test_a_slot_that_a_reader_loads_from_is_not_overwritten(trainer: Trainer, mirror: DeltaMirror) -> None:
    manifests = [trainer.publish(0)]
    async with mirror.lent(manifests[0], trainer.directory) as held:
        await take(mirror, trainer, trainer.publish(1))
        third = asyncio.ensure_future(take(mirror, trainer, trainer.publish(2)))
        done, _ = await asyncio.wait([third], timeout=0.2)
        assert not done, "version 2 would go where version 0 is being read"
        SlotReader(held)
    await third


@settings(max_examples=15)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=5))
def test_any_sequence_of_versions_arrives(tmp_path_factory: pytest.TempPathFactory, seeds: list[int]) -> None:
    root = tmp_path_factory.mktemp("any")
    trainer = Trainer(root)
    mirror = DeltaMirror(f"test-{os.getpid()}-{root.name}", root)
    try:
        for version, seed in enumerate(seeds):
            random = torch.Generator().manual_seed(seed)
            values = {name: torch.randn(tensor.shape, generator=random) for name, tensor in trainer.first.items()}
            trainer.values = lambda version, values=values: values  # type: ignore[method-assign,misc]
            asyncio.run(take(mirror, trainer, trainer.publish(version)))
    finally:
        mirror.close()
        trainer.slots.close()


# Copies of slots of another host: valid only when they are what was announced, and never while they are written.


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


def fetch(copies: LocalCopies, slot: SlotManifest) -> Path:
    directory = copies.begin()
    for file in Path(slot.path).iterdir():
        if file.name != STATE_FILE:
            shutil.copyfile(file, directory / file.name)
    return directory


def contents(slot: SlotManifest) -> list[bytes]:
    return [data.tobytes() for _, data in SlotReader(slot).tensors()]


def test_a_copy_is_read_like_the_original(slots: SlotWriter, copies: LocalCopies) -> None:
    """And the copy before the last is found until it is overwritten."""
    originals = []
    for version in range(5):  # over both directories, and over what they held
        original = publish(slots, version)
        originals.append(original)
        assert copies.find(original) is None
        fetch(copies, original)
        copy = copies.finish(original)
        assert copy.path != original.path
        assert contents(copy) == contents(original)
        assert copies.find(original) == copy
        assert (Path(copy.path) / "config.json").is_file(), "an engine loads the directory"
    reader = SlotReader(copies.find(originals[3]))
    copies.begin()
    with pytest.raises(TornWeights, match="is being written"):
        reader.check()
    assert copies.find(originals[3]) is None
    assert contents(copies.find(originals[4])) == contents(originals[4])


def test_what_is_not_as_announced_is_no_copy(slots: SlotWriter, copies: LocalCopies) -> None:
    """The trainer overwrites a slot while it is fetched; a byte is damaged on its way."""
    original = publish(slots, 0)
    directory = fetch(copies, original)
    flip(directory / WEIGHTS_FILE)
    with pytest.raises(DigestMismatch, match="announced was"):
        copies.finish(original)
    assert copies.find(original) is None
    with pytest.raises(TornWeights):
        SlotReader(msgspec.structs.replace(original, path=str(directory)))
    fetch(copies, original)
    assert copies.finish(original).path == str(directory), "the next try takes the same place"
