"""Reading checkpoints: what is accepted, what is refused with which words, and that a refusal changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from models.engines.embedded.transformer import LiveWeights, ModelSpec
from models.errors import EngineStartError, WeightsRefused
from tests.models.engines.harness import Bench

Checkpoints = Callable[..., Path]
CPU = torch.device("cpu")


def live(path: Path) -> LiveWeights:
    weights = LiveWeights(ModelSpec.read(path), CPU, torch.float32)
    weights.load(path)
    return weights


def variant(source: Path, target: Path, **config: object) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **config}))
    return target


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_names_and_checksums_are_those_of_the_checkpoint(checkpoints: Checkpoints, architecture: str) -> None:
    path = checkpoints(architecture=architecture, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    expected = {name: xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes()) for name, tensor in tensors.items()}
    assert live(path).checksums() == expected


def test_swap_is_in_place(checkpoints: Checkpoints) -> None:
    weights = live(checkpoints())
    before = {name: tensor.data_ptr() for name, tensor in weights.names.items()}
    first = weights.checksums()
    weights.load(checkpoints(seed=1))
    assert {name: tensor.data_ptr() for name, tensor in weights.names.items()} == before
    assert weights.checksums() != first
    weights.load(checkpoints())
    assert weights.checksums() == first


def test_sharded_checkpoints_and_other_precisions_load(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints()
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    table = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(names)}
    for file in set(table.values()):
        part = {name: tensors[name].to(torch.bfloat16) for name in names if table[name] == file}
        save_file(part, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    weights = live(source)
    weights.load(tmp_path)
    for name, tensor in weights.names.items():
        assert torch.equal(tensor, tensors[name].to(torch.bfloat16).float())


def test_a_head_beside_tied_embeddings_is_ignored(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints()
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    live(source).load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", r"does not fit the served model: missing model\.norm\.weight"),
        ("unknown", r"unknown model\.extra\.weight"),
        ("shape", r"model\.norm\.weight has shape \[7\], served is \[96\]"),
        ("dtype", r"model\.norm\.weight has dtype I32, expected one of F32"),
        ("torn", r"cannot be read"),
        ("empty", r"holds no \*\.safetensors; give a directory in Hugging Face format"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    checkpoints: Checkpoints, tmp_path: Path, damage: str, words: str
) -> None:
    tensors = load_file(checkpoints(seed=1) / "model.safetensors")
    name = "model.norm.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        tensors["model.extra.weight"] = torch.zeros(3)
    elif damage == "shape":
        tensors[name] = torch.zeros(7)
    elif damage == "dtype":
        tensors[name] = torch.zeros(96, dtype=torch.int32)
    file = tmp_path / "model.safetensors"
    if damage != "empty":
        save_file(tensors, file, metadata={"format": "pt"})
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-1000])
    bench = Bench(checkpoints())
    before = bench.engine._weights.checksums()
    [first] = bench.run(bench.make(list(range(1, 41)), max_new_tokens=3))
    with pytest.raises(WeightsRefused, match=words):
        bench.swap(tmp_path, "w2")
    assert bench.engine._weights.checksums() == before
    assert bench.stepper.label == "w1"
    [again] = bench.run(bench.make(list(range(1, 41)), max_new_tokens=3))
    assert (first.cached_tokens, again.cached_tokens) == (0, 39)  # nor is the cache lost


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            r"architectures=\['MixtralForCausalLM'\].*serve this model with SGLang",
        ),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*only silu"),
        ({"use_sliding_window": True}, "use_sliding_window=True.*only full attention"),
        ({"layer_types": ["sliding_attention"]}, "layer_types=.*only full attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*only unquantised"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters=.*default, linear and llama3"),
    ],
)
def test_models_that_cannot_be_served_are_named(
    checkpoints: Checkpoints, tmp_path: Path, config: dict[str, object], words: str
) -> None:
    with pytest.raises(EngineStartError, match=words):
        ModelSpec.read(variant(checkpoints(), tmp_path, **config))


def test_configurations_of_transformers_4_read_alike(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = variant(checkpoints(), tmp_path)
    values = json.loads((path / "config.json").read_text())
    del values["rope_parameters"]
    (path / "config.json").write_text(json.dumps({**values, "rope_theta": 10_000.0}))
    assert ModelSpec.read(path) == ModelSpec.read(checkpoints())


def test_directories_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"has no config\.json; give a Hugging Face checkpoint directory"):
        Bench(tmp_path)


def test_memory_bounds_the_slots(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.engines.embedded.engine._CPU_SHARE", 0.0)
    with pytest.raises(EngineStartError, match=r"one slot of 256 tokens needs .* set a smaller max_context_len"):
        Bench(checkpoints())


def test_devices_are_checked(checkpoints: Checkpoints) -> None:
    with pytest.raises(EngineStartError, match="engine_device='nonsense' is not a device; use auto, cpu"):
        Bench(checkpoints(), engine_device="nonsense")
