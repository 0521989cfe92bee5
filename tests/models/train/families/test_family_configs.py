"""Reading `config.json`: published ones are accepted, what would change the numbers is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.train import MegatronConfig, TrainConfig
from models.errors import CheckpointUnavailable, TrainConfigInvalid, UnsupportedModel
from models.families.registry import FAMILIES, architecture_of, read_hf_config
from models.families.rope import read_rope
from models.train.megatron.build import check_layout, model_dtype
from models.train.spec import TrainSpec

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


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


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (
            QWEN3,
            {"use_sliding_window": True, "sliding_window": 4096},
            "sliding_window=4096.*use_sliding_window to false",
        ),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "sliding_attention"),
        (QWEN3, {"attention_bias": True}, "attention_bias=True of 'qwen3' cannot be built.*--train-backend fsdp"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act='gelu' of 'qwen3' cannot be built .* only 'silu' or 'swish'"),
        (QWEN3, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (QWEN3, {"logit_scale": 0.5}, "logit_scale=0.5 .* is not known here and may change the logits"),
        (
            QWEN3,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type='dynamic' .* only default, linear, llama3",
        ),
        (QWEN3, {"num_key_value_heads": None, "hidden_size": None}, "config.json of 'qwen3' has no hidden_size"),
        (LLAMA31, {"mlp_bias": True}, "mlp_bias=True of 'llama'"),
        (LLAMA31, {"pretraining_tp": 2}, "pretraining_tp=2"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*bfloat16 first"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob=false of 'deepseek_v3'"),
        (DEEPSEEK_V3, {"topk_group": 3}, None),
        (DEEPSEEK_V3, {"topk_group": 2}, "topk_group=2 of 'deepseek_v3' with num_experts_per_tok=8"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok=1 of 'deepseek_v3'"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy'.*only 'noaux_tc'"),
    ],
)
def test_what_changes_the_logits_is_refused(config: dict[str, Any], change: dict[str, Any], words: str | None) -> None:
    if words is None:
        architecture_of({**config, **change})
        return
    with pytest.raises(UnsupportedModel, match=words):
        architecture_of({**config, **change})


def test_an_unknown_model_type_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(UnsupportedModel, match=r"model_type='qwen_3_moe' has no mapping.*did you mean 'qwen3_moe'"):
        architecture_of({"model_type": "qwen_3_moe"})
    with pytest.raises(UnsupportedModel, match=r"model_type='mamba2' .*--train-backend fsdp"):
        architecture_of({"model_type": "mamba2"})


def test_every_family_is_known_to_transformers_or_a_name_of_deepseek() -> None:
    for model_type in FAMILIES.keys() - {"kimi_k2"}:
        assert model_type in transformers.CONFIG_MAPPING


@pytest.mark.parametrize(
    ("config_class", "head", "scaling"),
    [
        ("LlamaConfig", 128, {**LLAMA31["rope_scaling"], "rope_theta": 500000.0}),
        ("Qwen2Config", 128, {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, **_OF_32K}),
        ("Qwen2Config", 128, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        ("DeepseekV3Config", 64, {**DEEPSEEK_V3["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}),
        (
            "Qwen2Config",
            64,
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4,
             "attention_factor": 1.25, "truncate": False},
        ),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (
            QWEN3,
            {"tensor_model_parallel_size": 3},
            "tensor_model_parallel_size=3 does not divide the 16 attention heads",
        ),
        (QWEN3, {"expert_model_parallel_size": 2}, "expert_model_parallel_size=2, but qwen3 has no experts"),
        (DEEPSEEK_V3, {"tensor_model_parallel_size": 2}, "deepseek_v3 has experts or latent.*add --sequence-parallel"),
        (
            DEEPSEEK_V3,
            {"expert_model_parallel_size": 3},
            "expert_model_parallel_size=3 does not divide the 256 experts",
        ),
        ({**QWEN3, "intermediate_size": 3071}, {"tensor_model_parallel_size": 2}, "divide the intermediate_size 3071"),
        (
            {**DEEPSEEK_V3, "moe_intermediate_size": 2047},
            {"expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size=2 does not divide the moe_intermediate_size 2047 of deepseek_v3",
        ),
        ({**QWEN3, "num_key_value_heads": 3}, {"tensor_model_parallel_size": 2}, "the 3 key and value heads of qwen3"),
        (QWEN3, {"pipeline_model_parallel_size": 3}, "does not divide the 28 layers of qwen3 that 3 stages share"),
        (
            DEEPSEEK_V3,
            {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 14},
            "does not divide the 47 layers of deepseek_v3 that 3 stages share; .* --decoder-first-pipeline-num-layers",
        ),
        (
            QWEN3,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            r"virtual_pipeline_model_parallel_size=4 does not divide the layers of a stage, \[14\] of qwen3",
        ),
        (DEEPSEEK_V3, {"moe_grouped_gemm": True}, "moe_grouped_gemm needs Transformer Engine on a GPU"),
        (QWEN3, {"transformer_impl": "transformer_engine"}, "transformer_impl=transformer_engine needs .* and a GPU"),
    ],
)
def test_layouts_that_a_model_cannot_be_divided_by_are_refused(
    config: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    spec = TrainSpec(
        train=TrainConfig(train_device="cpu"), algorithm=AlgorithmConfig(), megatron=MegatronConfig(**options)
    )
    with pytest.raises(TrainConfigInvalid, match=words):
        check_layout(architecture_of(config), spec)


@pytest.mark.parametrize(("wanted", "found"), [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_the_precision_is_that_of_the_run(wanted: Any, found: str) -> None:
    spec = TrainSpec(train=TrainConfig(train_device="cpu", train_dtype=wanted), algorithm=AlgorithmConfig())
    assert model_dtype(spec) == getattr(torch, found)
