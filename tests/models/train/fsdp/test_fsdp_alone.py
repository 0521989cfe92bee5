"""Shards in one process: what is refused, what a reference is, what LoRA exports, what a state holds."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from fsdp_rig import ARCHITECTURES, GRPO, LORA, PPO, make_architecture, make_sequences, make_trainer, state_of, train
from torch.nn import Linear, Sequential

from models.errors import CheckpointUnavailable, TrainConfigInvalid, TrainStateUnreadable, UnsupportedModel
from models.train.huggingface.attention import PACKED_SDPA
from models.train.huggingface.hf_files import buckets
from models.train.huggingface.scoring import ContextParallel
from models.train.huggingface.sharded_loading import _compare
from models.train.huggingface.sharded_models import SHARDS, STATE, FsdpModels
from models.train.huggingface.whole_models import TorchModels
from models.train.step.packing import Packing
from models.train.trainer import Trainer
from tests.models.test_checkpoint import check_every_flip_is_noticed
from tests.models.train.rig import differing, same, train_batch, weights_of

Make = Callable[..., Trainer]


@pytest.fixture(scope="module", autouse=True)
def _group_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def make(tiny: Path) -> Make:
    return lambda *models, **fields: make_trainer(tiny, *models, **fields)


pytestmark = pytest.mark.slow


# ---------------------------------------------------------------------- sizes


def test_context_parallelism_wants_a_free_mask() -> None:
    context = ContextParallel(None)
    context.check(Packing(max_tokens=1, share_prompts=False))  # of no concern to one process
    context._group, context.size = object(), 2
    with pytest.raises(UnsupportedModel, match="--fsdp-context-parallel-size 2 needs attention whose mask"):
        context.check(Packing(max_tokens=1, share_prompts=False))
    model = torch.nn.Linear(1, 1)
    model.config = type("Config", (), {"_attn_implementation": "eager"})()
    with pytest.raises(UnsupportedModel, match="implemented for --attn-implementation sdpa"):
        context.prepare(model)


def test_weights_travel_by_layer() -> None:
    names = ["lm_head.weight", "m.layers.0.a", "m.layers.0.b.weight", "m.layers.1.a", "m.layers.10.a", "m.norm.weight"]
    assert [len(bucket) for bucket in buckets(names)] == [1, 2, 1, 1, 1]


# ---------------------------------------------------------------------- models


def test_a_checkpoint_that_is_not_there_is_named(make: Make) -> None:
    with pytest.raises(CheckpointUnavailable, match=r"hf_checkpoint='/does/not/exist' does not exist"):
        make(hf_checkpoint="/does/not/exist")
    with pytest.raises(CheckpointUnavailable, match=r"ref_load='/nor/this/one' does not exist"):
        make(ref_load="/nor/this/one", **GRPO)


def test_layers_that_are_compiled_keep_their_masks(make: Make) -> None:
    """The lengths of a micro-batch's sequences would be compiled in."""
    for compiled, attention in ((False, PACKED_SDPA), (True, "sdpa")):
        assert made_model(make(fsdp_compile=compiled)).config._attn_implementation == attention


@pytest.mark.parametrize("fields", [{}, {"train_dtype": "bfloat16"}, {"gradient_checkpointing": True}])
def test_sequences_are_attended_one_by_one_in_shards_too(make: Make, fields: dict[str, Any]) -> None:
    """Their lengths pass through the hooks of each sharded layer."""
    found = []
    for tokens in (0, 1000):
        trainer = make(max_tokens_per_gpu=64, **fields)
        score = cast("Any", trainer)._models._score
        score._passes = dataclasses.replace(score._passes, mask_tokens=tokens)
        found += train_batch(trainer, make_sequences(0))
    for name in ("train/loss", "train/grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=0.02 if "train_dtype" in fields else 1e-4), name
    assert found[0] != found[1], "the two ways round differently"


def made_model(trainer: Trainer) -> Any:
    return cast("Any", trainer)._models.model


def test_what_was_gathered_for_scoring_is_not_used_after_an_update(make: Make) -> None:
    """Scoring gathers parameters that no backward pass gives back."""
    shards, plain = make(fsdp_reshard_after_forward=False, lr=1e-2), make(TorchModels, lr=1e-2)
    found = []
    for trainer in (shards, plain):
        trainer.begin_batch(rollouts=12, steps=1)
        trainer.accumulate(make_sequences(0))
        trainer.flush()
        before = trainer.logprobs(make_sequences(0))
        trainer.step()
        found.append(trainer.logprobs(make_sequences(0)))
    for own, other, old in zip(*found, before, strict=True):
        assert abs(own - other).max() < 1e-5
        assert abs(own - old).max() > 1e-3


def test_a_gradient_that_is_not_finite_changes_nothing(make: Make) -> None:
    trainer = make()
    before = state_of(trainer)
    models: Any = trainer._models
    trainer.begin_batch(rollouts=12, steps=1)
    trainer.accumulate(make_sequences(0))
    trainer.flush()
    models.model.model.norm.weight.grad.to_local()[0] = float("inf")
    metrics = trainer.step()
    assert metrics["train/skipped_steps"] == 1
    assert metrics["train/grad_norm"] == float("inf")
    assert models.updater.updates == 0
    assert differing(state_of(trainer), before) == []


@pytest.fixture(scope="module")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("architectures")
    for name in ARCHITECTURES:
        make_architecture(name, root / name)
    return root


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_no_architecture_is_converted(architectures: Path, architecture: str) -> None:
    """What its configuration alone makes, filled layer by layer, is the model: scores, gradients, exported weights."""
    found = []
    for models in (FsdpModels, TorchModels):
        trainer = make_trainer(architectures / architecture, models, **GRPO)
        metrics = train(trainer, range(1))
        found.append((metrics, np.concatenate(trainer.logprobs(make_sequences(9))), list(trainer.export_weights())))
    (metrics, scores, weights), (wanted, expected, stored) = found
    assert metrics[0]["train/grad_norm"] == pytest.approx(wanted[0]["train/grad_norm"], rel=1e-5)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert [name for name, _ in weights] == [name for name, _ in stored]
    same(dict(weights), dict(stored), 1e-6, 1e-6)


def test_a_model_that_its_configuration_does_not_make_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"has a tensor 0.bias of \(3,\), where its configuration makes None"):
        _compare(Sequential(Linear(2, 3)), Sequential(Linear(2, 3, bias=False)))


# ---------------------------------------------------------------------- LoRA


def test_the_reference_of_lora_is_the_model_without_adapters(make: Make) -> None:
    trainer, base = make(**LORA), make(TorchModels, **GRPO)
    models: Any = trainer._models
    train(trainer, range(2))
    score = models.log_probs
    found: list[Any] = []

    def spy(batches: Any, model: str = "policy") -> Any:
        found.extend((score(batches, "policy"), score(batches, "reference")))
        return found[-1]

    models.log_probs = spy
    reference = trainer.logprobs(make_sequences(5))
    for own, expected in zip(reference, base.logprobs(make_sequences(5)), strict=True):
        assert abs(own - expected).max() < 1e-5
    assert max(abs(a - b).max() for a, b in zip(found[0], found[1], strict=True)) > 1e-3
    assert sum(parameter.numel() for _, parameter in models.updater.named_parameters) < 8000


def test_adapters_are_those_of_the_modules_that_are_named(make: Make) -> None:
    trainer = make(**LORA | {"lora_target_modules": ("q_proj", "down_proj")})
    before = weights_of(trainer)
    assert "lm_head.weight" not in before  # tied
    train(trainer, range(1))
    moved = differing(before, dict(trainer.export_weights()))
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "down_proj"}


def test_what_lora_does_not_train_has_no_master_copy(make: Make) -> None:
    trainer = make(**LORA | {"train_dtype": "bfloat16"})
    models: Any = trainer._models
    before = weights_of(trainer)
    train(trainer, range(2))
    kinds = {(parameter.dtype, parameter.requires_grad) for parameter in models.model.parameters()}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    after = dict(trainer.export_weights())
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert after["model.layers.0.mlp.up_proj.weight"].ne(before["model.layers.0.mlp.up_proj.weight"]).any()
    assert after["model.norm.weight"].equal(before["model.norm.weight"])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_lora_beside_stacked_experts_adapts_attention(architectures: Path, architecture: str) -> None:
    trainer = make_trainer(architectures / architecture, **LORA)
    before = weights_of(trainer)
    train(trainer, range(1))
    moved = differing(before, dict(trainer.export_weights()))
    assert moved
    assert all(".self_attn." in name for name in moved)
    assert any(name.endswith("o_proj.weight") for name in moved)


def test_lora_refuses_what_it_cannot_do(make: Make) -> None:
    with pytest.raises(TrainConfigInvalid, match=r"lora_target_modules=.*no_such_proj.* do not fit Qwen3ForCausalLM"):
        make(**LORA | {"lora_target_modules": ("no_such_proj",)})
    with pytest.raises(UnsupportedModel, match=r"embed_tokens of Qwen3ForCausalLM is no linear layer"):
        make(**LORA | {"lora_target_modules": ("embed_tokens",)})


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def damage(path: Path) -> None:
    """As long as before, but no safetensors file."""
    path.write_bytes(b"\xff" * path.stat().st_size)


def edit(path: Path, **fields: Any) -> None:
    path.write_bytes(msgspec.json.encode(json.loads(path.read_text()) | fields))


# What is done to a state, and the words with which it is refused.
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no state file": (lambda d: (d / STATE).unlink(), "holds no complete state of sharded training"),
    "another format": (lambda d: edit(d / STATE, format_version=9), "format version 9, this program reads 1"),
    "no shards": (lambda d: next((d / SHARDS).iterdir()).unlink(), "lacks .*safetensors as it was written"),
    "cut short": (lambda d: shorten(next((d / SHARDS).iterdir())), "lacks .*safetensors as it was written"),
    "damaged": (lambda d: damage(next((d / SHARDS).iterdir())), "holds no complete state of sharded training"),
}
# Options of a run, and what it refuses.
UNREADABLE: list[tuple[dict[str, Any], dict[str, tuple[Callable[[Path], object], str]]]] = [
    ({}, SPOILT),
    (PPO, {"no critic": (str, "holds no critic, which this run needs")}),
    (LORA, {"other parts": (str, "the policy in .* has other names or shapes")}),
]


@pytest.fixture(scope="module")
def saved(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "state"
    trainer = make(**GRPO)
    train(trainer, range(1))
    trainer.save(directory)
    return directory


@pytest.mark.parametrize(("fields", "ways"), UNREADABLE, ids=["spoilt", "critic", "lora"])
def test_an_unreadable_state_changes_nothing(
    make: Make, saved: Path, tmp_path: Path, fields: dict[str, Any], ways: dict[str, Any]
) -> None:
    trainer = make(**GRPO | fields)
    train(trainer, range(1))
    before = state_of(trainer)
    for way, (spoil, words) in ways.items():
        spoil(shutil.copytree(saved, tmp_path / way))
        with pytest.raises(TrainStateUnreadable, match=words):
            trainer.load(tmp_path / way)
        assert differing(state_of(trainer), before) == [], way
        assert trainer._counters.steps == 1


def test_a_flipped_byte_in_any_file_is_noticed(saved: Path, tmp_path: Path) -> None:
    files = check_every_flip_is_noticed(saved, tmp_path / "checkpoints")
    assert str(STATE) in files
    assert any(name.startswith(str(SHARDS)) for name in files)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_fails_says_so_and_leaves_no_state(make: Make, tmp_path: Path, in_background: bool) -> None:
    trainer = make(lambda spec: FsdpModels(spec, async_save=in_background))
    (tmp_path / "hf").write_text("in the way")

    def save() -> None:
        trainer.save(tmp_path)
        trainer._models.finish_save()  # type: ignore[attr-defined]

    with pytest.raises(OSError, match="hf"):
        save()
    assert not (tmp_path / STATE).exists()
    (tmp_path / "hf").unlink()
    save()
    trainer.load(tmp_path)


def test_a_state_is_replaced_whole(make: Make, tmp_path: Path) -> None:
    """Also by a writer that goes on training; no file of the state before is left."""
    trainer = make(lambda spec: FsdpModels(spec, async_save=True), **GRPO)
    trainer.save(tmp_path)
    (tmp_path / SHARDS / "stale.safetensors").write_bytes(b"")
    trainer.save(tmp_path)  # waits for the one before
    weights = state_of(trainer)
    train(trainer, range(1))
    trainer._models.finish_save()  # type: ignore[attr-defined]
    state = json.loads((tmp_path / STATE).read_text())
    assert set(state["files"]) == {file.name for file in (tmp_path / SHARDS).iterdir()}
    assert "stale.safetensors" not in state["files"]
    trainer.load(tmp_path)
    assert trainer._counters.steps == 0
    assert differing(state_of(trainer), weights) == []
