"""Parts of the Megatron backend in one process: layouts and options, the shim, inputs, and modules."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_rig import Recipe, make_spec
from torch.nn.functional import scaled_dot_product_attention

from models.errors import BackendMisuse, TrainConfigInvalid
from models.train.megatron import inputs, processes
from models.train.megatron.trained_models import SwappedReference, check_optimizer
from models.train.spec import TrainSpec
from models.train.step.micro_batches import PackedRows, pack_rows
from models.train.step.packing import Layout, Unit
from tests.models.train.rig import Tensors, differing


def spec(**layout: Any) -> TrainSpec:
    return make_spec(Recipe("untied"), Path("models"), layout)


def test_what_is_left_is_data_parallel() -> None:
    layout = spec(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert processes.parallel_sizes(layout, 8) == processes.ParallelSizes(2, 2, None, 1, 1, 1, data=2)
    assert processes.parallel_sizes(spec(virtual_pipeline_model_parallel_size=1), 3).virtual_pipeline is None


@pytest.mark.parametrize(("world", "layout", "words"), [
    (3, {"tensor_model_parallel_size": 2}, "3 processes do not divide.*--actor-num-gpus-per-node"),
    (4, {"expert_model_parallel_size": 3}, "sets of experts of 3.*--expert-model-parallel-size"),
    (2, {"context_parallel_size": 2}, "Transformer Engine.*--context-parallel-size 1"),
])  # fmt: skip
def test_impossible_layouts_name_the_cure(
    world: int, layout: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "has_transformer_engine", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainConfigInvalid, match=words):
        processes.parallel_sizes(spec(**layout), world)


@pytest.mark.parametrize(
    ("gpu", "words"), [(False, "sees no GPU"), (True, "Transformer Engine, which is not installed")]
)
def test_an_optimizer_on_the_host_needs_a_gpu_and_its_engine(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(TrainConfigInvalid, match=words):
        check_optimizer(spec(optimizer_cpu_offload=True))


def test_without_a_trainer_group_there_is_no_layout() -> None:
    with pytest.raises(BackendMisuse, match="no default group"):
        processes.build_layout(spec())


def test_the_shim_leaves_a_machine_with_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = (torch.zeros, torch.Tensor.type, torch.cuda.current_device)
    processes.install_shim()
    processes.install_shim_after_import()
    assert before == (torch.zeros, torch.Tensor.type, torch.cuda.current_device)
    assert not processes.shim_installed()


@pytest.mark.slow
def test_the_shim_keeps_torchs_compiler_out() -> None:
    program = """
import sys
from models.train.megatron.processes import install_shim
install_shim()
import models.train.megatron.layers
assert "torch._dynamo" not in sys.modules
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


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
        processes.install_shim()
    assert not processes.shim_installed()


def test_the_shim_comes_before_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: processes.SHIM_VERSION)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(BackendMisuse, match="first in the process"):
        processes.install_shim()
    assert not processes.shim_installed()


CPU = torch.device("cpu")


def rows_of(*units: Unit, length: int, tokens: list[list[int]], first: int) -> PackedRows:
    """One row."""
    ids = [np.array(one, dtype=np.int32) for one in tokens]
    chosen = [np.arange(first, len(one), dtype=np.int64) for one in ids]
    return pack_rows(Layout((tuple(units),), length), ids, chosen)


def shared() -> PackedRows:
    """Two responses after a common prompt of 2, and padding."""
    return rows_of(Unit((0, 1), 2, 5), length=7, tokens=[[5, 6, 7, 8], [5, 6, 9, 10, 11]], first=2)


def apart() -> PackedRows:
    """Two sequences in one row."""
    return rows_of(Unit((0,), 0, 3), Unit((1,), 0, 4), length=7, tokens=[[1, 2, 3, 4], [5, 6, 7, 8, 9]], first=1)


def single() -> PackedRows:
    return rows_of(Unit((0,), 0, 7), length=7, tokens=[[1, 2, 3, 4, 5, 6, 7, 8]], first=1)


def test_responses_after_a_common_prompt_do_not_see_each_other() -> None:
    """Nor do the sequences of a row; one that has a row for itself needs no mask."""
    expected = torch.ones(7, 7).tril().bool()
    expected[3:, 2] = False  # the second response begins behind a token of the first, which only that one sees
    expected[5:] = torch.eye(7).bool()[5:]
    expected[6, 5] = True
    assert torch.equal(~seen(inputs.hidden_mask(shared(), CPU)), expected)
    two = torch.block_diag(torch.ones(3, 3).tril(), torch.ones(4, 4).tril()).bool()
    assert torch.equal(~seen(inputs.hidden_mask(apart(), CPU)), two)
    alone = inputs.model_inputs(single(), inputs.RowForm(CPU))
    assert (alone.mask, alone.position_ids, alone.kept) == (None, None, None)


def seen(mask: torch.Tensor | None) -> torch.Tensor:
    assert mask is not None
    return mask[0, 0]


def test_heads_share_keys_where_there_is_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask each has its own: some of torch's kernels for a mask know no shared ones."""
    config = SimpleNamespace(context_parallel_size=1, kv_channels=8)
    attend = inputs.SdpaCoreAttention(config, 1, None, "self")
    query, key, value = (torch.randn(7, 2, heads, 8) for heads in (6, 2, 2))
    calls: list[tuple[int, bool]] = []

    def note(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rest: Any) -> torch.Tensor:
        assert key.shape == value.shape
        calls.append((key.shape[1], rest["enable_gqa"]))
        return scaled_dot_product_attention(query, key, value, **rest)

    monkeypatch.setattr(inputs, "scaled_dot_product_attention", note)
    causal = attend(query, key, value, None)
    masked = attend(query, key, value, ~torch.ones(1, 1, 7, 7).tril().bool())
    torch.testing.assert_close(masked, causal)
    assert calls == [(2, True), (6, False)]


@pytest.mark.parametrize("rows", [shared(), apart(), single()])
def test_longer_rows_predict_the_same_tokens(rows: PackedRows) -> None:
    longer = inputs.lengthened(rows, 4)
    assert longer.input_ids.shape == (1, 8)
    assert longer.input_ids.reshape(-1)[longer.source].tolist() == rows.input_ids.reshape(-1)[rows.source].tolist()
    if (before := inputs.hidden_mask(rows, CPU)) is not None:
        mask = seen(inputs.hidden_mask(longer, CPU))
        assert torch.equal(mask[:7, :7], seen(before))
        assert bool(mask[:7, 7].all())  # nothing looks at what was added
        assert not bool(mask.all(dim=1).any())  # and no row of the mask is empty
    assert inputs.lengthened(rows, 7) is rows


def test_longer_rows_of_several_keep_their_places() -> None:
    rows = pack_rows(
        Layout(((Unit((0,), 0, 3),), (Unit((1,), 0, 3),)), 3),
        [np.array([1, 2, 3, 4], dtype=np.int32), np.array([5, 6, 7, 8], dtype=np.int32)],
        [np.array([2]), np.array([3])],
    )
    made = inputs.model_inputs(rows, inputs.RowForm(CPU, multiple=4))
    by_position = made.input_ids.t().reshape(-1)  # as hidden states lie: position first
    assert by_position[made.places].tolist() == [2, 7]
    assert made.targets.tolist() == [3, 8]


def test_a_flat_row_says_where_its_sequences_end() -> None:
    made = inputs.model_inputs(apart(), inputs.RowForm(CPU, multiple=4, flat=True))
    assert made.ends is not None
    assert made.ends.tolist() == [0, 3, 7, 8]  # the last is padding
    assert (made.longest, made.mask, made.position_ids) == (4, None, None)


def chunk(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    made[0].weight.data.normal_()
    return made.to(torch.bfloat16)


def state(module: torch.nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_the_reference_takes_the_place_of_the_policy_bit_by_bit() -> None:
    """The policy comes back, also after an error; a renewed reference is the policy."""
    module, calls = chunk(0), list[str]()
    reference = SwappedReference([module], lambda: calls.append("settled"), renewed=True)
    before = state(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    policy = state(module)
    assert differing(before, policy)
    with reference.in_place():
        assert calls == ["settled"]
        assert differing(state(module), before) == []
    assert differing(state(module), policy) == []
    with pytest.raises(RuntimeError, match="in the middle"), reference.in_place():
        raise RuntimeError("in the middle")
    assert differing(state(module), policy) == []
    with reference.in_place():
        assert differing(state(module), before) == []

    calls.clear()
    reference.renew()
    assert calls == ["settled"]
    with reference.in_place():
        assert differing(state(module), policy) == []
