"""`python -m models.convert`: there and back in processes of their own, and what `verify` finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_models import save_model
from safetensors.torch import load_file, save_file

from models.convert import main, megatron_to_hf
from models.errors import CheckpointUnavailable

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
