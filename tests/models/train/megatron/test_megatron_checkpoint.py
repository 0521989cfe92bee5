"""A run that is saved in one parallel layout and resumed in another makes the steps of the run that was not broken."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_rig import RUNS, work
from safetensors.torch import load_file

from tests.models.test_checkpoint import check_every_flip_is_noticed
from tests.models.train.megatron.megatron_rig import make_models
from tests.models.train.rig import PACKING, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("checkpoints")]
DEADLINE_S = 240


def start(root: Path, world: int) -> None:
    imports = ["checkpoint_rig", "transformers.models.qwen3_moe.modeling_qwen3_moe"]
    places = [root / name for name in ("models", "states", "out")]
    run_ranks(work, places, world, root / f"rendezvous-{world}", imports=imports, deadline_s=DEADLINE_S)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of two processes, then those of one that resume them."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("models", "states", "out"):
        (root / name).mkdir()
    make_models(root / "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # for the process that forks
        patch.setenv("PYTHONWARNINGS", "ignore")
        start(root, 2)
        damage(root / "states")
        start(root, 1)
    return root


def damage(states: Path) -> None:
    """Copies of a state that cannot be loaded, by what is wrong with them."""

    def copy(name: str, change: Callable[[Path], None]) -> None:
        target = states / "faults" / name
        shutil.copytree(states / "plain", target)
        change(target)

    def edit(path: Path, **fields: object) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for at in range(1000, len(content), 997):
            content[at] ^= 0xFF
        path.write_bytes(content)

    (states / "faults").mkdir()
    (states / "faults/nothing").mkdir()
    (states / "faults/torch/trainer").mkdir(parents=True)
    copy("unfinished", lambda at: (at / "megatron/state.json").unlink())
    copy("cut", lambda at: os.truncate(at / "megatron/__1_0.distcp", 1000))
    copy("missing", lambda at: (at / "megatron/__0_0.distcp").unlink())
    copy("flipped", lambda at: flip(at / "megatron/__1_0.distcp"))
    copy("no_index", lambda at: (at / "megatron/index.json").write_bytes(b"{"))
    copy("newer", lambda at: edit(at / "megatron/state.json", format_version=99))
    shutil.copytree(states / "tensor", states / "faults/half")
    shutil.rmtree(states / "faults/half/megatron")
    shutil.copytree(states / "half/megatron", states / "faults/half/megatron")
    shutil.copytree(states / "experts", states / "faults/experts")


RESUMED = [run.name for world in RUNS for run in RUNS[world] if run.loads and not run.spoilt]


def differences(root: Path, name: str) -> dict[str, float]:
    """Of a resumed run from the one that was not broken, relative to 1 or the value if it is larger."""
    base = name.partition("_at_")[0]
    expected, found = (json.loads((root / f"out/{one}.json").read_text()) for one in (base, name))
    out = {}
    for batch, metrics in found.items():
        assert metrics.keys() == expected[batch].keys()
        for key in metrics.keys() - PACKING:
            out[f"{batch}/{key}"] = abs(metrics[key] - expected[batch][key]) / max(1.0, abs(expected[batch][key]))
    weights, wanted = (load_file(root / f"out/{one}.safetensors") for one in (name, base))
    assert weights.keys() == wanted.keys()
    out |= {key: float((weights[key].float() - wanted[key].float()).abs().max()) for key in weights}
    return out


def test_a_flipped_byte_in_any_file_is_noticed(runs: Path, tmp_path: Path) -> None:
    files = check_every_flip_is_noticed(runs / "states/plain", tmp_path / "checkpoints")
    assert {"megatron/__0_0.distcp", "megatron/__1_0.distcp", "megatron/state.json", "hf/config.json"} < set(files)


def test_resuming_in_another_layout_is_not_stopping(runs: Path) -> None:
    for name in RESUMED:
        found = differences(runs, name)
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < 1e-5, f"{name}: {worst} differs by {found[worst]:.3g}"
        assert len(found) > 50


def test_a_step_count_that_parameters_share_would_be_seen(runs: Path) -> None:
    found = differences(runs, "tensor_at_spoilt")
    assert found["4/train/loss"] > 1e-4
    assert found["2/train/loss"] < 1e-5  # and not at once


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


def test_a_save_that_was_begun_is_complete_when_the_process_has_ended(runs: Path) -> None:
    assert (runs / "states/last/megatron/state.json").exists()


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
