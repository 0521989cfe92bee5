"""Reading `config.json`: published ones are accepted, what would change the numbers is refused by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from family_models import FAMILIES as TINY_FAMILIES
from family_models import make_model, save_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.model_shapes import FAMILIES as PLANNED
from configs.schema.train import MegatronConfig, TrainConfig
from models.errors import CheckpointUnavailable, TrainConfigInvalid, UnsupportedModel
from models.families.config_json import read_rope
from models.families.hugging_face_names import merge, padded_vocab, part
from models.families.registry import FAMILIES, architecture_of
from models.families.source import CheckpointTensors, check_files, read_hf_config
from models.train.megatron.parameters import global_name
from models.train.megatron.weights import check_names, read_part
from models.train.spec import TrainSpec


def published(name: str) -> dict[str, Any]:
    """A `config.json` as it was published."""
    config: dict[str, Any] = json.loads((Path(__file__).parent / "published" / f"{name}.json").read_text())
    return config


QWEN3, LLAMA31, DEEPSEEK_V3 = map(published, ("qwen3", "llama3.1", "deepseek_v3"))
_OF_32K = {"original_max_position_embeddings": 32768}


def test_published_configurations_are_read() -> None:
    small = architecture_of(QWEN3)
    assert small.tied
    assert small.transformer["num_query_groups"] == 8
    assert small.rope.base == 1e6
    large = architecture_of(DEEPSEEK_V3)
    assert large.moe_layers == (False,) * 3 + (True,) * 58
    assert large.transformer["moe_router_group_topk"] == 4
    assert sum(1 for _ in large.weights()) == 2 * 58 * 256 + 61 * 9 + 3 * 2 + 58 * 4 + 3
    kimi = architecture_of(
        {**DEEPSEEK_V3, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384}
    )
    assert kimi.transformer["moe_router_num_groups"] is None
    moonlight = architecture_of(
        {**DEEPSEEK_V3, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_scaling": None}
    )
    assert moonlight.transformer["q_lora_rank"] is None
    assert moonlight.transformer["rope_type"] == "rope"
    architecture_of({**DEEPSEEK_V3, "topk_group": 3})


@pytest.mark.parametrize(("config", "change", "words"), [
    (QWEN3, {"use_sliding_window": True, "sliding_window": 4096}, "sliding_window=4096.*use_sliding_window to false"),
    (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "sliding_attention"),
    (QWEN3, {"attention_bias": True}, "attention_bias=True of 'qwen3' cannot be built.*--train-backend fsdp"),
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act='gelu' of 'qwen3' cannot be built .* only 'silu' or 'swish'"),
    (QWEN3, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    (QWEN3, {"logit_scale": 0.5}, "logit_scale=0.5 .* is not known here and may change the logits"),
    (QWEN3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
     "rope_type='dynamic' .* only default, linear, llama3"),
    (QWEN3, {"num_key_value_heads": None, "hidden_size": None}, "config.json of 'qwen3' has no hidden_size"),
    (LLAMA31, {"mlp_bias": True}, "mlp_bias=True of 'llama'"),
    (LLAMA31, {"pretraining_tp": 2}, "pretraining_tp=2"),
    (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*bfloat16 first"),
    (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob=false of 'deepseek_v3'"),
    (DEEPSEEK_V3, {"topk_group": 2}, "topk_group=2 of 'deepseek_v3' with num_experts_per_tok=8"),
    (DEEPSEEK_V3, {"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok=1 of 'deepseek_v3'"),
    (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=False"),
    (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy'.*only 'noaux_tc'"),
])  # fmt: skip
def test_what_changes_the_logits_is_refused(config: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        architecture_of({**config, **change})


def test_an_unknown_model_type_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(UnsupportedModel, match=r"model_type='qwen_3_moe' has no mapping.*did you mean 'qwen3_moe'"):
        architecture_of({"model_type": "qwen_3_moe"})
    with pytest.raises(UnsupportedModel, match=r"model_type='mamba2' .*--train-backend fsdp"):
        architecture_of({"model_type": "mamba2"})


def test_every_family_is_known_to_transformers_or_a_name_of_deepseek() -> None:
    assert set(FAMILIES) == set(PLANNED), "a plan refuses all others"
    for model_type in FAMILIES.keys() - {"kimi_k2"}:
        assert model_type in transformers.CONFIG_MAPPING


@pytest.mark.parametrize(("config_class", "head", "scaling"), [
    ("LlamaConfig", 128, {**LLAMA31["rope_scaling"], "rope_theta": 500000.0}),
    ("Qwen2Config", 128, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, **_OF_32K}),
    ("Qwen2Config", 128, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    ("DeepseekV3Config", 64, {**DEEPSEEK_V3["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}),
    ("Qwen2Config", 64, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4,
                         "attention_factor": 1.25, "truncate": False}),
])  # fmt: skip
def test_frequencies_are_those_of_transformers(config_class: str, head: int, scaling: Mapping[str, Any]) -> None:
    config = getattr(transformers, config_class)(
        hidden_size=head * 2, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=dict(scaling)
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    for key in ("rope_parameters", "rope_scaling"):
        theta = {"rope_theta": scaling["rope_theta"]}
        own = read_rope({key: dict(scaling), "max_position_embeddings": 131072, **theta}, head_width=head)
        assert torch.allclose(own.frequencies(), wanted, rtol=1e-6, atol=0)
        assert own.attention_factor == pytest.approx(factor, rel=1e-12)


def test_a_missing_or_damaged_configuration_says_so(tmp_path: Any) -> None:
    with pytest.raises(CheckpointUnavailable, match=r"config\.json cannot be read"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointUnavailable, match=r"config\.json is not JSON"):
        read_hf_config(tmp_path)


TP, PP, EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
VP, ETP = "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (QWEN3, {TP: 3}, f"{TP}=3 does not divide the 16 attention heads"),
    (QWEN3, {EP: 2}, f"{EP}=2, but qwen3 has no experts"),
    (DEEPSEEK_V3, {TP: 2}, "deepseek_v3 has experts or latent.*add --sequence-parallel"),
    (DEEPSEEK_V3, {EP: 3}, f"{EP}=3 does not divide the 256 experts"),
    ({**QWEN3, "intermediate_size": 3071}, {TP: 2}, "divide the intermediate_size 3071"),
    ({**DEEPSEEK_V3, "moe_intermediate_size": 2047}, {ETP: 2},
     f"{ETP}=2 does not divide the moe_intermediate_size 2047 of deepseek_v3"),
    ({**QWEN3, "num_key_value_heads": 3}, {TP: 2}, "the 3 key and value heads of qwen3"),
    (QWEN3, {PP: 3}, "does not divide the 28 layers of qwen3 that 3 stages share"),
    (DEEPSEEK_V3, {PP: 4, "decoder_first_pipeline_num_layers": 14},
     "does not divide the 47 layers of deepseek_v3 that 3 stages share; .* --decoder-first-pipeline-num-layers"),
    (QWEN3, {PP: 2, VP: 4}, rf"{VP}=4 does not divide the layers of a stage, \[14\] of qwen3"),
    (DEEPSEEK_V3, {"moe_grouped_gemm": True}, "moe_grouped_gemm needs Transformer Engine on a GPU"),
    (QWEN3, {"transformer_impl": "transformer_engine"}, "transformer_impl=transformer_engine needs .* and a GPU"),
]  # fmt: skip


def test_layouts_that_a_model_cannot_be_divided_by_are_refused_and_the_precision_is_that_of_the_run() -> None:
    """One test, for it loads Megatron-core: two seconds of a worker."""
    from models.train.megatron.build import check_layout, model_dtype

    def spec(dtype: Any = "auto", **options: Any) -> TrainSpec:
        train = TrainConfig(train_device="cpu", train_dtype=dtype)
        return TrainSpec(train=train, algorithm=AlgorithmConfig(), megatron=MegatronConfig(**options))

    for config, options, words in LAYOUTS:
        with pytest.raises(TrainConfigInvalid, match=words):
            check_layout(architecture_of(config), spec(**options))
    for wanted, found in (("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert model_dtype(spec(wanted)) == found


# The mapping itself, without Megatron: divisions and joins, names, what is read of a checkpoint by parts.


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


@given(vocab=st.integers(1, 1000), parts=st.integers(1, 16))
def test_padding_of_the_vocabulary_is_the_least_that_divides(vocab: int, parts: int) -> None:
    padded = padded_vocab(vocab, parts)
    assert padded % parts == 0
    assert 0 <= padded - vocab < parts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mapping")
    for name in TINY_FAMILIES:
        save_model(name, root / name)
    return root


@pytest.mark.parametrize("name", TINY_FAMILIES)
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


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_weights_are_compared_with_the_config_json_that_is_beside_them(name: str, saved: Path, tmp_path: Path) -> None:
    config = read_hf_config(saved / name)
    check_files(saved / name)
    (tmp_path / "model.safetensors").symlink_to(saved / name / "model.safetensors")
    fewer = -1 - int(config.get("num_nextn_predict_layers") or 0)  # which lie behind the others
    for key, change in (("vocab_size", 1), ("num_hidden_layers", 1), ("num_hidden_layers", fewer), ("hidden_size", 8)):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: config[key] + change}))
        with pytest.raises(CheckpointUnavailable, match=r"are not those of its config\.json: .*; give the"):
            check_files(tmp_path)


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


def check_changed(directory: Path, changes: dict[str, torch.Tensor], *, without: str = "") -> None:
    """Look at the names of a saved checkpoint to which tensors were added, and that lacks one."""
    changed = directory / "changed"
    changed.mkdir(exist_ok=True)
    tensors = load_file(directory / "model.safetensors") | changes
    tensors.pop(without, None)
    save_file(tensors, changed / "model.safetensors")
    with CheckpointTensors(changed) as found:
        check_names(architecture_of(read_hf_config(directory)), found)


def test_prediction_layers_are_left_out_with_one_warning(saved: Path) -> None:
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight")
    with pytest.warns(UserWarning, match=r"2 tensors of .*multi-token prediction") as seen:
        check_changed(saved / "glm4_moe", {name: torch.zeros(2) for name in names})
    assert len(seen) == 1


def test_surplus_and_missing_tensors_are_refused(saved: Path) -> None:
    with pytest.raises(CheckpointUnavailable, match=r"1 tensors that qwen3 does not know, first .*q_proj.lora"):
        check_changed(saved / "qwen3", {"model.layers.0.self_attn.q_proj.lora": torch.zeros(1)})
    with pytest.raises(CheckpointUnavailable, match=r"lacks 1 tensors of qwen3, first model\.layers\.1.*k_norm"):
        check_changed(saved / "qwen3", {}, without="model.layers.1.self_attn.k_norm.weight")


def test_an_embedding_that_is_stored_twice_is_read_once(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_changed(saved / "qwen2_tied", {"lm_head.weight": torch.zeros(1)})


@pytest.mark.parametrize(("own", "name"), [
    ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.7.input_layernorm.weight"),
    ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.6.pre_mlp_layernorm.weight"),
    ("decoder.layers.0.mlp.experts.linear_fc2.weight3",
     "decoder.layers.6.mlp.experts.local_experts.11.linear_fc2.weight"),
    ("decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight",
     "decoder.layers.7.mlp.experts.local_experts.8.linear_fc1.weight"),
    ("decoder.layers.1.mlp.router.expert_bias", "decoder.layers.7.mlp.router.expert_bias"),
    ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
])  # fmt: skip
def test_names_are_global_and_those_of_the_local_layers(own: str, name: str) -> None:
    """The second chunk of a process: its layers begin at the sixth, its experts at the eighth."""
    layers = [SimpleNamespace(layer_number=7), SimpleNamespace(layer_number=8)]
    assert global_name(own, SimpleNamespace(decoder=SimpleNamespace(layers=layers)), 8) == name
