"""Tiny random models of every family, made by transformers' own classes, with norms and biases that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 97  # odd: padded as soon as there are two tensor-parallel processes

SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
_EXPERTS = dict(
    num_hidden_layers=3, moe_intermediate_size=24, num_experts_per_tok=4, n_routed_experts=8, n_shared_experts=1,
    routed_scaling_factor=1.5, first_k_dense_replace=1,
)  # fmt: skip
_QWEN_EXPERTS = dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    rms_norm_eps=1e-3,  # far from the eps of the norms inside latent attention, which stays 1e-6
)  # fmt: skip
_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=32, beta_slow=1
)
_LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0,
    high_freq_factor=4.0,
)  # fmt: skip

# name -> (class of the configuration, its fields beyond SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_yarn": ("Qwen2Config", {"rope_parameters": _YARN}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "num_hidden_layers": 4}),  # for two stages of two chunks
    "qwen3_moe": ("Qwen3MoeConfig", {**_QWEN_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1],
                                     "norm_topk_prob": True}),
    "qwen3_moe_raw_scores": ("Qwen3MoeConfig", {**_QWEN_EXPERTS, "norm_topk_prob": False}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4_moe": ("Glm4MoeConfig", {**_EXPERTS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_groups": ("Glm4MoeConfig", {**_EXPERTS, "head_dim": 16, "n_group": 4, "topk_group": 2}),
    "deepseek_v3": ("DeepseekV3Config", {**_EXPERTS, **_LATENT, "n_group": 4, "topk_group": 2,
                                         "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    # Moonlight has no q_lora_rank, two shared experts, one group.
    "moonlight": ("DeepseekV3Config", {**_EXPERTS, **_LATENT, "q_lora_rank": None, "n_shared_experts": 2, "n_group": 1,
                                       "topk_group": 1}),
}  # fmt: skip


# Trained in shards only: caps its logits, has sliding windows.
ONLY_IN_SHARDS: dict[str, tuple[str, dict[str, Any]]] = {"gemma2": ("Gemma2Config", {"head_dim": 8})}


def config_of(name: str, **changes: Any) -> Any:
    """The configuration of a family."""
    import transformers

    kind, fields = (FAMILIES | ONLY_IN_SHARDS)[name]
    return getattr(transformers, kind)(**{**SIZES, **fields, **changes})


def make_model(name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model in fp32 arithmetic (or bf16), weights spread so that every one of them shows in the logits."""
    import transformers

    config = config_of(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            tensors = [*model.named_parameters(), *model.named_buffers()]
            for key, tensor in tensors:
                if "norm" in key or key.endswith("bias"):
                    tensor.add_(0.2 * torch.randn_like(tensor))
                elif tensor.dim() > 1:
                    tensor.mul_(4.0)
    return model.to(dtype)


def save_model(name: str, directory: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Make it, and save it as transformers does."""
    model = make_model(name, dtype=dtype)
    model.save_pretrained(directory)
    return model


def token_ids() -> torch.Tensor:
    """[2, 14]."""
    return torch.randint(0, VOCAB, (2, 14), generator=torch.Generator().manual_seed(7))


def log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of ids[:, 1:], [2, 13]. Ids that do not exist are not part of the distribution."""
    spread = logits[:, :-1, :VOCAB].float().log_softmax(dim=-1)
    return spread.gather(-1, ids[:, 1:, None]).squeeze(-1)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of minus the sum of the log-probs, under the names of a published checkpoint: experts one by one."""
    (-log_probs(model(token_ids()).logits, token_ids()).sum()).backward()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        layer, _, kind = name.partition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {"down_proj": 0}
            for part, index in parts.items():
                found[f"{layer}.experts.{expert}.{part}.weight"] = gradient.chunk(len(parts))[index]
    return found
