"""Presets of published models: their place among the layers, what falls away, and whether each is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.layers import ConfigError
from configs.load import dump_toml, load, preset_names, preset_path, read_preset
from configs.plan.gpus import gpus_of
from configs.plan.run_estimate import estimate_run
from configs.rules.validate import checked
from configs.schema import Config

FIT_ONE_NODE = 33_000_000_000  # parameters
RUN = ("--prompt-data", "arithmetic", "--num-rollout", "3")


def settled(*argv: str) -> tuple[Config, tuple[str, ...]]:
    loaded = load([*RUN, *argv])
    return checked(loaded.config, loaded.given)


def faults_of(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        settled(*argv)
    return caught.value.faults


def checkpoint(folder: Path, name: str, **changes: Any) -> str:
    """A directory with the config.json of a preset, changed."""
    model = {**read_preset(name).values["model.architecture"], **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in model.items() if value != "absent"}), encoding="utf-8"
    )
    return str(folder)


def test_precedence(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[model]\nmodel = "qwen3-8b"\n[megatron]\ntensor_model_parallel_size = 2\n', encoding="utf-8")
    loaded = load([*RUN, "--config", str(recipe), "--actor-num-gpus-per-node", "8"])
    config = loaded.config
    assert config.parallel.actor_num_gpus_per_node == 8  # command line
    assert config.megatron.tensor_model_parallel_size == 2  # recipe
    assert config.train.hf_checkpoint == "Qwen/Qwen3-8B"  # preset
    assert config.train.lr == 1e-6  # default
    assert config.model.architecture["hidden_size"] == 4096
    assert loaded.given["train.hf_checkpoint"] == "train.hf_checkpoint in --model qwen3-8b"
    assert loaded.given["megatron.tensor_model_parallel_size"] == "megatron.tensor_model_parallel_size in mine.toml"
    above = load([*RUN, "--config", str(recipe), "--model", "qwen3-0.6b"]).config
    assert above.model.architecture["hidden_size"] == 1024
    none = load([*RUN, "--config", str(recipe), "--model", "none"]).config
    assert none.model.architecture == {}
    assert none.train.hf_checkpoint == "tiny"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-8B", "did you mean --model qwen3-8b?"),
        ("GLM4-9B", "did you mean --model glm4-9b?"),
        ("moonlight", "did you mean --model moonlight-16b-a3b?"),
        ("xyz", "choose one of deepseek-r1, deepseek-v3"),
    ],
)
def test_a_wrong_name(name: str, words: str) -> None:
    (fault,) = faults_of("--model", name)
    assert fault.startswith(f"--model is {name!r}, but there is no such preset")
    assert words in fault


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_is_right_and_fits(name: str) -> None:
    config, warnings = settled("--model", name)
    several = config.parallel.actor_num_nodes > 1
    assert [warning for warning in warnings if "--actor-num-nodes" not in warning] == []
    assert bool(warnings) is several, "no runner starts processes on several machines yet"
    found = estimate_run(config, config.model.architecture)
    assert found is not None
    assert found.trainer is not None
    assert found.trainer.fits
    assert found.engine is not None
    assert found.engine.kv_tokens > 200_000
    # One node's host holds what its eight processes offload.
    assert found.trainer.host * 8 < 1000 * 2**30


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_that_fits_starts_on_one_node_of_eight(name: str) -> None:
    config, _ = settled("--model", name)
    found, gpus = estimate_run(config, config.model.architecture), gpus_of(config)
    assert found is not None
    assert (gpus.nodes == 1) is (found.parameters < FIT_ONE_NODE)
    assert gpus.nodes > 1 or gpus.total == 8
    text = preset_path(name).read_text(encoding="utf-8")
    assert (f"Layout: {gpus.nodes} nodes of 8 GPUs" if gpus.nodes > 1 else "Layout: one node of 8 GPUs") in text


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_trains_with_fsdp_too(name: str) -> None:
    config, _ = settled("--model", name, "--train-backend", "fsdp")
    assert config.megatron == Config().megatron
    assert config.parallel.actor_num_gpus_per_node > 1
    assert config.train.gradient_checkpointing


def test_what_falls_away() -> None:
    config, _ = settled("--model", "qwen3-8b", "--train-backend", "torch")
    assert config.parallel == Config().parallel
    assert config.megatron == Config().megatron
    config, _ = settled("--model", "qwen3-8b", "--engine", "embedded")
    assert config.sglang == Config().sglang
    config, _ = settled("--model", "qwen3-8b", "--tensor-model-parallel-size", "1")
    assert not config.megatron.sequence_parallel
    config, _ = settled("--model", "deepseek-v3", "--pipeline-model-parallel-size", "1")
    assert config.megatron.decoder_last_pipeline_num_layers is None
    config, _ = settled("--model", "qwen3-8b", "--recompute-activations")
    assert config.megatron.recompute_granularity == "selective"
    assert config.megatron.recompute_method is None
    config, _ = settled("--model", "qwen3-8b", "--scale", "engine=3")
    assert config.sglang.rollout_num_gpus is None
    config, _ = settled("--model", "qwen3-8b", "--rollout-external-engine-addrs", "http://127.0.0.1:30000")
    assert config.sglang.rollout_num_gpus is None


def test_options_of_the_engine_merge_with_the_preset() -> None:
    config, _ = settled("--model", "qwen3-8b", "--sglang-mem-fraction-static", "0.7")
    assert config.sglang.sglang_args == {"mem_fraction_static": "0.7"}
    assert config.sglang.rollout_num_gpus == 4


def test_a_runs_own_configuration_is_read_back_as_it_was(tmp_path: Path) -> None:
    """Also where the command line took something away that the preset says."""
    config, _ = settled("--model", "qwen3-30b-a3b", "--rollout-num-gpus", "none", "--scale", "engine=1")
    file = tmp_path / "saved.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    assert load(["--config", str(file)]).config == config


def test_a_checkpoint_that_is_another_model_is_refused(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "qwen3-8b", hidden_size=2560, intermediate_size=9728)
    (fault,) = faults_of("--model", "qwen3-8b", "--hf-checkpoint", directory)
    assert "whose config.json differs from --model qwen3-8b in" in fault
    assert "hidden_size (2560, not 4096), intermediate_size (9728, not 12288)" in fault
    assert "correct the directory, or leave --model qwen3-8b out" in fault


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3-8b", {"max_position_embeddings": 262144, "rope_theta": 5e6}, None),
        ("qwen3-8b", {"head_dim": "absent"}, None),  # 4096 / 32 is 128 anyway
        ("qwen3-4b", {"head_dim": "absent"}, "head (80, not 128)"),
        ("qwen3-30b-a3b", {"num_experts": "absent", "num_local_experts": 128}, None),
        ("qwen3-30b-a3b", {"num_experts": "absent", "num_local_experts": 64}, "num_experts (64, not 128)"),
        ("moonlight-16b-a3b", {"q_lora_rank": None, "head_dim": 64}, None),
        ("moonlight-16b-a3b", {"q_lora_rank": 1536}, "latent"),
        ("kimi-k2", {"model_type": "deepseek_v3"}, None),
        ("glm4-9b", {"model_type": "glm"}, "model_type (glm, not glm4)"),
    ],
)
def test_which_keys_may_differ(tmp_path: Path, name: str, changes: dict[str, Any], words: str | None) -> None:
    argv = ("--model", name, "--hf-checkpoint", checkpoint(tmp_path, name, **changes))
    if words is None:
        settled(*argv)
    else:
        assert any(words in fault for fault in faults_of(*argv))


def test_a_small_built_in_model_is_no_published_one() -> None:
    (fault,) = faults_of("--model", "qwen3-0.6b", "--hf-checkpoint", "tiny")
    assert "--hf-checkpoint is 'tiny', a small built-in one; leave one of them out" in fault


def test_an_architecture_without_a_preset() -> None:
    config, _ = settled("--model", "qwen3-0.6b", "--architecture", '{"num_hidden_layers": 4}')
    assert config.model.architecture["num_hidden_layers"] == 4
    assert config.model.architecture["hidden_size"] == 1024
