"""Training in shards is training: several processes make the updates of one that holds all, and go on where others
stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fsdp_rig import CASES, EXPERTS, RESUMED, STEPS, TIED, UNTIED, expected_of, make_architecture, resume, run

from models.tiny import TinyRecipe, make_tiny_checkpoint
from tests.models.train.rig import TINY, differing, read, same, same_metrics, trainer_groups

DEADLINE_S = 200
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fsdp")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`2`: of two processes in shards; `alone2`: the same in one process; `one`: resumed in one process."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("fsdp")
    checkpoints = root / "checkpoints"
    for name in (TIED, UNTIED):
        make_tiny_checkpoint(
            checkpoints / name, TinyRecipe(tokenizer="arithmetic", tie_word_embeddings=name == TIED, **TINY)
        )
    make_architecture("deepseek_v3", checkpoints / EXPERTS)
    for name in ("2", "4", "alone2", "alone4", "one", "states", "again"):
        (root / name).mkdir()
    try:
        make_results(root, 2)
        resume(checkpoints, root / "one", root / "states", root / "again")
        yield root
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def make_results(root: Path, world: int) -> None:
    paths = (root / "checkpoints", root / str(world), root / "states")
    with trainer_groups(run, paths, [world], root / "rendezvous", DEADLINE_S):
        expected_of(root / "checkpoints", root / f"alone{world}", world)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def world(results: Path, request: pytest.FixtureRequest) -> int:
    """Also `4`, which resumes what the two saved, and `alone4`."""
    if request.param == 4 and not any((results / "4").iterdir()):  # pytest asks anew for each test that names it
        make_results(results, 4)
    return int(request.param)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=[pytest.mark.full] if world == 4 else [])
        for world, cases in CASES.items()
        for name in cases
    ],
    indirect=["world"],
)
def test_shards_make_the_updates_of_one_process(results: Path, world: int, name: str) -> None:
    """Four steps: metrics, gradient norms, log-probs, exported names, order and values, moments."""
    wanted, expected = read(results / f"alone{world}", f"{name}-0")
    tolerance = 5e-2 if name == "bf16" else 1e-5
    for rank in range(world):
        found, tensors = read(results / str(world), f"{name}-{rank}")
        same_metrics(found["metrics"], wanted["metrics"], rel=tolerance, abs=tolerance)
        assert found["log_probs"] == pytest.approx(wanted["log_probs"], abs=tolerance)
        if rank:
            assert not found["names"]  # only the first is given contents
            continue
        assert found["names"] == wanted["names"]
        if name == "bf16":
            tensors = {key: one for key, one in tensors.items() if "moments" not in key}
            expected = {key: one for key, one in expected.items() if "moments" not in key}
        same(tensors, expected, tolerance, tolerance)
    moved = [
        key for key in expected if f"before/{key}" in expected and not expected[key].equal(expected[f"before/{key}"])
    ]
    assert moved
    assert all(metrics["train/grad_norm"] > 0 for metrics in wanted["metrics"])


def test_lora_moves_adapters_alone(results: Path, world: int) -> None:
    """Of four processes, some shards are empty."""
    _, tensors = read(results / str(world), "lora-0")
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
def test_a_state_of_two_processes_goes_on_in_others(results: Path, world: int, name: str) -> None:
    """Written by a thread while training went on; loaded alone, saved again, loaded again. With four: loaded in other
    shards, saved again, loaded as HSDP."""
    directory = results / ("one" if world == 2 else "4")
    for rank in range(world if world == 4 else 1):  # each has the random state of one of the two
        found, _ = read(directory, f"resumed-{name}-{rank}")
        wanted, _ = read(results / "2", f"unbroken-{name}-{rank % 2}")
        assert found["draw"] == wanted["draw"]
    wanted, expected = read(results / "2", f"unbroken-{name}-0")
    assert len(wanted["metrics"]) == STEPS - 2
    found, tensors = read(directory, f"resumed-{name}-0")
    same_metrics(found["metrics"], wanted["metrics"], rel=1e-5, abs=1e-5)
    same(tensors, expected, 2e-6, 2e-6)
    steps = [one for key, one in tensors.items() if key.endswith("/step")]
    assert steps
    assert all(step == STEPS for step in steps)


def test_the_hugging_face_part_of_a_state_is_the_policy(results: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, tensors = read(results / "one", "resumed-ppo-0")
    directory = results / "again" / "ppo" / "hf"
    saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    assert len(AutoTokenizer.from_pretrained(directory)) == 32
    differences = [
        float((one - tensors[f"weights/{key}"]).abs().max())
        for key, one in saved.items()
        if f"weights/{key}" in tensors
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
    same(stored, merged, 1e-6, 1e-6)
    assert len(differing(before, stored)) == 14
