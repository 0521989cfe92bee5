"""Hugging Face directories: cut into files, complete or not there, and bit-identical."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.errors import CheckpointUnavailable
from models.families.source import CheckpointTensors
from models.train.huggingface import hf_files
from models.train.huggingface.hf_files import CONFIG, INDEX, WEIGHTS, checksum, checksums, write_hf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with everything that may lie beside the weights."""
    path = tmp_path / "source"
    path.mkdir()
    config = {"model_type": "qwen3", "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (path / CONFIG).write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_text(f'"{name}"')
    for name in (WEIGHTS, INDEX, "pytorch_model.bin"):
        (path / name).write_bytes(b"other weights")
    return path


def tensors(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{number}.weight": torch.randn((8, 4), generator=generator) for number in range(count)}  # 128 bytes


def stored(directory: Path) -> dict[str, torch.Tensor]:
    with CheckpointTensors(directory) as found:
        return {name: found.whole(name) for name in found}


def test_files_hold_no_more_than_asked_and_the_index_names_every_weight(source: Path, tmp_path: Path) -> None:
    out, written = tmp_path / "out", tensors(7)
    write_hf(out, iter(written.items()), source, max_shard_bytes=300)
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == 7 * 128
    assert index["weight_map"].keys() == written.keys()
    assert sorted(file.name for file in out.glob("*.safetensors")) == [
        f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)
    ]
    assert not (out / WEIGHTS).exists()
    assert all(torch.equal(tensor, written[name]) for name, tensor in stored(out).items())
    # However it is cut, it is the same checkpoint.
    write_hf(tmp_path / "whole", iter(written.items()), source)
    assert checksums(out) == checksums(tmp_path / "whole")


def test_no_more_than_one_file_is_in_memory(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    flush = hf_files._ShardWriter._flush

    def spy(self: hf_files._ShardWriter) -> None:
        held.append(sum(tensor.nbytes for tensor in self._shard.values()))
        flush(self)
        assert not self._shard

    monkeypatch.setattr(hf_files._ShardWriter, "_flush", spy)
    large = {"large": torch.zeros(200)}  # 800 bytes: alone, although more than asked
    write_hf(
        tmp_path / "out", iter((tensors() | large | {"last": torch.zeros(1)}).items()), source, max_shard_bytes=300
    )
    assert held == [256, 256, 128, 800, 4]


def test_views_and_names_of_the_same_memory_are_written_each(source: Path, tmp_path: Path) -> None:
    flat = torch.arange(12, dtype=torch.float32)
    written = {
        "head": flat[:4],
        "rest": flat[4:],
        "turned": flat.view(3, 4).t(),
        "again": flat,
        "once_more": flat,
        "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
        "nothing": torch.empty((0, 3)),
    }
    write_hf(tmp_path / "out", iter(written.items()), source)
    found = stored(tmp_path / "out")
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    # None of them brought the whole of `flat` along.
    assert (tmp_path / "out" / WEIGHTS).stat().st_size < 4 * (4 + 8 + 12 + 12 + 12) + 1000


@pytest.mark.parametrize(
    ("dtype", "quantised", "name"),
    [(torch.float32, False, "float32"), (torch.bfloat16, False, "bfloat16"), (torch.float8_e4m3fn, True, "bfloat16")],
)
def test_the_configuration_says_what_was_written(
    source: Path, tmp_path: Path, dtype: torch.dtype, quantised: bool, name: str
) -> None:
    bias = ("bias", torch.zeros(2, dtype=torch.float32))
    write_hf(tmp_path / "out", iter([("weight", torch.zeros(64, dtype=dtype)), bias]), source)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config == {"model_type": "qwen3", "torch_dtype": name} | (
        {"quantization_config": {"quant_method": "fp8"}} if quantised else {}
    )


def test_without_its_configuration_a_directory_is_incomplete(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_hf(out, iter(tensors(7).items()), source, max_shard_bytes=300)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(3).items()
        raise ValueError("the model is gone")

    with pytest.raises(ValueError, match="the model is gone"):
        write_hf(out, broken(), source, max_shard_bytes=300)
    assert not (out / CONFIG).exists()
    assert not (out / INDEX).exists()
    write_hf(out, iter(tensors(1).items()), source)  # and nothing of it is left behind
    assert sorted(path.name for path in out.iterdir() if "model" in path.name) == [WEIGHTS]
    assert (out / CONFIG).exists()


def test_who_does_not_write_runs_the_tensors_to_their_end(source: Path, tmp_path: Path) -> None:
    left = iter(tensors().items())
    assert write_hf(tmp_path / "out", left, source, writes=False) == 0
    assert list(left) == []
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch
    from safetensors import SafetensorError

    def full(*args: object, **kwargs: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"cannot be written.*No space left.*w\.safetensors") as caught:
        hf_files.write_tensors(tmp_path / "w.safetensors", tensors())
    assert caught.value.errno == errno.ENOSPC


def test_names_come_once_and_the_source_stays(source: Path) -> None:
    with pytest.raises(ValueError, match="comes twice"):
        write_hf(source.parent / "out", iter([("a", torch.zeros(1)), ("a", torch.zeros(1))]), source)
    with pytest.raises(ValueError, match="would overwrite its source"):
        write_hf(source, iter(tensors().items()), source)
    assert (source / WEIGHTS).read_bytes() == b"other weights"


def test_a_checksum_tells_names_shapes_precisions_and_bits_apart(source: Path, tmp_path: Path) -> None:
    one = torch.tensor([[1.0, 2.0]])
    assert checksum(one) == checksum(one.clone())
    different = [one.t(), one.bfloat16(), one + 1e-7, -one, torch.empty(0), torch.empty((0, 2))]
    assert len({checksum(tensor) for tensor in [one, *different]}) == 7
    assert checksum(torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, 0]) == checksum(torch.tensor([1.0, 2.0]))
    write_hf(tmp_path / "out", iter([("one", one)]), source)
    assert checksums(tmp_path / "out") == {"one": checksum(one)}


def test_what_is_missing_or_damaged_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_hf(out, iter(tensors(7).items()), source, max_shard_bytes=300)
    (out / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointUnavailable, match=r"lacks model-00002-of-00004\.safetensors"):
        checksums(out)
    (out / INDEX).write_text("{")
    with pytest.raises(CheckpointUnavailable, match="cannot be read"):
        checksums(out)
    with pytest.raises(CheckpointUnavailable, match=r"holds no \*\.safetensors"):
        checksums(tmp_path)
    save_file(tensors(), tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(CheckpointUnavailable, match="cannot be read"):
        checksums(tmp_path)
