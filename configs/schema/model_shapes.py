"""The shape of a model, read from its Hugging Face config.json: one reader for planner, trainers and embedded engine.

Families: qwen2, qwen3, qwen3_moe, llama, glm, glm4, glm4_moe, deepseek_v3 and kimi_k2. The shapes are those of the
published modules (transformers' modeling files). Heads for multi-token prediction are left out: they are not trained.

Invariant: an unknown or incomplete shape is not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

FAMILIES: Final = ("qwen2", "qwen3", "qwen3_moe", "llama", "glm", "glm4", "glm4_moe", "deepseek_v3", "kimi_k2")
_LATENT: Final = ("deepseek_v3", "kimi_k2")
_SHARED: Final = ("glm4_moe", *_LATENT)  # experts beside which a shared one always runs


class Latent(Struct, frozen=True):
    """Multi-head latent attention: widths of the compressed queries (None: not compressed) and keys, of the parts of a
    head without and with positions, and of a value head."""

    query_rank: int | None
    key_rank: int
    plain: int
    rotary: int
    value: int


class ModelShape(Struct, frozen=True, kw_only=True):
    """Sizes in elements. `shared_ffn`: width of all shared experts together; `sparse`: per layer, whether it has
    experts; `norms`: RMSNorms of the hidden width in each layer."""

    family: str
    hidden: int
    layers: int
    vocabulary: int
    tied: bool
    heads: int
    kv_heads: int
    head: int
    ffn: int
    ffn_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    latent: Latent | None = None
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    sparse: tuple[bool, ...] = ()
    norms: int = 2
    positions: int | None = None

    @property
    def query_width(self) -> int:
        """Of all query heads; where attention is latent, of the heads that are compared."""
        return self.heads * (self.latent.plain + self.latent.rotary if self.latent else self.head)

    @property
    def value_width(self) -> int:
        """Of what attention gives to its output matrix."""
        return self.heads * (self.latent.value if self.latent else self.head)

    @property
    def key_values(self) -> int:
        """Elements that the KV cache keeps of one token in one layer."""
        return self.latent.key_rank + self.latent.rotary if self.latent else 2 * self.kv_heads * self.head


def known_shape(model: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a config.json; None for a family that is not known, or where a size is missing."""
    if model.get("model_type") not in FAMILIES:
        return None
    try:
        return read_shape(model)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def read_shape(model: Mapping[str, Any], family: str | None = None) -> ModelShape:
    """The shape of a config.json of a known family, by default its `model_type`. Raises `KeyError(key)` for a missing
    size."""
    family = family or str(model["model_type"])
    hidden, layers, heads = (_size(model, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    biased = bool(model.get("attention_bias", family in ("qwen2", "glm", "glm4")))
    positions = model.get("max_position_embeddings")
    latent = _latent(model) if family in _LATENT else None
    shape = ModelShape(
        family=family,
        hidden=hidden,
        layers=layers,
        vocabulary=_size(model, "vocab_size"),
        tied=bool(model.get("tie_word_embeddings", False)),
        heads=heads,
        kv_heads=heads if latent else int(model.get("num_key_value_heads") or heads),
        head=int(model.get("head_dim") or hidden // heads),
        ffn=_size(model, "intermediate_size"),
        ffn_bias=family == "llama" and bool(model.get("mlp_bias", False)),
        qkv_bias=biased or family == "qwen2",
        out_bias=biased and family in ("llama", "qwen3", "qwen3_moe", *_LATENT),
        qk_norm=family.startswith("qwen3") or bool(family == "glm4_moe" and model.get("use_qk_norm", False)),
        latent=latent,
        sparse=(False,) * layers,
        norms=4 if family == "glm4" else 2,
        positions=positions if isinstance(positions, int) else None,
    )
    return _with_experts(shape, model) if family in ("qwen3_moe", *_SHARED) else shape


def _size(model: Mapping[str, Any], key: str) -> int:
    if model.get(key) is None:
        raise KeyError(key)
    return int(model[key])


def _latent(model: Mapping[str, Any]) -> Latent:
    rank = model.get("q_lora_rank")
    return Latent(
        int(rank) if rank is not None else None,
        *(_size(model, key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    )


def _with_experts(shape: ModelShape, model: Mapping[str, Any]) -> ModelShape:
    if shape.family == "qwen3_moe":
        # `num_experts` as published, `num_local_experts` as transformers saves it again.
        count = int(model.get("num_experts") or model.get("num_local_experts") or 0)
        step, dense = int(model.get("decoder_sparse_step") or 1), tuple(model.get("mlp_only_layers") or ())
        sparse = tuple(count > 0 and (at + 1) % step == 0 and at not in dense for at in range(shape.layers))
    else:
        count = int(model.get("n_routed_experts") or model.get("num_local_experts") or 0)
        first = int(model.get("first_k_dense_replace") or 0)
        step = int(model.get("moe_layer_freq") or 1)
        sparse = tuple(count > 0 and at >= first and at % step == 0 for at in range(shape.layers))
    width = _size(model, "moe_intermediate_size") if count else 0
    shared = shape.family in _SHARED
    return replace(
        shape,
        experts=count,
        active_experts=_size(model, "num_experts_per_tok") if count else 0,
        expert_ffn=width,
        shared_ffn=int(model.get("n_shared_experts") or 0) * width if shared else 0,
        sparse=sparse,
    )


# Keys that must be absent, null or one of these values in every family, for other values change the logits. Training
# and serving compute nothing else, apart from the exceptions that a caller gives.
ALLOWED_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, 0.0),
    "hidden_dropout": (0, 0.0),
    "mlp_bias": (False,),
    "use_mrope": (False,),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}


def refused_keys(model: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...] | None]) -> Iterator[str]:
    """Keys of a config.json whose value cannot be computed. `allowed`: exceptions to `ALLOWED_VALUES`; None allows
    everything."""
    if model.get("quantization_config"):
        yield "quantization_config"
    if set(model.get("layer_types") or ()) - {"full_attention"}:
        yield "layer_types"
    if model.get("use_sliding_window"):
        yield "use_sliding_window"
    for key, values in {**ALLOWED_VALUES, **allowed}.items():
        if values is not None and model.get(key) is not None and model[key] not in values:
            yield key
