"""The learning rate, and what a trainer saves, resumes, exports and moves: exact, in Hugging Face's format."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from configs.schema.train import TrainConfig
from models.errors import BackendMisuse, CheckpointUnavailable, TrainStateUnreadable
from models.families.source import CheckpointTensors
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.train.device_memory import DeviceMemory
from models.train.huggingface import hf_files
from models.train.huggingface.checkpoint import Updater
from models.train.huggingface.loading import Placement
from models.train.spec import learning_rate
from models.train.trainer import Trainer
from tests.models.test_checkpoint import check_every_flip_is_noticed
from tests.models.train.families.family_models import save_model
from tests.models.train.rig import (
    differing,
    make_backend,
    make_sequences,
    make_spec,
    state_of,
    train_batch,
    unchanged,
    weights_of,
)


def rates(total: int | None, steps: int, **fields: object) -> list[float]:
    train = TrainConfig(lr=1.0, **fields)  # type: ignore[arg-type]
    return [learning_rate(step, train, total) for step in range(steps)]


def test_warm_up_and_decay() -> None:
    """A warm-up is a number or a share of the steps."""
    linear = rates(6, 8, lr_decay_style="linear", lr_warmup_iters=2, min_lr=0.2)
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = rates(4, 6, lr_decay_style="cosine", min_lr=0.1)
    assert cosine == pytest.approx([1.0, 0.1 + 0.9 * 0.853553, 0.55, 0.1 + 0.9 * 0.146447, 0.1, 0.1], abs=1e-5)
    share = rates(8, 8, lr_warmup_fraction=0.5)
    assert share == rates(8, 8, lr_warmup_iters=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0])


def test_no_gradient_at_all_is_no_update() -> None:
    updater = Updater(torch.nn.Linear(2, 2), TrainConfig(), None, Placement(make_spec(Path("unused"))))
    assert not updater.update(1.0).applied
    assert updater.updates == 0


SCHEDULE = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "min_lr": 1e-5, "lr": 1e-2, "weight_decay": 0.1}
PPO = {"advantage_estimator": "ppo", "critic_lr": 1e-3}
RENEWED = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1}


def train(backend: Trainer, seeds: Iterable[int]) -> list[dict[str, float]]:
    return [metrics for seed in seeds for metrics in train_batch(backend, make_sequences(seed, rewards=True))]


@pytest.mark.parametrize(
    "fields", [SCHEDULE | {"total_steps": 6}, PPO | {"num_critic_only_steps": 1, "normalize_advantages": True}]
)
def test_resuming_is_bit_identical_to_not_stopping(backend, tmp_path: Path, fields: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    unbroken = backend(**fields)
    train(unbroken, range(3))
    unbroken.save(tmp_path / "state")
    expected = train(unbroken, range(3, 6))
    assert "train/critic_only" not in expected[0]

    resumed = backend(**fields)
    resumed.load(tmp_path / "state")
    assert train(resumed, range(3, 6)) == expected
    assert differing(state_of(resumed), state_of(unbroken)) == []


def test_what_is_on_disk(backend, tiny: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    made = backend(**PPO)
    made.save(tmp_path / "state")
    train(made, range(1))
    made.save(tmp_path / "state")  # replaces it
    files = {str(path.relative_to(tmp_path / "state")) for path in (tmp_path / "state").rglob("*") if path.is_file()}
    assert {"hf/model.safetensors", "hf/config.json", "trainer/optimizer.safetensors", "trainer/state.json"} <= files
    assert "trainer/critic.safetensors" in files
    assert not [name for name in files if name.endswith((".pt", ".bin", ".pkl", ".pth"))]
    assert set(check_every_flip_is_noticed(tmp_path / "state", tmp_path / "checkpoints")) >= files
    assert json.loads((tmp_path / "state/trainer/state.json").read_text())["updates"] == 1

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "state/hf")
    assert loaded.config.use_cache is True  # training leaves no trace in what generates
    assert differing(loaded.state_dict(), made._models.model.state_dict()) == []
    old, new = AutoTokenizer.from_pretrained(tiny), AutoTokenizer.from_pretrained(tmp_path / "state/hf")
    assert new("1+2=3\n")["input_ids"] == old("1+2=3\n")["input_ids"]
    assert GenerationConfig.from_pretrained(tmp_path / "state/hf").eos_token_id == new.eos_token_id
    # The saved model starts another run.
    again = backend(hf_checkpoint=str(tmp_path / "state/hf"))
    assert differing(weights_of(again), weights_of(made)) == []


@pytest.mark.parametrize("tie", [True, False])
def test_export_is_what_save_pretrained_writes(backend, tmp_path: Path, tie: bool) -> None:  # type: ignore[no-untyped-def]
    directory = make_tiny_checkpoint(
        tmp_path / "model", TinyRecipe(hidden_size=32, num_layers=2, tie_word_embeddings=tie)
    )
    made = backend(hf_checkpoint=str(directory))
    exported = list(made.export_weights())
    assert [name for name, _ in exported] == [name for name, _ in made.export_weights()]
    with safe_open(directory / "model.safetensors", framework="pt") as stored:
        assert sorted(name for name, _ in exported) == sorted(stored.keys())
        for name, tensor in exported:
            assert torch.equal(tensor, stored.get_tensor(name))
            assert not tensor.requires_grad
    assert ("lm_head.weight" in dict(exported)) is (not tie)


def test_fused_experts_are_exported_one_by_one(tmp_path: Path) -> None:
    model = save_model("qwen3_moe", tmp_path / "moe")
    with safe_open(tmp_path / "moe/model.safetensors", framework="pt") as stored:
        exported = dict(hf_files.hf_tensors(model, device=model.device, dtype=None, sort=hf_files.converts(model)))
        assert sorted(exported) == sorted(stored.keys())
        assert all(torch.equal(tensor, stored.get_tensor(name)) for name, tensor in exported.items())
    half = dict(hf_files.hf_tensors(model, device=model.device, dtype=torch.bfloat16, sort=False))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


def test_nothing_is_saved_in_the_middle_of_a_batch(backend, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = backend()
    made.accumulate(make_sequences())
    with pytest.raises(BackendMisuse, match="finish the batch with step"):
        made.save(tmp_path / "state")
    with pytest.raises(BackendMisuse, match="load while"):
        made.load(tmp_path / "state")


def lacking(file: str, name: str) -> Callable[[Path], None]:
    """A file loses one of its tensors."""

    def spoil(state: Path) -> None:
        path = state / f"trainer/{file}.safetensors"
        save_file({key: one for key, one in load_file(path).items() if key != name}, path)

    return spoil


def of_version_99(state: Path) -> None:
    path = state / "trainer/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))


def test_unreadable_states_are_refused_and_change_nothing(backend, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = backend(**PPO)
    train(made, range(1))
    made.save(tmp_path / "state")
    train(made, range(1))
    for spoil, words in (
        (shutil.rmtree, "no complete training state .* resume from another checkpoint"),
        (lambda state: (state / "trainer/state.json").write_bytes(b"{"), "no complete training state"),
        (lambda state: (state / "trainer/optimizer.safetensors").write_bytes(b"{"), "no complete training state"),
        (of_version_99, "format version 99"),
        (lacking("optimizer", "rng/cpu"), "no complete training state"),
        (lacking("critic", "updates"), "no complete training state"),
        (lacking("critic", "weights/value_head.bias"), "the critic in .* has other names or shapes"),
    ):
        shutil.copytree(tmp_path / "state", tmp_path / "spoilt")
        spoil(tmp_path / "spoilt")
        with unchanged(made), pytest.raises(TrainStateUnreadable, match=words):
            made.load(tmp_path / "spoilt")
        shutil.rmtree(tmp_path / "spoilt", ignore_errors=True)
    made.load(tmp_path / "state")


def test_states_of_runs_with_other_options_are_refused_and_change_nothing(backend, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plain = backend()
    train(plain, range(1))
    plain.save(tmp_path / "plain")
    assert not (tmp_path / "plain/trainer/reference.safetensors").exists()
    other = make_tiny_checkpoint(tmp_path / "other", TinyRecipe(tokenizer="arithmetic", hidden_size=48, num_layers=1))
    for fields, words in (
        (PPO, "holds no critic, which this run needs"),
        (RENEWED, "holds no reference"),
        ({"hf_checkpoint": str(other)}, "has other names or shapes"),
    ):
        made = backend(**fields)
        with unchanged(made), pytest.raises(TrainStateUnreadable, match=words):
            made.load(tmp_path / "plain")


def test_a_full_disk_is_an_error_of_the_system(backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import safetensors.torch

    save = safetensors.torch.save_file

    def full(tensors: dict[str, torch.Tensor], path: Path, **more: object) -> None:
        if path.name == "optimizer.safetensors":
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, path, **more)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"cannot be written.*No space left.*optimizer\.safetensors") as caught:
        backend().save(tmp_path / "state")
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "state/trainer/state.json").exists()


def test_training_goes_on_as_if_nothing_had_moved(tiny: Path) -> None:
    """With a reference and a critic. What would still be read in the engines' turn is empty then."""
    stayed, moved = (make_backend(tiny, **PPO, kl_coef=0.1) for _ in range(2))
    batch = make_sequences(4, rewards=True)
    for backend in (stayed, moved):
        train_batch(backend, batch, version=2)
    held = list(moved._models.model.parameters())
    kept, _ = moved._models.device_tensors()
    for tensor in kept:  # on a CPU, weights lie in the mapped file until they are copied
        tensor.data = tensor.detach().clone()
    moved.offload()
    assert {tensor.untyped_storage().nbytes() for tensor in kept} == {0}
    moved.begin_batch(rollouts=4, steps=1, version=3)
    moved.discard()  # a batch that does not fill up
    moved.onload()
    assert all(one is other for one, other in zip(held, moved._models.model.parameters(), strict=True))
    assert differing(weights_of(moved), weights_of(stayed)) == []
    results = [train_batch(backend, batch, version=2)[0] for backend in (stayed, moved)]
    assert results[0] == pytest.approx(results[1])
    assert differing(state_of(stayed), state_of(moved)) == []


def test_memory_comes_back_with_its_contents_and_what_is_cleared_with_zeros() -> None:
    """Several views of one storage are copied once; storage that is not the device's own stays."""
    whole = torch.arange(12.0)
    views, cleared = [whole[:4], whole[4:].view(2, 4), whole], torch.full((3,), 7.0)
    file = torch.frombuffer(bytearray(b"held elsewhere"), dtype=torch.uint8)
    memory = DeviceMemory()
    memory.offload(torch.device("cpu"), [*views, file], [cleared])
    assert memory.away
    assert [tensor.untyped_storage().nbytes() for tensor in (whole, cleared, file)] == [0, 0, 14]
    memory.onload()
    assert not memory.away
    assert whole.tolist() == list(range(12))
    assert views[1].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert cleared.tolist() == [0.0, 0.0, 0.0]
    assert bytes(file.tolist()) == b"held elsewhere"


# Hugging Face directories: cut into files, complete or not there, and bit-identical.


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with everything that may lie beside the weights."""
    path = tmp_path / "source"
    path.mkdir()
    config = {"model_type": "qwen3", "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (path / hf_files.CONFIG).write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_text(f'"{name}"')
    for name in (hf_files.WEIGHTS, hf_files.INDEX, "pytorch_model.bin"):
        (path / name).write_bytes(b"other weights")
    return path


def tensors(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{number}.weight": torch.randn((8, 4), generator=generator) for number in range(count)}  # 128 bytes


def stored(directory: Path) -> dict[str, torch.Tensor]:
    with CheckpointTensors(directory) as found:
        return {name: found.whole(name) for name in found.files}


def test_files_hold_no_more_than_requested_and_the_index_names_every_weight(source: Path, tmp_path: Path) -> None:
    out, written = tmp_path / "out", tensors(7)
    hf_files.write_hf(out, iter(written.items()), source, max_shard_bytes=300)
    index = json.loads((out / hf_files.INDEX).read_text())
    assert index["metadata"]["total_size"] == 7 * 128
    assert index["weight_map"].keys() == written.keys()
    assert sorted(file.name for file in out.glob("*.safetensors")) == [
        f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)
    ]
    assert not (out / hf_files.WEIGHTS).exists()
    assert differing(stored(out), written) == []
    # However it is cut, it is the same checkpoint.
    hf_files.write_hf(tmp_path / "whole", iter(written.items()), source)
    assert hf_files.checksums(out) == hf_files.checksums(tmp_path / "whole")


def test_no_more_than_one_file_is_in_memory(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    flush = hf_files._ShardWriter._flush

    def spy(self: hf_files._ShardWriter) -> None:
        held.append(sum(tensor.nbytes for tensor in self._shard.values()))
        flush(self)
        assert not self._shard

    monkeypatch.setattr(hf_files._ShardWriter, "_flush", spy)
    large = {"large": torch.zeros(200)}  # 800 bytes: alone, although more than asked
    hf_files.write_hf(
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
    hf_files.write_hf(tmp_path / "out", iter(written.items()), source)
    found = stored(tmp_path / "out")
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    # None of them brought the whole of `flat` along.
    assert (tmp_path / "out" / hf_files.WEIGHTS).stat().st_size < 4 * (4 + 8 + 12 + 12 + 12) + 1000


@pytest.mark.parametrize(
    ("dtype", "quantised", "name"),
    [(torch.float32, False, "float32"), (torch.bfloat16, False, "bfloat16"), (torch.float8_e4m3fn, True, "bfloat16")],
)
def test_the_configuration_says_what_was_written(
    source: Path, tmp_path: Path, dtype: torch.dtype, quantised: bool, name: str
) -> None:
    bias = ("bias", torch.zeros(2, dtype=torch.float32))
    hf_files.write_hf(tmp_path / "out", iter([("weight", torch.zeros(64, dtype=dtype)), bias]), source)
    config = json.loads((tmp_path / "out" / hf_files.CONFIG).read_text())
    assert config == {"model_type": "qwen3", "torch_dtype": name} | (
        {"quantization_config": {"quant_method": "fp8"}} if quantised else {}
    )


def test_without_its_configuration_a_directory_is_incomplete(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hf_files.write_hf(out, iter(tensors(7).items()), source, max_shard_bytes=300)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(3).items()
        raise ValueError("the model is gone")

    with pytest.raises(ValueError, match="the model is gone"):
        hf_files.write_hf(out, broken(), source, max_shard_bytes=300)
    assert not (out / hf_files.CONFIG).exists()
    assert not (out / hf_files.INDEX).exists()
    hf_files.write_hf(out, iter(tensors(1).items()), source)  # and nothing of it is left behind
    assert sorted(path.name for path in out.iterdir() if "model" in path.name) == [hf_files.WEIGHTS]
    assert (out / hf_files.CONFIG).exists()


def test_a_rank_that_does_not_write_runs_the_tensors_to_their_end(source: Path, tmp_path: Path) -> None:
    left = iter(tensors().items())
    hf_files.write_hf(tmp_path / "out", left, source, writes=False)
    assert list(left) == []
    assert not (tmp_path / "out").exists()


def test_names_come_once_and_the_source_stays(source: Path) -> None:
    with pytest.raises(ValueError, match="comes twice"):
        hf_files.write_hf(source.parent / "out", iter([("a", torch.zeros(1)), ("a", torch.zeros(1))]), source)
    with pytest.raises(ValueError, match="would overwrite its source"):
        hf_files.write_hf(source, iter(tensors().items()), source)
    assert (source / hf_files.WEIGHTS).read_bytes() == b"other weights"


def test_a_checksum_tells_names_shapes_precisions_and_bits_apart(source: Path, tmp_path: Path) -> None:
    one = torch.tensor([[1.0, 2.0]])
    assert hf_files.checksum(one) == hf_files.checksum(one.clone())
    different = [one.t(), one.bfloat16(), one + 1e-7, -one, torch.empty(0), torch.empty((0, 2))]
    assert len({hf_files.checksum(tensor) for tensor in [one, *different]}) == 7
    assert hf_files.checksum(torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, 0]) == hf_files.checksum(
        torch.tensor([1.0, 2.0])
    )
    hf_files.write_hf(tmp_path / "out", iter([("one", one)]), source)
    assert hf_files.checksums(tmp_path / "out") == {"one": hf_files.checksum(one)}


def test_what_is_missing_or_damaged_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hf_files.write_hf(out, iter(tensors(7).items()), source, max_shard_bytes=300)
    (out / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointUnavailable, match=r"lacks model-00002-of-00004\.safetensors"):
        hf_files.checksums(out)
    (out / hf_files.INDEX).write_text("{")
    with pytest.raises(CheckpointUnavailable, match="cannot be read"):
        hf_files.checksums(out)
    with pytest.raises(CheckpointUnavailable, match=r"holds no \*\.safetensors"):
        hf_files.checksums(tmp_path)
    save_file(tensors(), tmp_path / hf_files.WEIGHTS)
    (tmp_path / hf_files.WEIGHTS).write_bytes((tmp_path / hf_files.WEIGHTS).read_bytes()[:-100])
    with pytest.raises(CheckpointUnavailable, match="cannot be read"):
        hf_files.checksums(tmp_path)
