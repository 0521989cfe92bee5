"""Training in shards is training: several processes make the updates of one that holds all, and go on where others
stopped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_rig import CASES, EXPERTS, RESUMED, STEPS, TIED, UNTIED, expected_of, make_architecture, resume, run
from safetensors.torch import load_file

from models.tiny import make_tiny_checkpoint
from tests.models.train.rig import PACKING, run_ranks

DEADLINE_S = 200
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fsdp")]


def make_checkpoints(root: Path) -> Path:
    shape: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64}
    for name in (TIED, UNTIED):
        make_tiny_checkpoint(
            root / name, tokenizer="arithmetic", max_position_embeddings=128, tie_word_embeddings=name == TIED, **shape
        )
    make_architecture("deepseek_v3", root / EXPERTS)
    return root


def start(checkpoints: Path, out: Path, states: Path, world: int) -> None:
    imports = ["fsdp_rig", "transformers.models.qwen3.modeling_qwen3", "peft"]
    paths = (checkpoints, out, states)
    run_ranks(run, paths, world, out / "rendezvous", imports=imports, deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`<world>`: of processes in shards; `alone<world>`: the same in one process; `one`: resumed in one process."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("fsdp")
    checkpoints = make_checkpoints(root / "checkpoints")
    for name in ("2", "4", "alone2", "alone4", "one", "states", "again"):
        (root / name).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # for the process that forks
        try:
            for world in CASES:
                start(checkpoints, root / str(world), root / "states", world)
                expected_of(checkpoints, root / f"alone{world}", world)
            resume(checkpoints, root / "one", root / "states", root / "again")
            yield root
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def of(directory: Path, name: str, rank: int = 0) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((directory / f"{name}-{rank}.json").read_text()), load_file(
        directory / f"{name}-{rank}.safetensors"
    )


def same_metrics(found: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float) -> None:
    assert len(found) == len(wanted)
    for step, (have, want) in enumerate(zip(found, wanted, strict=True)):
        assert have.keys() == want.keys(), step
        for key in want.keys() - PACKING:
            assert have[key] == pytest.approx(want[key], rel=tolerance, abs=tolerance), (step, key)


def same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        torch.testing.assert_close(
            found[key], value, atol=tolerance, rtol=tolerance, msg=lambda text, k=key: f"{k}: {text}"
        )


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases])
def test_shards_make_the_updates_of_one_process(results: Path, world: int, name: str) -> None:
    """Five steps: metrics, gradient norms, log-probs, exported names, order and values, moments."""
    wanted, expected = of(results / f"alone{world}", name)
    tolerance = 5e-2 if name == "bf16" else 1e-5
    for rank in range(world):
        found, tensors = of(results / str(world), name, rank)
        same_metrics(found["metrics"], wanted["metrics"], tolerance)
        assert found["log_probs"] == pytest.approx(wanted["log_probs"], abs=tolerance)
        if rank:
            assert not found["names"]  # only the first is given contents
            continue
        assert found["names"] == wanted["names"]
        if name == "bf16":
            tensors = {key: one for key, one in tensors.items() if "moments" not in key}
            expected = {key: one for key, one in expected.items() if "moments" not in key}
        same_tensors(tensors, expected, tolerance)
    moved = [
        key for key in expected if f"before/{key}" in expected and not expected[key].equal(expected[f"before/{key}"])
    ]
    assert moved
    assert all(metrics["train/grad_norm"] > 0 for metrics in wanted["metrics"])


@pytest.mark.parametrize("world", [2, 4])
def test_lora_moves_adapters_alone(results: Path, world: int) -> None:
    _, tensors = of(results / str(world), "lora")
    trained = {key for key in tensors if key.startswith("policy/parameters/")}
    assert trained
    assert all(".lora_" in key for key in trained)
    for key in trained:
        assert not tensors[key].equal(tensors[f"before/{key}"]), key
    merged = {key for key in tensors if key.startswith("weights/") and not tensors[key].equal(tensors[f"before/{key}"])}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {key.split(".")[-2] for key in merged} == set(projections)
    assert len(merged) == len(projections) * 2


@pytest.mark.parametrize("name", list(RESUMED))
def test_a_state_of_two_processes_goes_on_in_four_and_in_one(results: Path, name: str) -> None:
    """Written by a thread while training went on; loaded in other shards, saved again, loaded as HSDP and alone."""
    wanted, expected = of(results / "2", f"unbroken-{name}")
    assert len(wanted["metrics"]) == STEPS - 2
    for rank in range(4):  # each has the random state of one of the two
        assert (
            of(results / "4", f"resumed-{name}", rank)[0]["draw"]
            == of(results / "2", f"unbroken-{name}", rank % 2)[0]["draw"]
        )
    for directory in ("4", "one"):
        found, tensors = of(results / directory, f"resumed-{name}")
        same_metrics(found["metrics"], wanted["metrics"], 1e-5)
        same_tensors(tensors, expected, 2e-6)
        assert found["draw"] == wanted["draw"]  # random states
        steps = [one for key, one in tensors.items() if key.endswith("/step")]
        assert steps
        assert all(step == STEPS for step in steps)


def test_the_hugging_face_part_of_a_state_is_the_policy(results: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, tensors = of(results / "one", "resumed-ppo")
    one = results / "again" / "ppo" / "hf"
    saved = AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).state_dict()
    assert len(AutoTokenizer.from_pretrained(one)) == 32
    differences = [
        float((saved[key.removeprefix("weights/")] - one).abs().max())
        for key, one in tensors.items()
        if key.startswith("weights/")
    ]
    assert 0 < max(differences) < 1e-2  # two steps older than the end


def test_the_adapter_of_a_state_is_one_of_peft(results: Path) -> None:
    """peft reads it, and its own merge gives the merged weights beside it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    state = results / "again" / "lora"
    base = AutoModelForCausalLM.from_pretrained(results / "checkpoints" / UNTIED, dtype=torch.float32)
    before = {name: one.clone() for name, one in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, str(state / "adapter")).merge_and_unload().state_dict()
    stored = AutoModelForCausalLM.from_pretrained(state / "hf", dtype=torch.float32).state_dict()
    assert merged.keys() == stored.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(stored[name], tensor, atol=1e-6, rtol=1e-6)
    assert sum(not before[name].equal(tensor) for name, tensor in stored.items()) == 14
