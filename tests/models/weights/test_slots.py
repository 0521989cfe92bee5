"""Weight slots: what is published is what is read, in the presence of overwriting, damage and kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from made_up import ROOT, SHAPES, checkpoint, flip, publish, values
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import errors
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.weights import shared_memory_reader, shared_memory_writer, slot_directory
from models.weights.layout import (
    ELEMENT_BYTES,
    TORCH_NAMES,
    TensorSpec,
    lay_out,
    plan_buckets,
    read_layout,
    stored_tensors,
)
from models.weights.shared_memory_reader import SlotManifest, SlotReader, digest_of
from models.weights.shared_memory_writer import SlotWriter


def slots_of(root: Path, tensors: dict[str, torch.Tensor] | None = None) -> closing[SlotWriter]:
    """Slots for a checkpoint of these tensors."""
    return closing(SlotWriter(root / "slots", checkpoint(root / "source", tensors)))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SlotWriter]:
    with slots_of(tmp_path) as made:
        yield made


def loaded(manifest: SlotManifest) -> dict[str, torch.Tensor]:
    """What transformers would read."""
    tensors: dict[str, torch.Tensor] = load_file(Path(manifest.path) / "model.safetensors")
    return tensors


def test_slots_alternate_and_the_last_two_versions_are_readable(writer: SlotWriter) -> None:
    """And a file is mapped once and never allocated anew."""

    def identity() -> list[tuple[int, int]]:
        found = [(writer.next_path.parent / f"slot-{i}" / "model.safetensors").stat() for i in range(2)]
        return [(status.st_ino, status.st_size) for status in found]

    before = identity()
    manifests = [publish(writer, version) for version in range(5)]
    assert identity() == before
    assert len({manifest.path for manifest in manifests}) == 2
    assert [manifest.generation for manifest in manifests] == [2, 2, 4, 4, 6]
    assert all(a.path != b.path for a, b in pairwise(manifests))
    assert str(writer.next_path) == manifests[3].path
    for manifest in manifests[3:]:
        SlotReader(manifest)
        found = loaded(manifest)
        assert found.keys() == SHAPES.keys()
        assert all((tensor == manifest.version).all() for tensor in found.values())
    for manifest in manifests[:3]:
        with pytest.raises(errors.TornWeights, match="holds generation"):
            SlotReader(manifest)


def test_a_slot_is_a_hugging_face_directory_that_transformers_loads(tmp_path: Path) -> None:
    source = make_tiny_checkpoint(tmp_path / "tiny", TinyRecipe(num_layers=1))
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        # state_dict yields the tied lm_head, which the checkpoint does not store
        assert "lm_head.weight" in model.state_dict()
        manifest = writer.write(1, 0, iter(model.state_dict().items()))
        SlotReader(manifest)
        again = AutoModelForCausalLM.from_pretrained(manifest.path)
        assert len(AutoTokenizer.from_pretrained(manifest.path)) == 264
        for (name, left), (_, right) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
            assert torch.equal(left, right), name
        with safe_open(Path(manifest.path) / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_what_a_checkpoint_stores_and_no_export_has_is_left_out(tmp_path: Path) -> None:
    """A head that is the embedding and frequencies, as some checkpoints store them, and layers for multi-token
    prediction, as GLM-4.5 and DeepSeek-V3 publish them: an export has none, and each once broke the first version."""
    source = make_tiny_checkpoint(tmp_path / "tiny", TinyRecipe(num_layers=1))
    exported = load_file(source / "model.safetensors")
    behind = {f"model.layers.{number}.eh_proj.weight": torch.ones(2, 2) for number in (1, 2)}
    behind["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)
    more = {**exported, **behind, "lm_head.weight": exported["model.embed_tokens.weight"].clone()}
    save_file(more, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (source / "config.json").write_text(json.dumps(config))
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        assert loaded(writer.write(0, 0, iter(exported.items()))).keys() == exported.keys()
        simulated = (stored for stored in stored_tensors(source / "model.safetensors"))
        assert loaded(writer.write(1, 0, simulated)).keys() == exported.keys()


SHAPE_AND_TYPE = st.tuples(st.lists(st.integers(0, 6), max_size=3), st.sampled_from([torch.float32, torch.bfloat16]))


@given(
    shapes=st.lists(SHAPE_AND_TYPE, min_size=1, max_size=8),
    seed=st.integers(0, 1000),
    order=st.randoms(use_true_random=False),
)
def test_any_tensors_come_back_bit_equal(tmp_path_factory, shapes, seed, order) -> None:
    """Those of torch, and then those that lie in a slot, passed on as they are stored."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}": torch.randn(shape, generator=generator).to(dtype) for i, (shape, dtype) in enumerate(shapes)}
    with slots_of(tmp_path_factory.mktemp("any"), tensors) as writer:
        assert writer.layout.data_bytes == sum(tensor.nbytes for tensor in tensors.values())
        items = [*tensors.items()]
        for version in (1, 2):
            order.shuffle(items)
            manifest = writer.write(version, 0, iter(items))
            found, slot = loaded(manifest), SlotReader(manifest)
            raw = {spec.name: (spec.shape, bytes(data)) for spec, data in slot.tensors()}
            slot.check()
            assert found.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert found[name].dtype == tensor.dtype
                assert torch.equal(found[name], tensor)
                assert raw[name] == (tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().tobytes())
            items = [*stored_tensors(Path(manifest.path) / "model.safetensors")]


def test_sharded_checkpoints_are_read_through_their_index(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (source / "model.safetensors").unlink()
    names = list(SHAPES)
    for i, part in enumerate((names[:2], names[2:])):
        save_file({name: values(0)[name] for name in part}, source / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{i // 2}.safetensors" for i, name in enumerate(names)}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        manifest = publish(writer, 1)
        assert {item.spec.name for item in writer.layout.tensors} == set(SHAPES)
        assert sorted(os.listdir(manifest.path)) == ["config.json", "model.safetensors", "slot.state", "tokenizer.json"]
        SlotReader(manifest)
    (source / "model-1.safetensors").unlink()
    with pytest.raises(errors.CheckpointUnavailable, match=r"lacks model-1\.safetensors"):
        SlotWriter(tmp_path / "slots", source)


# --- tearing -------------------------------------------------------------------------------------------------------


def test_a_slot_being_overwritten_is_torn_for_its_readers_and_the_newest_is_not(writer: SlotWriter) -> None:
    """And a copy that was taken meanwhile is refused."""
    old, newest = publish(writer, 1), publish(writer, 2)
    slot = SlotReader(old)
    copied = [data.copy() for _, data in slot.tensors()]
    slot.check()
    seen: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in values(3).items():
            yield name, tensor
            SlotReader(newest)
            with pytest.raises(errors.TornWeights, match="is being written"):
                SlotReader(old)
            seen.append(name)

    writer.write(3, 0, tensors())
    assert len(seen) == len(SHAPES)
    with pytest.raises(errors.TornWeights, match="discard the tensors read"):
        slot.check()
    assert copied[0].view(np.float32)[0] == 1.0


def test_a_failed_write_leaves_the_newest_in_place_and_its_own_slot_torn(writer: SlotWriter) -> None:
    first, second = publish(writer, 1), publish(writer, 2)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a.weight", values(3)["a.weight"]
        raise ConnectionError("a rank went away")

    with pytest.raises(ConnectionError):
        writer.write(3, 0, broken())
    SlotReader(second)
    with pytest.raises(errors.TornWeights):
        SlotReader(first)
    third = publish(writer, 3)
    assert third.path == first.path
    assert third.generation == 6  # 2 published, 3 failed, 5 written again
    SlotReader(second)
    SlotReader(third)


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.pop("b.bias"), "lacks 1 of 4 tensors, 'b.bias'"),
    (lambda t: t.update({"x": torch.zeros(1)}), "'x' of version 9 is not in the slot's layout"),
    (lambda t: t.update({"b.bias": torch.zeros(6)}), r"shape \(6,\), the slot was laid out for \(5,\)"),
])  # fmt: skip
def test_wrong_tensors_are_refused_by_name(writer: SlotWriter, change, words) -> None:
    tensors = values(9)
    change(tensors)
    with pytest.raises(errors.LayoutMismatch, match=words):
        writer.write(9, 0, iter(tensors.items()))
    with pytest.raises(errors.LayoutMismatch, match="offered twice"):
        writer.write(9, 0, iter([*values(9).items(), *values(9).items()]))
    _, stored = next(stored_tensors(Path(publish(writer, 1).path) / "model.safetensors"))
    other = msgspec.structs.replace(stored, spec=msgspec.structs.replace(stored.spec, dtype="I32"))
    with pytest.raises(errors.LayoutMismatch, match="is stored as I32, the slot was laid out for"):
        writer.write(9, 0, iter([(other.spec.name, other)]))


# Tensors that end in the middle of a piece, span pieces, and are empty where one begins; 1,000 bytes in all.
PIECED = {"a": (4, 30), "b": (0,), "c": (8,), "d": (25, 4), "e": (22,)}
SMALL_PIECE = 64


def pieced(root: Path, monkeypatch: pytest.MonkeyPatch) -> closing[SlotWriter]:
    """Slots whose digest has 16 pieces, the last of 40 bytes."""
    for module in ("reader", "writer"):
        monkeypatch.setattr(f"models.weights.shared_memory_{module}.PIECE_BYTES", SMALL_PIECE)
    monkeypatch.setattr(shared_memory_writer, "ASIDE_BYTES", SMALL_PIECE // 2)  # some parts by the writer's own thread
    return slots_of(root, {name: torch.zeros(shape) for name, shape in PIECED.items()})


@pytest.mark.parametrize("backwards", [False, True])
def test_the_digest_is_of_all_pieces_in_their_order(
    backwards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the tensors come, each byte is digested once, and only when it is there. A flipped bit in any piece is
    found."""
    with pieced(tmp_path, monkeypatch) as writer:
        tensors = [(name, torch.randn(shape)) for name, shape in PIECED.items()]
        manifest = writer.write(1, 0, iter(tensors[::-1] if backwards else tensors))
        data = b"".join(tensor.numpy().tobytes() for _, tensor in tensors)
        assert len(data) == 1000
        pieces = [data[start : start + SMALL_PIECE] for start in range(0, 1000, SMALL_PIECE)]
        assert manifest.digest == xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, pieces)))
        file = Path(manifest.path) / "model.safetensors"
        for place in (-1, *range(-20, -1000, -SMALL_PIECE), -1000):
            flip(file, place)
            for anew in (True, False):
                with pytest.raises(errors.DigestMismatch, match=f"announced was {manifest.digest}"):
                    SlotReader(manifest, anew=anew)
            flip(file, place)
            SlotReader(manifest)


def test_tensors_that_are_cast_or_not_contiguous_are_copied_in_pieces_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pieced(tmp_path, monkeypatch) as writer:
        tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in PIECED.items()}
        tensors["d"] = torch.randn(4, 25).t()
        assert not tensors["d"].is_contiguous()
        found = loaded(writer.write(1, 0, iter(tensors.items())))
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())


def test_a_part_that_cannot_be_copied_ends_the_write_and_leaves_the_other_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pieced(tmp_path, monkeypatch) as writer:
        monkeypatch.setattr(shared_memory_writer, "ASIDE_BYTES", 1)  # all by other threads
        tensors = {name: torch.randn(shape) for name, shape in PIECED.items()}
        manifest = writer.write(1, 0, iter(tensors.items()))
        stored = dict(stored_tensors(Path(manifest.path) / "model.safetensors"))
        short = msgspec.structs.replace(stored["d"], data=stored["d"].data[:200])
        with pytest.raises(ValueError, match="could not broadcast"):
            writer.write(2, 0, iter((stored | {"d": short}).items()))
        SlotReader(manifest)
        SlotReader(writer.write(3, 0, iter(stored.items())))


def test_tensors_that_are_made_for_their_copy_do_not_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that a trainer puts together from its ranks, one after the other."""
    copied: list[int] = []
    behind = []
    begun = threading.Event()

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(40):
            behind.append(number - len(copied))
            if number == 5:
                begun.set()
            yield f"t{number}", torch.full((16,), float(number))

    def slowly(writing: Any, *given: Any) -> None:
        begun.wait(30)  # so that the first of them are as far behind as they may be
        time.sleep(0.002)
        copy(writing, *given)
        copied.append(1)

    monkeypatch.setattr(shared_memory_writer, "ASIDE_BYTES", 1)
    monkeypatch.setattr(shared_memory_writer, "AHEAD", 4)
    copy = shared_memory_writer._ParallelWrite._copy
    monkeypatch.setattr(shared_memory_writer._ParallelWrite, "_copy", slowly)
    with slots_of(tmp_path, {f"t{number}": torch.zeros(16) for number in range(40)}) as writer:
        writer.write(1, 0, made())
    assert max(behind) == 5


def test_a_version_is_verified_once_for_all_that_share_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those who ask anew, and not a later version, other claims, or another file under the same name."""
    digested = count_digests(monkeypatch, "reader")
    with slots_of(tmp_path) as writer:
        manifests = [publish(writer, version) for version in range(2)]
        nbytes = writer.layout.data_bytes
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: SlotReader(manifests[0], anew=False), range(8)))
        assert sum(digested) == nbytes, "those that come meanwhile wait for the first"
        SlotReader(manifests[1], anew=False)
        assert sum(digested) == 2 * nbytes
        SlotReader(manifests[1])
        assert sum(digested) == 3 * nbytes
        for wrong in ({"digest": "0" * 32}, {"version": 7}):
            before = sum(digested)
            with suppress(errors.DigestMismatch):
                SlotReader(msgspec.structs.replace(manifests[1], **wrong), anew=False)
            assert sum(digested) == before + nbytes
        publish(writer, 2)
        with pytest.raises(errors.TornWeights):
            SlotReader(manifests[0], anew=False)
        SlotReader(manifests[1], anew=False)
        before, path = sum(digested), Path(manifests[1].path) / "model.safetensors"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        SlotReader(manifests[1], anew=False)
        assert sum(digested) == before + nbytes


def read_mappings(directory: Path) -> list[tuple[str, int]]:
    """Address, and kB that are there, of each mapping of slots' weights that only reads, in the order of files."""
    found = re.findall(
        rf"(\w+)-\w+ r--s .*({directory}/.*/model.safetensors)(?: \(deleted\))?\n(?:.*\n)*?Rss: *(\d+) kB",
        Path("/proc/self/smaps").read_text(),
    )
    return [(address, int(size)) for address, file, size in sorted(found, key=lambda one: one[1])]


def test_a_slot_is_mapped_once_for_all_its_versions(tmp_path: Path) -> None:
    """To map its pages takes more than half the time of a copy. Only the slots of one trainer stay mapped, and no other
    directory: the pages of removed files would stay as long."""
    with slots_of(tmp_path) as writer:
        SlotReader(publish(writer, 0), anew=False)
        [(_, read)] = read_mappings(tmp_path)
        assert 1024 * read >= writer.layout.file_bytes
        SlotReader(publish(writer, 1))
        mapped = read_mappings(tmp_path)
        assert len(mapped) == 2
        for version in range(2, 5):
            manifest = publish(writer, version)
            found = {spec.name: bytes(data) for spec, data in SlotReader(manifest).tensors()}
            assert found == {name: tensor.numpy().tobytes() for name, tensor in values(version).items()}
            assert read_mappings(tmp_path) == mapped
        kept = tmp_path / "evaluated-4"
        shutil.copytree(manifest.path, kept)
        SlotReader(msgspec.structs.replace(manifest, path=str(kept)))
        assert read_mappings(tmp_path) == mapped
        path = Path(manifest.path) / "model.safetensors"
        (tmp_path / "other").write_bytes(path.read_bytes())
        (tmp_path / "other").replace(path)
        SlotReader(manifest)
        assert read_mappings(tmp_path) != mapped, "another file of the same name"
    (tmp_path / "next").mkdir()
    with slots_of(tmp_path / "next") as writer:
        for version in range(2):
            SlotReader(publish(writer, version))
        assert len(read_mappings(tmp_path)) == 2, "those of the last trainer"


def test_slots_of_a_killed_owner_are_taken_over_if_they_fit(tmp_path: Path) -> None:
    """Readers have their files mapped: new ones would lie in memory beside them. What it published stays readable until
    it is overwritten, and then it is torn."""
    source = checkpoint(tmp_path / "source")
    killed = SlotWriter(tmp_path / "slots", source)
    published = [publish(killed, version) for version in range(3)]
    (tmp_path / "slots" / "slot-0" / "config.json").write_text("cut")
    (tmp_path / "slots" / "evaluated-2").mkdir()
    before = [(Path(one.path) / "model.safetensors").stat().st_ino for one in published]
    os.close(killed._lease._lock)  # as the kernel does when it is killed
    lease = slot_directory.DirectoryLease(tmp_path / "slots", kept="slot-")
    assert sorted(os.listdir(lease.directory)) == ["owner.pid", "slot-0", "slot-1"]
    writer = SlotWriter(lease.directory, source, leased=True)
    assert (tmp_path / "slots" / "slot-0" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    SlotReader(published[2])
    manifests = [publish(writer, version) for version in range(5, 7)]
    assert [(Path(one.path) / "model.safetensors").stat().st_ino for one in manifests] == before[:2]
    assert [one.generation for one in manifests] == [6, 4]
    for torn in published[1:]:
        with pytest.raises(errors.TornWeights):
            SlotReader(torn)
    for manifest in manifests:
        SlotReader(manifest)
    for name, tensor in (("w", torch.ones(3)), ("v", torch.ones(3)), ("v", torch.ones(67))):  # two of one size
        other = checkpoint(tmp_path / f"{name}{len(tensor)}", {name: tensor})
        new = SlotWriter(lease.directory, other, leased=True).write(9, 0, iter([(name, tensor)]))
        assert new.generation == 2
        SlotReader(new)
    lease.release()


@pytest.mark.slow
def test_a_trainer_that_starts_again_needs_no_room_beside_slots_that_are_mapped(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed stays on the disk as long as a reader has it mapped."""
    monkeypatch.setattr(shared_memory_reader, "_mapped", {})  # those of this test end with it
    tensors = {"w": torch.zeros(8 << 20)}  # 32 MiB, and two slots on a disk of 80
    source = checkpoint(small_disk.parent / "large", tensors)
    killed = SlotWriter(small_disk / "slots", source)
    published = [killed.write(version, 0, iter(tensors.items())) for version in range(2)]
    readers = [SlotReader(manifest) for manifest in published]
    os.close(killed._lease._lock)  # as the kernel does when it is killed
    killed._slots.clear()
    lease = slot_directory.DirectoryLease(small_disk / "slots", kept="slot-")
    writer = SlotWriter(lease.directory, source, leased=True)
    SlotReader(writer.write(7, 0, iter([("w", torch.ones(8 << 20))])))
    with pytest.raises(errors.TornWeights):
        readers[0].check()
    readers[1].check()
    lease.release()


def count_digests(monkeypatch: pytest.MonkeyPatch, end: str) -> list[int]:
    """Bytes that the reading or the writing end digests from now on."""
    digested: list[int] = []

    def digest(piece: npt.NDArray[np.uint8]) -> bytes:
        digested.append(len(piece))
        return digest_of(piece)

    monkeypatch.setattr(f"models.weights.shared_memory_{end}.digest_of", digest)
    return digested


class CopiedBytes(TorchDispatchMode):
    """Bytes that operations of torch write into memory, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.count += out.nbytes
        return out


@pytest.mark.parametrize(
    ("stored", "offered"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_a_version_is_copied_once_and_digested_once_on_its_way_out(
    stored: torch.dtype, offered: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the types: a cast to those of the source happens in the copy."""
    digested, copies = count_digests(monkeypatch, "writer"), CopiedBytes()
    copied, by_numpy = [], np.copyto

    def copyto(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        copied.append(target.nbytes)
        by_numpy(target, source)

    tensors = {name: torch.full(shape, 1 / 3).to(offered) for name, shape in SHAPES.items()}
    wanted = {name: value.to(stored) for name, value in tensors.items()}
    with slots_of(tmp_path, wanted) as writer:
        monkeypatch.setattr(np, "copyto", copyto)
        with copies:
            manifest = writer.write(1, 0, iter(tensors.items()))
        monkeypatch.undo()
        nbytes = writer.layout.data_bytes
        assert sum(copied) + copies.count == nbytes
        assert bool(copied) == (stored == offered), "bytes that stay as they are need no operation of torch"
        assert sum(digested) == nbytes
        found = loaded(manifest)
        assert all(found[name].dtype == stored and torch.equal(found[name], wanted[name]) for name in SHAPES)


def test_sources_that_cannot_serve_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(errors.CheckpointUnavailable, match=r"holds no \*\.safetensors"):
        SlotWriter(tmp_path / "slots", empty)
    broken = checkpoint(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(errors.SourceError, match="is no safetensors file"):
        read_layout(broken / "model.safetensors")
    quantised = checkpoint(tmp_path / "quantised", {"w": torch.zeros(4, dtype=torch.int8)})
    with pytest.raises(errors.SourceError, match="has dtype I8; slots hold F32, BF16, F16"):
        SlotWriter(tmp_path / "slots", quantised)
    assert not (tmp_path / "slots").exists()


# Cutting a slot into buckets.


TENSOR_SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(TORCH_NAMES)), TENSOR_SHAPES), min_size=1, max_size=30)


@given(SPECS, st.integers(1, 2000))
def test_buckets_are_the_file_end_to_end_and_aligned(tensors: list[tuple[str, tuple[int, ...]]], limit: int) -> None:
    layout = lay_out(TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors))
    buckets = plan_buckets(layout, limit)
    ends = [layout.data_start, *(item.end for item in layout.tensors)]
    assert [item.start for item in layout.tensors] == ends[:-1]
    assert (ends[0] % 64, ends[-1]) == (0, layout.file_bytes)
    assert all(item.start % ELEMENT_BYTES[item.spec.dtype] == 0 for item in layout.tensors)
    assert [item for bucket in buckets for item in bucket.tensors] == list(layout.tensors)
    assert buckets[0].start == layout.data_start
    assert buckets[-1].end == layout.file_bytes
    assert all(a.end == b.start for a, b in pairwise(buckets))
    for bucket in buckets:
        sized = [item for item in bucket.tensors if item.end > item.start]
        assert bucket.nbytes <= limit or len(sized) == 1
        for item in bucket.tensors:
            assert (item.start - bucket.start) % ELEMENT_BYTES[item.spec.dtype] == 0
    for bucket, after in pairwise(buckets):
        assert after.tensors[0].end - bucket.start > limit, "another tensor would have fitted"


# Weight slots among processes: a writer that never waits, killed owners, leftovers, and where the slots lie.


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


@pytest.mark.slow
def test_a_reader_beside_a_writer_that_never_waits_accepts_only_whole_versions(tmp_path: Path) -> None:
    """The writer overwrites at full speed and knows nothing of readers: what passes the checks must be uniform."""
    tensors = {f"t{i}": torch.zeros(256, 1024) for i in range(4)}
    source = checkpoint(tmp_path / "source", tensors)
    process = start_writer(tmp_path / "slots", source, 300)
    accepted = torn = 0
    held: SlotManifest | None = None
    try:
        for _, line in zip(range(300), process.stdout, strict=False):
            manifest = slot_manifest(line)
            for claim in filter(None, (manifest, held)):
                try:
                    slot = SlotReader(claim)
                    copies = [data.copy().view(np.float32) for _, data in slot.tensors()]
                    slot.check()
                except errors.TornWeights:
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


@pytest.mark.slow
def test_a_killed_owners_directory_is_removed_and_a_live_ones_is_not(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    slots = tmp_path / f"{slot_directory.PREFIX}run"
    process = start_writer(slots, source, 1)
    manifest = slot_manifest(process.stdout.readline())
    try:
        assert slot_directory.remove_stale(tmp_path) == []
        with pytest.raises(errors.SlotDirectoryError, match=f"in use by process {process.pid}"):
            SlotWriter(slots, source)
        SlotReader(manifest)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert slots.exists()
    SlotReader(manifest)  # what a dead writer published stays whole
    assert slot_directory.remove_stale(tmp_path) == [slots]
    with pytest.raises(errors.TornWeights, match=r"slot\.state is gone"):
        SlotReader(manifest)


@pytest.mark.slow
def test_the_directory_is_private_and_removed_on_close(tmp_path: Path) -> None:
    with slots_of(tmp_path) as writer:
        publish(writer, 1)
        for path in (tmp_path / "slots", tmp_path / "slots" / "slot-0"):
            assert path.stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "slots" / "owner.pid").read_text() == f"{os.getpid()}\n"
    writer.close()
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.slow
def test_a_directory_that_is_no_slot_directory_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / f"{slot_directory.PREFIX}mine"
    mine.mkdir()
    (mine / "data").write_text("keep")
    assert not slot_directory.remove_if_stale(mine)
    with pytest.raises(errors.SlotDirectoryError, match="in use by another program"):
        slot_directory.DirectoryLease(mine)
    link = tmp_path / f"{slot_directory.PREFIX}link"
    link.symlink_to(mine)
    assert slot_directory.remove_stale(tmp_path) == []
    assert (mine / "data").read_text() == "keep"


def test_a_dead_owners_directory_is_taken_over_and_emptied(tmp_path: Path) -> None:
    lost = slot_directory.DirectoryLease(tmp_path / f"{slot_directory.PREFIX}run")
    (lost.directory / "slot-0").mkdir()
    (lost.directory / "left").touch()
    os.close(lost._lock)  # as the kernel does when the owner is killed
    lease = slot_directory.DirectoryLease(lost.directory)
    assert os.listdir(lease.directory) == [slot_directory.OWNER_FILE]
    assert slot_directory.remove_stale(tmp_path) == []
    lease.release()


SWEEPER = """
import sys
from pathlib import Path
from models.weights.slot_directory import remove_stale
print("ready", flush=True)
while True:
    remove_stale(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_restarted_owner_gets_its_directory_while_other_runs_start(tmp_path: Path) -> None:
    """The start of a run removes what killed runs left, also between the death of a trainer and its next start."""
    slots = tmp_path / f"{slot_directory.PREFIX}run"
    command = [sys.executable, "-c", SWEEPER, str(tmp_path)]
    with subprocess.Popen(["true"]) as dead:
        pass
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as sweeper:
        try:
            sweeper.stdout.readline()
            for _ in range(100):
                lease = slot_directory.DirectoryLease(slots)
                for name in range(50):
                    (slots / f"slot-{name}").mkdir()
                (slots / slot_directory.OWNER_FILE).write_text(str(dead.pid))
                os.close(lease._lock)
            assert sweeper.poll() is None
        finally:
            sweeper.kill()


def test_a_directory_that_goes_while_its_owner_is_asked_for_is_taken(tmp_path: Path) -> None:
    """Another process removes what a dead owner left: its last step comes at each instruction of `_foreign` in turn."""
    directory = tmp_path / f"{slot_directory.PREFIX}run"
    moment = passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if frame.f_code is not slot_directory._foreign.__code__:
            return None
        frame.f_trace_opcodes = True
        passed += event == "opcode"
        if passed == moment:
            shutil.rmtree(directory, ignore_errors=True)
        return trace

    before = sys.gettrace()
    for moment in range(1, 100):  # the question is asked a second time before
        passed = 0
        directory.mkdir()  # its lock is gone already
        sys.settrace(trace)
        try:
            slot_directory.DirectoryLease(directory).release()
        finally:
            sys.settrace(before)
        assert passed >= moment


@pytest.mark.slow
def test_shared_memory_is_chosen_only_with_room_for_two(tmp_path: Path, monkeypatch) -> None:
    shared, fallback = tmp_path / "shm", tmp_path / "run"
    shared.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(4000, 1800, 2200))
    name = f"{slot_directory.PREFIX}x"
    assert slot_directory.choose_directory("x", fallback, 1000, shared_memory=shared) == shared / name
    assert slot_directory.choose_directory("x", fallback, 1001, shared_memory=shared) == fallback / name
    assert slot_directory.choose_directory("x", fallback, 1, shared_memory=tmp_path / "absent") == fallback / name


@pytest.mark.slow
def test_no_room_is_an_error_before_the_first_write(tmp_path: Path, monkeypatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    source = checkpoint(tmp_path / "source")
    with pytest.raises(errors.SlotSpaceError, match=r"no room for two slots of \d+ bytes"):
        SlotWriter(tmp_path / "slots", source)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.slow
def test_what_a_killed_runs_processes_left_in_shared_memory_goes_with_its_directory(tmp_path: Path) -> None:
    """And nothing else that is listed: neither what lies elsewhere, nor what lives."""
    mine, elsewhere = slot_directory.SHARED_MEMORY / f"sem.mp-sluice-test-{os.getpid()}", tmp_path / "precious"
    for path in (mine, elsewhere):
        path.write_text("x")
    lease = slot_directory.DirectoryLease(tmp_path / f"{slot_directory.PREFIX}run")
    try:
        slot_directory.list_left_behind(lease.directory, [mine, elsewhere])
        slot_directory.list_left_behind(lease.directory, [slot_directory.SHARED_MEMORY / "gone already"])
        assert slot_directory.remove_stale(tmp_path) == []
        assert mine.exists()
        os.close(lease._lock)  # as the kernel does when the owner is killed
        assert slot_directory.remove_stale(tmp_path) == [lease.directory]
        assert not mine.exists()
        assert elsewhere.exists()
    finally:
        mine.unlink(missing_ok=True)


def test_what_torch_left_of_a_killed_process_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    numbers = [f"{pid}_{os.getpid()}_{n}" for pid in (ended.pid, os.getpid()) for n in "01"]
    files = [slot_directory.SHARED_MEMORY / f"torch_{number}" for number in numbers]
    other = slot_directory.SHARED_MEMORY / f"torch_{ended.pid}9_{os.getpid()}"
    for release in ("stale", "ended"):
        for path in (*files, other):
            path.write_text("x")
        try:
            lease = slot_directory.DirectoryLease(tmp_path / f"{slot_directory.PREFIX}{release}")
            patterns = [slot_directory.torch_files(pid) for pid in (ended.pid, os.getpid())]
            slot_directory.list_left_behind(lease.directory, patterns)
            if release == "stale":
                os.close(lease._lock)
                assert slot_directory.remove_stale(tmp_path) == [lease.directory]
            else:
                lease.release()
            assert [path.exists() for path in (*files, other)] == [False, False, True, True, True]
        finally:
            for path in (*files, other):
                path.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_draft_is_left_to_its_maker_for_a_while(tmp_path: Path) -> None:
    """Its maker may be about to lock it; one of a killed maker is empty, or has a lock that nobody holds."""
    young, empty, unlocked = (tmp_path / f".{slot_directory.PREFIX}{name}" for name in ("young", "empty", "unlocked"))
    for draft in (young, empty, unlocked):
        draft.mkdir()
    for draft in (young, unlocked):
        (draft / slot_directory.OWNER_FILE).touch()
    for draft in (empty, unlocked):
        os.utime(draft, (0, 0))
    assert slot_directory.remove_stale(tmp_path) == [unlocked]
    assert os.listdir(tmp_path) == [young.name]
