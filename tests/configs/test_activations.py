"""The coefficients of activation memory against what autograd keeps of transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest

from configs.plan.memory import Form, layer_activations
from configs.schema.model_shapes import known_shape

TOKENS = 128
SHAPE = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
SHAPE |= {"intermediate_size": 320}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 48, "q_lora_rank": 64, "qk_nope_head_dim": 32}
# Heads of one width: for two, CPU attention falls back to a kernel that keeps the scores.
LATENT |= {"qk_rope_head_dim": 16, "v_head_dim": 48, "first_k_dense_replace": 9}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3", {"head_dim": 32}),
    ("Llama", {"head_dim": 64}),
    ("Glm4", {"head_dim": 32, "pad_token_id": 0, "eos_token_id": 1}),
    ("Qwen3Moe", {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}),
    ("DeepseekV3", LATENT),
]


def kept(config: Any, form: Form) -> float:
    """Bytes per token that a forward pass keeps, without weights."""
    import torch

    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if form == "bfloat16":
        model = model.to(torch.bfloat16)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    alive: dict[int, tuple[int, Any]] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        alive.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))  # held, so that no address is used again
        return tensor

    ids = torch.randint(0, 64, (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=ids)
    own = {pointer: size for pointer, (size, _) in alive.items() if pointer not in weights}
    return sum(own.values()) / TOKENS


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), CASES, ids=[kind for kind, _ in CASES])
def test_a_layer_keeps_what_is_estimated(kind: str, shape: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    make = getattr(transformers, f"{kind}Config")
    forms: tuple[Form, ...] = ("float32", "bfloat16")
    for form in forms:
        one, three = (make(**{**SHAPE, **shape}, num_hidden_layers=layers, attention_dropout=0.0) for layers in (1, 3))
        known = known_shape(three.to_dict())
        assert known is not None
        measured = (kept(three, form) - kept(one, form)) / 2
        assert layer_activations(known, 2, form) == pytest.approx(measured, rel=0.06), form
