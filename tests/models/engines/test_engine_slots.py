"""An embedded engine that takes a version out of a slot: it compares the bytes with what was announced, while it copies
them beside its weights or before it copies them into these, and takes nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from models.engines.embedded import transformer
from models.engines.embedded.engine import EmbeddedEngine
from models.errors import LayoutMismatch, WeightsRefused
from models.weights import shared_memory_reader
from models.weights.layout import read_layout
from models.weights.shared_memory_reader import SlotManifest
from models.weights.shared_memory_writer import SlotWriter
from tests.models.engines.harness import Bench, Checkpoints

PIECE = 10_000  # bytes: several tensors in a piece, and tensors in several pieces


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Of the engine; the slots hold float32."""
    return str(request.param)


@pytest.fixture
async def engine(checkpoints: Checkpoints, dtype: str) -> AsyncIterator[EmbeddedEngine]:
    bench = Bench(checkpoints(), engine_dtype=dtype)
    bench.engine.start(lambda completions: None, lambda error: None)
    yield bench.engine
    await bench.engine.stop()


class Slots:
    """Of a trainer: each version is its checkpoint, times a factor."""

    def __init__(self, writer: SlotWriter, checkpoint: Path) -> None:
        self.writer, self.tensors = writer, load_file(checkpoint / "model.safetensors")

    def version(self, version: int) -> dict[str, torch.Tensor]:
        return {name: tensor * (1 + version / 8) for name, tensor in self.tensors.items()}

    def write(self, version: int) -> SlotManifest:
        return self.writer.write(version, 0, iter(self.version(version).items()))

    def flip(self, slot: SlotManifest, place: int) -> None:
        """One bit of the tensor bytes, from the end."""
        file = Path(slot.path) / "model.safetensors"
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size - 1 - place)
            [byte] = opened.read(1)
            opened.seek(-1, 1)
            opened.write(bytes([byte ^ 1]))


@pytest.fixture
def slots(tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slots]:
    monkeypatch.setattr(shared_memory_reader, "PIECE_BYTES", PIECE)
    monkeypatch.setattr("models.weights.shared_memory_writer.PIECE_BYTES", PIECE)
    with closing(SlotWriter(tmp_path / "slots", checkpoints())) as writer:
        yield Slots(writer, checkpoints())


def serves(engine: EmbeddedEngine, tensors: dict[str, torch.Tensor]) -> bool:
    live = engine._weights.names
    return all(torch.equal(live[name], tensor.to(live[name].dtype)) for name, tensor in tensors.items())


def count(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that are digested and copied by a verification from now on."""
    counts = {"digested": 0, "copied": 0}
    digest_of, memmove = shared_memory_reader.digest_of, ctypes.memmove

    def digest(piece: npt.NDArray[np.uint8]) -> bytes:
        counts["digested"] += len(piece)
        return digest_of(piece)

    def copy(target: int, source: int, nbytes: int) -> int:
        counts["copied"] += nbytes
        return memmove(target, source, nbytes)

    monkeypatch.setattr(shared_memory_reader, "digest_of", digest)
    monkeypatch.setattr(shared_memory_reader.ctypes, "memmove", copy)  # type: ignore[attr-defined]
    return counts


async def test_a_version_is_read_once_for_its_digest_and_its_copy(
    slots: Slots, engine: EmbeddedEngine, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its bytes are those that the engine serves. Where they are cast, one process compares them for all engines
    of its host."""
    counts, alike = count(monkeypatch), dtype == "float32"
    for version in (1, 2, 3):
        slot = slots.write(version)
        counts.update(digested=0, copied=0)
        assert await engine.prepare_weights(slot.path, slot.label, slot) == alike
        nbytes = slots.writer.layout.data_bytes if alike else 0
        assert counts == {"digested": nbytes, "copied": nbytes}
        await engine.update_weights(slot.path, slot.label, False, slot)
        assert counts["digested"] == nbytes, "what was prepared is taken as it is"
        assert serves(engine, slots.version(version))
        assert engine.label == slot.label


async def test_a_plain_checkpoint_claims_nothing(checkpoints: Checkpoints, engine: EmbeddedEngine) -> None:
    assert not await engine.prepare_weights(str(checkpoints(seed=1)), "w2")
    assert engine._prepared


def overwritten(slots: Slots, slot: SlotManifest) -> None:
    for version in (7, 8):
        slots.write(version)


FAULTS: dict[str, tuple[Callable[[Slots, SlotManifest], object], str]] = {
    "the first byte": (lambda slots, slot: slots.flip(slot, slots.writer.layout.data_bytes - 1), "announced was"),
    "the last byte": (lambda slots, slot: slots.flip(slot, 0), "announced was"),
    "overwritten": (overwritten, "was published as generation 2"),
}


@pytest.mark.parametrize(("dtype", "prepared"), [("float32", True), ("float32", False), ("bfloat16", False)])
@pytest.mark.parametrize("fault", FAULTS)
async def test_other_bytes_are_refused_and_the_engine_keeps_its_weights(
    slots: Slots, engine: EmbeddedEngine, dtype: str, fault: str, prepared: bool
) -> None:
    before = await engine.checksums()
    slot = slots.write(1)
    spoil, words = FAULTS[fault]
    spoil(slots, slot)
    given = slot.path, slot.label
    taking = engine.prepare_weights(*given, slot) if prepared else engine.update_weights(*given, False, slot)
    with pytest.raises(WeightsRefused, match=words):
        await taking
    assert engine._prepared is None
    assert (await engine.checksums(), engine.label) == (before, "w1")
    again = slots.write(9)
    assert await engine.prepare_weights(again.path, again.label, again) == (dtype == "float32")
    await engine.update_weights(again.path, again.label, False, again)
    assert serves(engine, slots.version(9))


@pytest.mark.parametrize("dtype", ["float32"])
async def test_a_slot_that_is_overwritten_during_the_copy_is_not_taken(
    slots: Slots, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last digest, so that only the counter of the slot shows it."""
    slot, original = slots.write(1), shared_memory_reader.fold_digests

    def fold(digests: Iterator[bytes]) -> str:
        found = original(list(digests))
        monkeypatch.setattr(shared_memory_reader, "fold_digests", original)
        overwritten(slots, slot)
        return found

    monkeypatch.setattr(shared_memory_reader, "fold_digests", fold)
    with pytest.raises(WeightsRefused, match="discard the tensors read"):
        await engine.prepare_weights(slot.path, slot.label, slot)
    assert engine._prepared is None


async def test_a_slot_that_is_overwritten_after_it_was_compared_is_noticed(
    slots: Slots, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are served are written only then. What they hold now is in doubt, which the error says."""
    slot, original, first = slots.write(1), transformer._copy, Lock()

    def copy(live: torch.Tensor, stored: torch.Tensor) -> None:
        if first.acquire(blocking=False):  # of several threads
            overwritten(slots, slot)
        original(live, stored)

    monkeypatch.setattr(transformer, "_copy", copy)
    with pytest.raises(WeightsRefused, match="discard the tensors read"):
        await engine.update_weights(slot.path, slot.label, False, slot)


async def test_what_was_prepared_and_given_up_is_compared_anew(slots: Slots, engine: EmbeddedEngine) -> None:
    """The memory was another process's meanwhile."""
    slot = slots.write(1)
    await engine.prepare_weights(slot.path, slot.label, slot)
    await engine.pause("abort")
    await engine.release_memory(("weights",))
    await engine.resume_memory(("weights",))
    slots.flip(slot, 0)
    with pytest.raises(WeightsRefused, match="announced was"):
        await engine.update_weights(slot.path, slot.label, False, slot)
    slots.flip(slot, 0)
    await engine.update_weights(slot.path, slot.label, False, slot)
    assert serves(engine, slots.version(1))


@pytest.mark.parametrize("served", [True, False])
async def test_a_claim_about_another_directory_is_refused(slots: Slots, engine: EmbeddedEngine, served: bool) -> None:
    one, other = slots.write(1), slots.write(2)
    given = one.path, one.label
    taking = engine.update_weights(*given, False, other) if served else engine.prepare_weights(*given, other)
    with pytest.raises(WeightsRefused, match="but the claim is about"):
        await taking


async def test_an_engine_without_room_says_that_it_compared_nothing(
    slots: Slots, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = slots.write(1)
    slots.flip(slot, 0)
    monkeypatch.setattr(Path, "read_text", lambda path: "MemAvailable:   5 kB")
    assert not await engine.prepare_weights(slot.path, slot.label, slot)


def test_a_copy_reaches_every_byte_of_the_layout(slots: Slots) -> None:
    """In memory of its own: as in the file, whatever lies in which piece."""
    slot = slots.write(4)
    layout = read_layout(Path(slot.path) / "model.safetensors")
    sizes = {item.spec.name: item.end - item.start for item in layout.tensors}
    memory = {name: np.zeros(nbytes, np.uint8) for name, nbytes in sizes.items()}
    left_out = next(iter(memory))
    places = {name: (array.ctypes.data, array.nbytes) for name, array in memory.items() if name != left_out}
    reader = shared_memory_reader.SlotReader(slot, into=places)
    for spec, data in reader.tensors():
        assert np.array_equal(memory[spec.name], data) == (spec.name != left_out)
    memory[left_out][:] = 0
    again = {left_out: (memory[left_out].ctypes.data, sizes[left_out])}
    shared_memory_reader.SlotReader(slot, anew=False, into=again)
    assert memory[left_out].any(), "a version that was verified before is copied all the same"
    memory[left_out][:] = 0
    with pytest.raises(LayoutMismatch, match="does not fit into 8 bytes"):
        shared_memory_reader.SlotReader(slot, into={left_out: (memory[left_out].ctypes.data, 8)})
    assert not memory[left_out].any()
    assert max(sizes.values()) > 2 * PIECE
    assert min(sizes.values()) * 2 < PIECE
