"""Parameters of all known families: against published totals, and against transformers' modules, exactly."""

from __future__ import annotations

from typing import Any

import pytest

from configs.load import preset_names, read_preset
from configs.schema.model_shapes import (
    active_parameters,
    adapter_parameters,
    forward_flops,
    known_shape,
    layer_share,
    matrices,
    parameters,
    total_parameters,
)

# Trainable parameters of the published checkpoints, embeddings included, without the routers' biases and without layers
# for multi-token prediction. The second figure is the published one per token, in billions.
PUBLISHED = {
    "qwen2.5-0.5b": (494_032_768, None),
    "qwen2.5-1.5b": (1_543_714_304, None),
    "qwen2.5-3b": (3_085_938_688, None),
    "qwen2.5-7b": (7_615_616_512, None),
    "qwen2.5-14b": (14_770_033_664, None),
    "qwen2.5-32b": (32_763_876_352, None),
    "qwen2.5-72b": (72_706_203_648, None),
    "qwen3-0.6b": (596_049_920, None),
    "qwen3-1.7b": (1_720_574_976, None),
    "qwen3-4b": (4_022_468_096, None),
    "qwen3-8b": (8_190_735_360, None),
    "qwen3-14b": (14_768_307_200, None),
    "qwen3-32b": (32_762_123_264, None),
    "qwen3-30b-a3b": (30_532_122_624, 3.3),
    "qwen3-235b-a22b": (235_093_634_560, 22),
    "llama3.1-8b": (8_030_261_248, None),
    "llama3.1-70b": (70_553_706_496, None),
    "glm4-9b": (9_400_279_040, None),
    "glm-z1-9b": (9_400_279_040, None),
    "glm-4.5-355b-a32b": (352_797_814_784, 32),
    "glm-4.7-355b-a32b": (352_797_814_784, 32),
    "glm-4.5-air": (106_852_245_504, 12),
    "deepseek-v3": (671_026_404_352, 37),
    "deepseek-r1": (671_026_404_352, 37),
    "kimi-k2": (1_026_408_209_408, 32),
    "moonlight-16b-a3b": (15_960_108_544, 3),
}


def preset(name: str) -> dict[str, Any]:
    shape: dict[str, Any] = read_preset(name).values["model.architecture"]
    return shape


def test_every_preset_has_a_published_total() -> None:
    assert set(PUBLISHED) == set(preset_names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    total, active = PUBLISHED[name]
    shape = known_shape(preset(name))
    assert shape is not None
    assert parameters(preset(name)) == total_parameters(shape) == total
    if active is None:
        assert active_parameters(shape) == total
    else:  # published figures leave out one or both of embedding table and head, and are rounded
        tables = shape.vocabulary * shape.hidden
        assert active_parameters(shape) - 2 * tables < active * 1e9 * 1.03
        assert active_parameters(shape) > active * 1e9 * 0.97


def test_glm_45_is_counted_by_its_authors_with_the_prediction_layer_and_without_tables() -> None:
    """355 billion: the layer that predicts a second token is one more layer with experts and a matrix [H, 2H]."""
    shape = known_shape(preset("glm-4.5-355b-a32b"))
    assert shape is not None
    tables = 2 * shape.vocabulary * shape.hidden
    extra = layer_share(shape, shape.layers - 1).total + 2 * shape.hidden**2
    assert round((total_parameters(shape) - tables + extra) / 1e9) == 355


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8, "vocab_size": 9}


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"model_type": "mamba"},
        {"model_type": "llama"},
        {"model_type": "qwen3", **SMALL, "vocab_size": None},
        {"model_type": "qwen3", **SMALL, "num_attention_heads": 0},
        {"model_type": "deepseek_v3", **SMALL},
    ],
)
def test_unknown_shapes_are_not_guessed(model: dict[str, Any]) -> None:
    assert known_shape(model) is None
    assert parameters(model) is None


def test_experts_under_the_name_that_transformers_saves() -> None:
    published = preset("qwen3-30b-a3b")
    saved = {"num_local_experts" if key == "num_experts" else key: value for key, value in published.items()}
    assert parameters(saved) == parameters(published)
    published = preset("deepseek-v3")
    saved = {"num_local_experts" if key == "n_routed_experts" else key: value for key, value in published.items()}
    assert parameters(saved) == parameters(published)


def test_how_a_layer_is_divided() -> None:
    shape = known_shape(preset("moonlight-16b-a3b"))
    assert shape is not None
    dense, sparse = layer_share(shape, 0), layer_share(shape, 1)
    assert dense.expert == 0
    assert sparse.expert == 64 * 3 * 2048 * 1408
    # Compression of keys, norms and the router are whole in every process.
    assert sparse.whole == 2048 * (512 + 64) + 2 * 2048 + 512 + 64 * 2048
    assert [matrix.name for matrix in matrices(shape, 0)][:3] == ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj"]


def test_adapters() -> None:
    shape = known_shape(preset("qwen3-0.6b"))
    assert shape is not None
    attention = (1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024)
    assert adapter_parameters(shape, 16, ("q_proj",)) == 28 * 16 * (1024 + 2048)
    assert adapter_parameters(shape, 16, ("all-linear",)) == 28 * 16 * (attention + 3 * (1024 + 3072))
    experts = known_shape(preset("qwen3-30b-a3b"))
    assert experts is not None
    assert adapter_parameters(experts, 8, ("gate_proj", "up_proj", "down_proj")) == 0


def test_operations_of_a_sequence() -> None:
    shape = known_shape(preset("qwen3-8b"))
    assert shape is not None
    table = 151936 * 4096
    one = 2 * (8_190_735_360 - table) + 4 * 4096 * 36
    assert forward_flops(shape, 1) == one
    # Each later token also looks at all before it.
    assert forward_flops(shape, 3) == 3 * one + (1 + 2) * 4 * 4096 * 36
    tied = known_shape(preset("qwen3-0.6b"))
    assert tied is not None
    assert forward_flops(tied, 1) == 2 * 596_049_920 + 4 * 2048 * 28  # the table is the head
    latent = known_shape(preset("deepseek-v3"))
    assert latent is not None
    pairs = forward_flops(latent, 2) - 2 * forward_flops(latent, 1)
    assert pairs == 2 * 128 * (192 + 128) * 61


TINY = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 84, "vocab_size": 130, "max_position_embeddings": 64}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
ROUTED = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16}),
    ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    ("Llama", {"head_dim": 16}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen3Moe", {"num_experts": 4, "decoder_sparse_step": 2, "head_dim": 16, **ROUTED}),
    ("Qwen3Moe", {"num_experts": 4, "mlp_only_layers": [0], "attention_bias": True, "head_dim": 16, **ROUTED}),
    ("Glm4", {"attention_bias": True, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1}),
    ("Glm4", {"attention_bias": False, "head_dim": 12, "pad_token_id": 0, "eos_token_id": 1}),
    ("Glm4Moe", {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
                 "attention_bias": True, "head_dim": 16, **ROUTED}),
    ("Glm4Moe", {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 2, "head_dim": 16, **ROUTED}),
    ("DeepseekV3", {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None,
                    "n_group": 1, "topk_group": 1, **LATENT, **ROUTED}),
    ("DeepseekV3", {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
                    "attention_bias": True, "n_group": 1, "topk_group": 1, **LATENT, **ROUTED}),
]  # fmt: skip


def count(config: Any) -> int:
    """Parameters of transformers' model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return int(sum(weight.numel() for weight in model.parameters()))


@pytest.mark.slow
def test_tiny_models_against_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for number, (kind, shape) in enumerate(VARIANTS):
        config = getattr(transformers, f"{kind}Config")(**{**TINY, **shape}, tie_word_embeddings=number % 2 == 0)
        known = known_shape(config.to_dict())
        assert known is not None, kind
        assert total_parameters(known) == count(config), (kind, shape)


@pytest.mark.slow
def test_published_models_against_transformers() -> None:
    """On the meta device: one of each family, with all its layers."""
    transformers = pytest.importorskip("transformers")
    kinds = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama", "glm4": "Glm4"}
    kinds |= {"glm4_moe": "Glm4Moe", "deepseek_v3": "DeepseekV3", "kimi_k2": "DeepseekV3"}
    names = ("qwen2.5-0.5b", "qwen3-1.7b", "llama3.1-8b", "glm4-9b", "qwen3-30b-a3b", "glm-4.5-air")
    for name in (*names, "glm-4.5-355b-a32b", "moonlight-16b-a3b", "deepseek-v3", "kimi-k2"):
        shape = {"q_lora_rank": None, **preset(name)}
        kind = kinds[shape.pop("model_type")]
        if kind != "DeepseekV3":
            shape.pop("q_lora_rank")
        config = getattr(transformers, f"{kind}Config")(**shape)
        known = known_shape(preset(name))
        assert known is not None
        assert total_parameters(known) == count(config), name
