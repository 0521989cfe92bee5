"""The mapping itself, without Megatron: divisions and joins, names, what is read of a checkpoint by parts."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_models import FAMILIES, make_model, save_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from models.errors import CheckpointUnavailable
from models.families.hugging_face_names import Gated, QueryGroups, merge, padded_vocab, part
from models.families.registry import architecture_of, read_hf_config
from models.families.source import CheckpointTensors
from models.train.megatron.parameters import global_name
from models.train.megatron.weights import check_names, read_part

settings.register_profile("families", settings.get_profile("untimed"), max_examples=50)
settings.load_profile("families")


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@given(
    split=st.sampled_from(["none", "rows", "columns", "gated_rows", "vocabulary"]),
    parts=st.integers(1, 5),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
)
def test_parts_merge_to_the_whole(split: str, parts: int, rows: int, columns: int) -> None:
    whole = numbered(2 * rows * parts, columns * parts)
    held = [part(whole, split, index, parts) for index in range(parts)]  # type: ignore[arg-type]
    assert torch.equal(merge(held, split), whole)  # type: ignore[arg-type]
    if split != "none":
        assert sum(one.numel() for one in held) == whole.numel()


@given(groups=st.integers(1, 6), per_group=st.integers(1, 4), width=st.integers(1, 3), bias=st.booleans())
def test_query_groups_interleave_and_come_back(groups: int, per_group: int, width: int, bias: bool) -> None:
    join = QueryGroups(groups * per_group, groups, width)
    rest = () if bias else (2,)
    pieces = [numbered(groups * per_group * width, *rest), *(-numbered(groups * width, *rest) - k for k in (1, 100))]
    whole = join.join(pieces)
    for back, piece in zip(join.split(whole), pieces, strict=True):
        assert torch.equal(back, piece)
    first = torch.cat([pieces[0][: per_group * width], pieces[1][:width], pieces[2][:width]])
    assert torch.equal(whole[: len(first)], first)  # the first group: its queries, its key, its value
    for parts in (n for n in range(1, groups + 1) if groups % n == 0):
        assert join.parts_alone(parts)
        for index in range(parts):
            own = join.join([part(piece, "rows", index, parts) for piece in pieces])
            assert torch.equal(own, part(whole, "rows", index, parts))


@given(rows=st.integers(1, 4), parts=st.integers(1, 4))
def test_a_part_of_a_gated_matrix_is_made_of_parts_of_gate_and_up(rows: int, parts: int) -> None:
    gate, up = numbered(rows * parts, 2), -numbered(rows * parts, 2)
    whole = Gated().join([gate, up])
    for index in range(parts):
        own = Gated().join([part(gate, "rows", index, parts), part(up, "rows", index, parts)])
        assert torch.equal(own, part(whole, "gated_rows", index, parts))


@given(vocab=st.integers(1, 1000), parts=st.integers(1, 16))
def test_padding_of_the_vocabulary_is_the_least_that_divides(vocab: int, parts: int) -> None:
    padded = padded_vocab(vocab, parts)
    assert padded % parts == 0
    assert 0 <= padded - vocab < parts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mapping")
    for name in FAMILIES:
        save_model(name, root / name)
    return root


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_read_from_a_file_are_those_of_the_whole(name: str, saved: Path) -> None:
    architecture = architecture_of(read_hf_config(saved / name))
    exported = []
    with CheckpointTensors(saved / name) as tensors:
        for weight in architecture.weights():
            nothing = torch.empty(0)
            whole = read_part(tensors, weight, nothing, 0, 1, architecture.vocab_size)
            exported += [piece.name for piece in weight.pieces if piece.part == 0]
            for parts in (2, 4):  # 4 processes divide the 2 query groups
                held = [
                    read_part(tensors, weight, nothing, index, parts, architecture.vocab_size) for index in range(parts)
                ]
                back = merge(held, weight.rule.split)
                if weight.rule.split == "vocabulary":
                    assert not back[architecture.vocab_size :].any()
                    back = back[: architecture.vocab_size]
                assert torch.equal(back, whole), weight.name
    assert sorted(exported) == sorted(load_file(saved / name / "model.safetensors"))


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_stacked_experts_are_read_as_those_one_by_one(name: str, saved: Path, tmp_path: Path) -> None:
    """As transformers 5 keeps them in memory."""
    model = make_model(name)
    stacked = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in stacked)
    save_file(stacked, tmp_path / "model.safetensors")
    architecture = architecture_of(read_hf_config(saved / name))
    with CheckpointTensors(saved / name) as apart, CheckpointTensors(tmp_path) as together:
        check_names(architecture, together)
        for weight in architecture.weights():
            for parts, index in ((1, 0), (2, 1)):
                found, wanted = (
                    read_part(tensors, weight, torch.empty(0), index, parts, architecture.vocab_size)
                    for tensors in (together, apart)
                )
                assert torch.equal(found, wanted), weight.name


def test_prediction_layers_are_left_out_with_one_warning(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "glm4_moe" / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2)
    tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    architecture = architecture_of(read_hf_config(saved / "glm4_moe"))
    with CheckpointTensors(tmp_path) as found, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check_names(architecture, found)
    assert len(seen) == 1
    assert "2 tensors of" in str(seen[0].message)
    assert "multi-token prediction" in str(seen[0].message)


def test_surplus_and_missing_tensors_are_refused(saved: Path, tmp_path: Path) -> None:
    architecture = architecture_of(read_hf_config(saved / "qwen3"))
    tensors = load_file(saved / "qwen3" / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.lora": torch.zeros(1)}, tmp_path / "model.safetensors")
    with (
        CheckpointTensors(tmp_path) as found,
        pytest.raises(CheckpointUnavailable, match=r"1 tensors that qwen3 does not know, first .*q_proj.lora"),
    ):
        check_names(architecture, found)
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        CheckpointTensors(tmp_path) as found,
        pytest.raises(CheckpointUnavailable, match=r"lacks 1 tensors of qwen3, first model\.layers\.1.*k_norm"),
    ):
        check_names(architecture, found)


def test_an_embedding_that_is_stored_twice_is_read_once(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "qwen2_tied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointTensors(tmp_path) as found, warnings.catch_warnings():
        warnings.simplefilter("error")
        check_names(architecture_of(read_hf_config(saved / "qwen2_tied")), found)


def test_a_projection_that_is_held_whole_is_read_whole(saved: Path) -> None:
    """Transformer Engine keeps MLA's down projections whole; the local layers divide them."""
    architecture = architecture_of(read_hf_config(saved / "deepseek_v3"))
    divided = [weight for weight in architecture.weights() if weight.rule.replicated_rows is not None]
    assert len(divided) == 2 * 3
    with CheckpointTensors(saved / "deepseek_v3") as tensors:
        for weight in divided:
            rows = weight.rule.replicated_rows or 0
            whole = read_part(tensors, weight, torch.empty(rows, 32), 1, 2, architecture.vocab_size)
            half = read_part(tensors, weight, torch.empty(rows // 2, 32), 1, 2, architecture.vocab_size)
            assert torch.equal(half, whole[rows // 2 :])


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.7.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.6.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight3",
            "decoder.layers.6.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        (
            "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight",
            "decoder.layers.7.mlp.experts.local_experts.8.linear_fc1.weight",
        ),
        ("decoder.layers.1.mlp.router.expert_bias", "decoder.layers.7.mlp.router.expert_bias"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_names_are_global_and_those_of_the_local_layers(own: str, name: str) -> None:
    """The second chunk of a process: its layers begin at the sixth, its experts at the eighth."""
    layers = [SimpleNamespace(layer_number=7), SimpleNamespace(layer_number=8)]
    assert global_name(own, SimpleNamespace(decoder=SimpleNamespace(layers=layers)), 8) == name
