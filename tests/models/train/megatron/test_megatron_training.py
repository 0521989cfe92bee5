"""Training on Megatron, whatever the layout, is training on torch in one process: log-probs, metrics, weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_rig import FEW, MORE, Run, work
from megatron_rig import DEADLINE_S, RECIPES, SELECTIONS, Case, make_models, make_spec, run_cases, train

from models.train.huggingface.whole_models import TorchModels
from models.train.trainer import Trainer
from tests.models.test_checkpoint import check_every_flip_is_noticed
from tests.models.train.rig import MEGATRON, PACKING, read, trainer_groups

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
        found, numbers = read(out, f"{case.name}-{recipe}-{rank}")
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
    worlds, given = sorted({case.world for case in cases}), (models, out, selection)
    with trainer_groups(run_cases, given, worlds, tmp_path / "rendezvous", DEADLINE_S, MEGATRON):
        expected = of_torch(models, cases)
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
            if recipe == "five":  # in all processes
                check_hooks(
                    [json.loads((out / f"{case.name}-{recipe}-{rank}.json").read_text()) for rank in range(case.world)]
                )
            if "pipeline_model_parallel_size" in case.layout:
                models = 2 if fields.get("advantage_estimator") == "ppo" else 1
                assert found["schedules"] == models * steps, (case.name, recipe)
            assert (found["sends"] > 0) is ("virtual_pipeline_model_parallel_size" in case.layout), (case.name, recipe)


def check_hooks(ranks: Sequence[dict[str, Any]]) -> None:
    """slime's hooks: once at the start, before each pass for log-probs, and once before each of five steps."""
    for found in ranks:
        hooks = found["hooks"]
        assert hooks[0] == "init"
        assert [one for one in hooks if one.startswith("step")] == [f"step {step} 0" for step in range(5)]
        assert hooks.count("log_prob ref_") == 5, "the reference scores once for a batch"
        assert hooks[1] == hooks[-1] == "log_prob "


def check_branches(out: Path) -> None:
    """On Megatron, rollouts that share tokens train as the flat batch that was written by hand."""
    (found, branches), (flat, by_hand) = (read(out, f"one-{name}-0") for name in ("branches", "branches_flat"))
    for key in ("train/loss", "train/grad_norm"):
        ours, wanted = ([one[key] for one in made["metrics"]] for made in (found, flat))
        assert ours == pytest.approx(wanted, abs=1e-6)
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


# A run that is saved in one parallel layout and resumed in another makes the steps of the run that was not broken.


CHECKPOINT_DEADLINE_S = 240


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes, then those of one that resume them."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("models", "states", "out"):
        (root / name).mkdir()
    make_models(root / "models")
    make_runs(root, (2, 1))
    return root


def make_runs(root: Path, worlds: Sequence[int], more: str = "") -> None:
    given = [*(root / name for name in ("models", "states", "out")), more]
    with trainer_groups(work, given, worlds, root / f"rendezvous{more}", CHECKPOINT_DEADLINE_S, MEGATRON):
        pass


def checkpoint_differences(root: Path, name: str) -> dict[str, float]:
    """Of a resumed run from the one that was not broken, relative to 1 or the value if it is larger."""
    base = name.partition("_at_")[0]
    (expected, wanted), (found, weights) = (read(root / "out", one) for one in (base, name))
    out = {}
    for batch, metrics in found.items():
        assert metrics.keys() == expected[batch].keys()
        for key in metrics.keys() - PACKING:
            out[f"{batch}/{key}"] = abs(metrics[key] - expected[batch][key]) / max(1.0, abs(expected[batch][key]))
    assert weights.keys() == wanted.keys()
    out |= {key: float((weights[key].float() - wanted[key].float()).abs().max()) for key in weights}
    return out


@pytest.mark.slow
@pytest.mark.xdist_group("checkpoints")
def test_a_flipped_byte_in_any_file_is_noticed(runs: Path, tmp_path: Path) -> None:
    files = check_every_flip_is_noticed(runs / "states/plain", tmp_path / "checkpoints")
    assert {"megatron/__0_0.distcp", "megatron/__1_0.distcp", "megatron/state.json", "hf/config.json"} < set(files)


@pytest.mark.slow
@pytest.mark.xdist_group("checkpoints")
@pytest.mark.parametrize("chosen", [pytest.param(FEW, id="few"), pytest.param(MORE, id="more", marks=pytest.mark.full)])
def test_resuming_in_another_layout_is_not_stopping(runs: Path, chosen: dict[int, list[Run]]) -> None:
    if chosen is MORE:
        make_runs(runs, (2, 1), more="more")
    for run in (run for world in chosen for run in chosen[world] if run.loads and not run.spoilt):
        found = checkpoint_differences(runs, run.name)
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < 1e-5, f"{run.name}: {worst} differs by {found[worst]:.3g}"
        assert len(found) > 50


@pytest.mark.slow
@pytest.mark.xdist_group("checkpoints")
def test_a_step_count_that_parameters_share_would_be_seen(runs: Path) -> None:
    found = checkpoint_differences(runs, "tensor_at_spoilt")
    assert found["4/train/loss"] > 1e-4
    assert found["2/train/loss"] < 1e-5  # and not at once


@pytest.mark.slow
@pytest.mark.xdist_group("checkpoints")
def test_what_is_on_disk(runs: Path) -> None:
    from transformers import AutoModelForCausalLM

    state = runs / "states/critic"
    files = {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}
    assert {"hf/model.safetensors", "hf/config.json", "megatron/state.json", "megatron/index.json"} <= files
    assert {"megatron/__0_0.distcp", "megatron/__1_0.distcp", "megatron/random-00001.safetensors"} <= files
    assert not [name for name in files if "written" in name or name.endswith(".part")]
    index = json.loads((state / "megatron/index.json").read_text())
    assert {"critic.output_layer.weight", "reference.decoder.final_layernorm.weight"} <= index.keys()
    assert "optimizer.state.exp_avg_sq.critic.output_layer.bias" in index
    assert not [name for name in index if ".fp32_param." in name]  # the weights are fp32 themselves
    assert json.loads((state / "megatron/state.json").read_text())["models"]["critic"]["adam_steps"] == 2
    AutoModelForCausalLM.from_pretrained(state / "hf")
    # Both processes write a good part.
    sizes = [(state / f"megatron/__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.slow
@pytest.mark.xdist_group("checkpoints")
def test_a_save_that_was_begun_is_complete_when_the_process_has_ended(runs: Path) -> None:
    assert (runs / "states/last/megatron/state.json").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("checkpoints")
def test_what_cannot_be_loaded_says_why_and_changes_nothing(runs: Path) -> None:
    found = json.loads((runs / "out/faults.json").read_text())
    for name, words in {
        "nothing": "no complete training state",
        "torch": "state of another backend",
        "unfinished": "no complete training state",
        "cut": "has 1000 bytes instead of",
        "missing": "no complete training state",
        "flipped": "is damaged",
        "no_index": "index.json has 1 bytes instead of",
        "newer": "format version 99",
        "half": "is bfloat16 instead of float32",
        "experts": "of another model",
        "critic": "holds no critic",
    }.items():
        assert words in found.pop(name, ""), name
    assert not found
