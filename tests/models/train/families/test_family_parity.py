"""Each family in Megatron-core against transformers: log-probs, and weights there and back, at several layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_models import FAMILIES, gradients, log_probs, save_model, token_ids
from family_worker import CASES, run
from safetensors.torch import load_file, save_file

from models.convert import main, megatron_to_hf
from models.errors import CheckpointUnavailable
from tests.models.train.rig import MEGATRON, trainer_groups

TOLERANCE = 1e-5
DEADLINE_S = 600


class Reference(NamedTuple):
    """What transformers finds."""

    log_probs: torch.Tensor  # [2, 13]
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Reference]]:
    """A directory with one checkpoint per family, and the log-probs and gradients that transformers finds."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    for name in FAMILIES:
        model = save_model(name, root / name)
        with torch.no_grad():
            scores = log_probs(model(token_ids()).logits, token_ids())
        found[name] = Reference(scores, gradients(model))
    return root, found


@pytest.fixture(scope="module")
def results(checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What the first process of each case wrote."""
    out = tmp_path_factory.mktemp("worlds")
    with trainer_groups(
        run, (checkpoints[0], out), list(CASES), out / "rendezvous", imports=MEGATRON, deadline_s=DEADLINE_S
    ):
        pass
    return {case: load_file(out / f"{case}.safetensors") for cases in CASES.values() for case, *_ in cases}


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
@pytest.mark.parametrize(("case", "name"), [case[:2] for cases in CASES.values() for case in cases])
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
