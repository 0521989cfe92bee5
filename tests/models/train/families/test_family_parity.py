"""Each family in Megatron-core against transformers: log-probs, and weights there and back, at several layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, log_probs, save_model, token_ids
from family_worker import ENGINE
from safetensors.torch import load_file, save_file

from models.convert import main, megatron_to_hf
from models.errors import CheckpointUnavailable

TOLERANCE = 1e-5

TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EXPERT: dict[str, Any] = {"expert_model_parallel_size": 2}
ONE = [
    *[(name, name, {}) for name in FAMILIES],
    ("deepseek_v3-recompute", "deepseek_v3", {"recompute_granularity": "full"}),
    ("glm4-recompute", "glm4", {"recompute_activations": True}),
    *[(f"{name}{ENGINE}", name, {}) for name in ("qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "moonlight")],
]
TWO = [
    *[(f"{name}-tp2", name, TENSOR) for name in FAMILIES if name not in ("glm", "qwen2_yarn", "qwen3_moe_raw_scores")],
    *[(f"{name}-ep2", name, EXPERT) for name in ("qwen3_moe", "glm4_moe_groups", "deepseek_v3")],
    *[(f"{name}-pp2", name, PIPELINE) for name in ("qwen2_tied", "glm4")],
    ("glm4-tp2-whole-sequences", "glm4", {"tensor_model_parallel_size": 2}),
    ("qwen3-two-chunks", "qwen3", {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}),
    ("moonlight-pp2", "moonlight", {**PIPELINE, "decoder_last_pipeline_num_layers": 1}),
    ("glm4_moe-uneven-stages", "glm4_moe", {**PIPELINE, "decoder_first_pipeline_num_layers": 1}),
    ("deepseek_v3-tp2-whole-experts", "deepseek_v3", {**TENSOR, "expert_tensor_parallel_size": 1, **EXPERT}),
    *[(f"{name}-tp2{ENGINE}", name, TENSOR) for name in ("qwen2_tied", "glm4", "deepseek_v3")],
]
FOUR = [
    ("qwen2_tied-tp2-pp2", "qwen2_tied", {**TENSOR, **PIPELINE}),
    ("qwen2-tp4", "qwen2", {"tensor_model_parallel_size": 4, "sequence_parallel": False}),  # of 2 query groups
    ("deepseek_v3-tp2-ep2", "deepseek_v3", {**TENSOR, **EXPERT, "expert_tensor_parallel_size": 1}),
    ("qwen3_moe-ep2-pp2", "qwen3_moe", {**EXPERT, **PIPELINE, "decoder_first_pipeline_num_layers": 2}),
]


@pytest.fixture(scope="module")
def results(run_worlds: Callable[[dict[int, list[Any]]], Any]) -> Any:
    return run_worlds({1: ONE, 2: TWO, 4: FOUR})


def check(result: dict[str, torch.Tensor], reference: Any, checkpoint: Path) -> None:
    ids = token_ids()
    if "logits/rows" in result:
        rows = log_probs(result["logits/rows"], ids)
        assert (rows - reference.log_probs).abs().max() < TOLERANCE
        packed = log_probs(result["logits/packed"].reshape(*ids.shape, -1), ids)
        assert (packed - reference.log_probs).abs().max() < TOLERANCE
    for name, gradient in reference.gradients.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        difference = (result[f"gradient/{name}"] - gradient).abs().max()
        assert difference < 1e-4 * scale, f"{name}: {difference} of {scale}"
    saved = load_file(checkpoint / "model.safetensors")
    exported = {name: tensor for name, tensor in result.items() if not name.startswith(("logits/", "gradient/"))}
    assert exported.keys() == saved.keys()
    for name, tensor in saved.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name


@pytest.mark.slow
@pytest.mark.xdist_group("families")
@pytest.mark.parametrize(("case", "name"), [(case, name) for case, name, _options in [*ONE, *TWO, *FOUR]])
def test_a_family_scores_as_transformers_does_and_comes_back(
    case: str, name: str, results: Any, checkpoints: Any
) -> None:
    root, reference = checkpoints
    check(results[case], reference[name], root / name)


# `python -m models.convert`: there and back in processes of their own, and what `verify` finds.


ROOT = Path(__file__).parents[4]


THERE_AND_BACK = """
import sys
from models.convert import main

source, megatron, back = sys.argv[1:]
assert main(["hf-to-megatron", "--hf", source, "--out", megatron]) == 0
assert main(["megatron-to-hf", "--megatron", megatron, "--out", back]) == 0
assert main(["verify", "--megatron", megatron]) == 0
"""


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_a_conversion_there_and_back_is_bit_identical_and_verify_sees_one_changed_bit(tmp_path: Path) -> None:
    source, megatron, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    save_model("deepseek_v3", source, dtype=torch.bfloat16)
    done = python("-c", THERE_AND_BACK, source, megatron, back)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all tensors are equal\n"
    was, now = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert was.keys() == now.keys()
    assert all(was[name].dtype == now[name].dtype and torch.equal(was[name], now[name]) for name in was)

    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    was[name].view(torch.int16)[0, 0] ^= 1
    save_file(was, source / "model.safetensors", metadata={"format": "pt"})
    seen = python("-m", "models.convert", "verify", "--megatron", megatron, "--hf", source)
    assert seen.returncode == 1, seen.stderr
    assert seen.stdout.count("\n") == 1
    assert seen.stdout.startswith(f"{name}: bfloat16:24x32:")


def test_directories_that_cannot_be_used_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointUnavailable, match="is not empty; give a directory that does not exist yet"):
        megatron_to_hf(tmp_path / "none", tmp_path / "full")
    assert main(["megatron-to-hf", "--megatron", str(tmp_path / "none"), "--out", str(tmp_path / "new")]) == 2
    assert "has no config.json; give --hf DIR" in capsys.readouterr().err


def test_verify_without_anything_to_compare_with_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert main(["verify", "--megatron", str(tmp_path)]) == 2
    assert "checksums.json does not exist; give --hf DIR to compare with" in capsys.readouterr().err
