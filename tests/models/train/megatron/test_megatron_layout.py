"""Which layouts and options are taken, what is said of the others, and what the shim does not do."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron_rig import Recipe, make_spec

from models.errors import BackendMisuse, CheckpointUnavailable, TrainConfigInvalid
from models.train.megatron import processes
from models.train.megatron.processes import (
    SHIM_VERSION,
    ParallelSizes,
    build_layout,
    install_shim,
    install_shim_after_import,
    parallel_sizes,
    shim_installed,
)
from models.train.megatron.trained_models import check_optimizer
from models.train.megatron.weights import read_source
from models.train.spec import TrainSpec


def spec(**layout: Any) -> TrainSpec:
    return make_spec(Recipe("untied"), Path("models"), layout)


def test_what_is_left_is_data_parallel() -> None:
    layout = spec(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert parallel_sizes(layout, 8) == ParallelSizes(2, 2, None, 1, 1, 1, data=2)
    assert parallel_sizes(spec(virtual_pipeline_model_parallel_size=1), 3).virtual_pipeline is None


@pytest.mark.parametrize(
    ("world", "layout", "words"),
    [
        (3, {"tensor_model_parallel_size": 2}, "3 processes do not divide.*--actor-num-gpus-per-node"),
        (4, {"expert_model_parallel_size": 3}, "sets of experts of 3.*--expert-model-parallel-size"),
        (2, {"context_parallel_size": 2}, "Transformer Engine.*--context-parallel-size 1"),
    ],
)
def test_impossible_layouts_name_the_cure(
    world: int, layout: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "engine_installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainConfigInvalid, match=words):
        parallel_sizes(spec(**layout), world)


def test_an_optimizer_on_the_host_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainConfigInvalid, match="sees no GPU"):
        check_optimizer(spec(optimizer_cpu_offload=True))


def test_without_a_trainer_group_there_is_no_layout() -> None:
    with pytest.raises(BackendMisuse, match="no default group"):
        build_layout(spec())


def test_missing_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnavailable, match="hf_checkpoint='/no/such/place' does not exist"):
        read_source("/no/such/place", "hf_checkpoint")
    with pytest.raises(CheckpointUnavailable, match=r"without config\.json"):
        read_source(str(tmp_path), "ref_load")
    with pytest.raises(CheckpointUnavailable, match="has to be made first"):
        read_source("tiny", "hf_checkpoint")


def test_the_shim_leaves_a_machine_with_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = (torch.zeros, torch.Tensor.type, torch.cuda.current_device)
    install_shim()
    install_shim_after_import()
    assert before == (torch.zeros, torch.Tensor.type, torch.cuda.current_device)
    assert not shim_installed()


@pytest.mark.full
def test_experts_are_routed_without_transformer_engine_on_a_gpu_too() -> None:
    """In a process that takes its machine for one with a GPU: no shim, and the router on tensors of the CPU."""
    program = """
import torch
torch.cuda.is_available = lambda: True
from types import SimpleNamespace
from models.train.megatron.processes import install_shim, install_shim_after_import, shim_installed
from models.train.megatron import layers
install_shim()
install_shim_after_import()
assert not shim_installed()
config = SimpleNamespace(num_moe_experts=4, qk_layernorm=False)
layers._local_layer(SimpleNamespace(latent_attention=False, sandwich_norms=False), config, moe=True)
from megatron.core.transformer.moe.moe_utils import router_gating_linear
print(router_gating_linear(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None, torch.float32).tolist())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "[[1.0, 3.0], [2.0, 4.0]]"


def test_the_shim_is_for_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(TrainConfigInvalid, match=r"0\.17\.0.*megatron-core==0\.16\.1"):
        install_shim()
    assert not shim_installed()


def test_the_shim_comes_before_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: SHIM_VERSION)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(BackendMisuse, match="first in the process"):
        install_shim()
    assert not shim_installed()
