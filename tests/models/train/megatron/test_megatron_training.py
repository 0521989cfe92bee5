"""Training on Megatron, whatever the layout, is training on torch in one process: log-probs, metrics, weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import DEADLINE_S, SELECTIONS, Case
from megatron_rig import RECIPES, make_models, make_spec, train
from safetensors.torch import load_file

from models.train.huggingface.models import TorchModels
from models.train.trainer import Trainer
from tests.models.train.rig import PACKING

SHARED = ("branches", "branches_flat")
Expected = dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]


def of_torch(models: Path, cases: Sequence[Case]) -> Expected:
    return {
        name: train(Trainer(make_spec(recipe, models), TorchModels), recipe)
        for name, recipe in RECIPES.items()
        if any(name in case.recipes for case in cases)
    }


def same_number(found: float, expected: float, *, loose: bool) -> bool:
    if not math.isfinite(expected):
        return repr(found) == repr(expected) or not math.isfinite(found)
    return found == pytest.approx(expected, rel=0.3 if loose else 2e-5, abs=0.1 if loose else 2e-6)


def differences(case: Case, recipe: str, out: Path, expected: Expected) -> list[str]:
    """What is not as it should be, in words."""
    loose = case.layout.get("train_dtype") == "bfloat16"
    wanted, tensors = expected[recipe]
    wrong = []
    for rank in range(case.world):
        where = f"{case.name} {recipe} rank {rank}"
        found = json.loads((out / f"{case.name}-{recipe}-{rank}.json").read_text())
        numbers = load_file(out / f"{case.name}-{recipe}-{rank}.safetensors")
        names = sorted(wanted["names"]) if rank == 0 else []
        if sorted(found["names"]) != names:
            wrong.append(f"{where}: exported {sorted(set(found['names']) ^ set(names))}")
        for key, tensor in numbers.items():
            apart = float((tensor.float() - tensors[key]).abs().max())
            if tensor.shape != tensors[key].shape or not apart <= (0.05 if loose else 1e-5):
                wrong.append(f"{where}: {key} is off by {apart}")
        for step, (have, want) in enumerate(zip(found["metrics"], wanted["metrics"], strict=True)):
            if have.keys() != want.keys():
                wrong.append(f"{where}, step {step}: metrics {sorted(have.keys() ^ want.keys())}")
            wrong += [
                f"{where}, step {step}: {key} is {have[key]}, not {want[key]}"
                for key in have.keys() & want.keys() - PACKING
                if not same_number(have[key], want[key], loose=loose)
            ]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["few", pytest.param("all", marks=pytest.mark.full)])
def test_every_layout_trains_as_torch_does(tmp_path: Path, selection: str) -> None:
    cases = SELECTIONS[selection]
    models, out = tmp_path / "models", tmp_path / "out"
    out.mkdir()
    make_models(models)
    here = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "SLUICE_TEST_PATH": os.pathsep.join([here, *(path for path in sys.path if path)]),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, f"{here}/megatron_cases.py", str(models), str(out), selection]
    program = subprocess.Popen(command, env=environment)
    try:
        expected = of_torch(models, cases)  # meanwhile
        assert program.wait(3 * DEADLINE_S) == 0
    finally:
        program.kill()
    wrong = [text for case in cases for recipe in case.recipes for text in differences(case, recipe, out, expected)]
    assert not wrong, "\n".join(wrong[:40])
    check_expectations(expected)
    check_branches(out)
    check_passes(out, cases)


def check_passes(out: Path, cases: Sequence[Case]) -> None:
    """A pipeline runs one schedule for a step of a few micro-batches, however they come; the reference is put in the
    policy's place, and taken out again, once for a batch; only where a process holds several chunks is anything sent
    while it computes."""
    for case in cases:
        for recipe in case.recipes:
            found = json.loads((out / f"{case.name}-{recipe}-0.json").read_text())
            fields, steps = RECIPES[recipe].fields, RECIPES[recipe].steps
            batches = steps // RECIPES[recipe].steps_per_batch
            assert found["exchanges"] == (2 * batches if fields.get("use_kl_loss") else 0), (case.name, recipe)
            if "pipeline_model_parallel_size" in case.layout:
                models = 2 if fields.get("advantage_estimator") == "ppo" else 1
                assert found["schedules"] == models * steps, (case.name, recipe)
            assert (found["sends"] > 0) is ("virtual_pipeline_model_parallel_size" in case.layout), (case.name, recipe)


def check_branches(out: Path) -> None:
    """On Megatron, rollouts that share tokens train as the flat batch that was written by hand."""
    found, flat = (json.loads((out / f"one-{name}-0.json").read_text())["metrics"] for name in SHARED)
    assert [one["train/loss"] for one in found] == pytest.approx([one["train/loss"] for one in flat], abs=1e-6)
    assert [one["train/grad_norm"] for one in found] == pytest.approx(
        [one["train/grad_norm"] for one in flat], abs=1e-6
    )
    branches, by_hand = (load_file(out / f"one-{name}-0.safetensors") for name in SHARED)
    for key, tensor in by_hand.items():
        if key.startswith("weights/"):
            torch.testing.assert_close(branches[key], tensor, atol=1e-6, rtol=0)


def check_expectations(expected: Expected) -> None:
    """What is compared above would show a mistake: losses move, the reference differs, the broken step is refused."""
    five = [metrics["train/loss"] for metrics in expected["five"][0]["metrics"]]
    assert len(set(five)) == 5
    assert expected["five"][0]["metrics"][1]["train/kl_loss"] > 1e-4
    assert float((expected["five"][1]["before"] - expected["five"][1]["after"]).abs().max()) > 1e-2
    skipped = [metrics["train/skipped_steps"] for metrics in expected["broken"][0]["metrics"]]
    assert skipped == [0.0, 1.0, 1.0]
    assert expected["renewed"][0]["metrics"][0]["train/kl_loss"] > 1e-3  # of another checkpoint
    assert all(metrics["train/critic_grad_norm"] > 0 for metrics in expected["ppo"][0]["metrics"])
