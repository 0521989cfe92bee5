"""What a Hugging Face config.json says about a model's matrices, in one form for all known families. Pure.

Families: qwen2, qwen3, qwen3_moe, llama, glm4, glm4_moe, deepseek_v3 and kimi_k2. The shapes are those of the published
modules (transformers' modeling files); heads for multi-token prediction are left out, as they are not trained.

Invariants: every matrix of a model appears in exactly one `Matrix`; an unknown or incomplete shape is not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from msgspec import Struct

FAMILIES: Final = ("qwen2", "qwen3", "qwen3_moe", "llama", "glm4", "glm4_moe", "deepseek_v3", "kimi_k2")
_LATENT: Final = ("deepseek_v3", "kimi_k2")
_SHARED: Final = ("glm4_moe", *_LATENT)  # experts beside which a shared one always runs

# How tensor and expert parallelism divide a matrix: over TP, over EP and expert TP, or not at all.
Split = Literal["tensor", "expert", "whole"]


class Latent(Struct, frozen=True):
    """Multi-head latent attention: widths of the compressed queries (None: not compressed) and keys, of the parts of a
    head without and with positions, and of a value head."""

    query_rank: int | None
    key_rank: int
    plain: int
    rotary: int
    value: int


class Architecture(Struct, frozen=True, kw_only=True):
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


class Matrix(Struct, frozen=True):
    """`copies`: equal matrices of a layer, e.g. one per expert; `active`: those that a token passes."""

    name: str
    inputs: int
    outputs: int
    split: Split
    bias: bool = False
    copies: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        return self.copies * self.outputs * (self.inputs + self.bias)


def architecture(model: Mapping[str, Any]) -> Architecture | None:
    """The shapes of a config.json; None for a family that is not known, or where a size is missing."""
    family = model.get("model_type")
    if family not in FAMILIES:
        return None
    try:
        return _read(str(family), model)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _read(family: str, model: Mapping[str, Any]) -> Architecture:
    hidden, layers, heads = (int(model[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    biased = bool(model.get("attention_bias", family == "qwen2"))
    positions = model.get("max_position_embeddings")
    latent = _latent(model) if family in _LATENT else None
    shape = Architecture(
        family=family,
        hidden=hidden,
        layers=layers,
        vocabulary=int(model["vocab_size"]),
        tied=bool(model.get("tie_word_embeddings", False)),
        heads=heads,
        kv_heads=heads if latent else int(model.get("num_key_value_heads") or heads),
        head=int(model.get("head_dim") or hidden // heads),
        ffn=int(model["intermediate_size"]),
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


def _latent(model: Mapping[str, Any]) -> Latent:
    rank = model.get("q_lora_rank")
    return Latent(
        int(rank) if rank is not None else None,
        *(int(model[key]) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    )


def _with_experts(shape: Architecture, model: Mapping[str, Any]) -> Architecture:
    from msgspec.structs import replace

    if shape.family == "qwen3_moe":
        # `num_experts` as published, `num_local_experts` as transformers saves it again.
        count = int(model.get("num_experts") or model.get("num_local_experts") or 0)
        step, dense = int(model.get("decoder_sparse_step", 1)), tuple(model.get("mlp_only_layers") or ())
        sparse = tuple(count > 0 and (at + 1) % step == 0 and at not in dense for at in range(shape.layers))
    else:
        count = int(model.get("n_routed_experts") or model.get("num_local_experts") or 0)
        first = int(model.get("first_k_dense_replace") or 0)
        step = int(model.get("moe_layer_freq", 1))
        sparse = tuple(count > 0 and at >= first and at % step == 0 for at in range(shape.layers))
    width = int(model["moe_intermediate_size"]) if count else 0
    shared = shape.family in _SHARED
    return replace(
        shape,
        experts=count,
        active_experts=int(model["num_experts_per_tok"]) if count else 0,
        expert_ffn=width,
        shared_ffn=int(model.get("n_shared_experts") or 0) * width if shared else 0,
        sparse=sparse,
    )


def matrices(shape: Architecture, layer: int) -> Iterator[Matrix]:
    """The matrices of one layer, under the names of Hugging Face's modules."""
    yield from _latent_attention(shape, shape.latent) if shape.latent else _attention(shape)
    hidden = shape.hidden
    if not shape.sparse[layer]:
        for name in ("gate_proj", "up_proj"):
            yield Matrix(name, hidden, shape.ffn, "tensor", shape.ffn_bias)
        yield Matrix("down_proj", shape.ffn, hidden, "tensor", shape.ffn_bias)
        return
    yield Matrix("router", hidden, shape.experts, "whole")
    for name in ("gate_proj", "up_proj", "down_proj"):
        inputs, outputs = (shape.expert_ffn, hidden) if name == "down_proj" else (hidden, shape.expert_ffn)
        yield Matrix(f"experts.{name}", inputs, outputs, "expert", False, shape.experts, shape.active_experts)
        if shape.shared_ffn:
            inputs, outputs = (shape.shared_ffn, hidden) if name == "down_proj" else (hidden, shape.shared_ffn)
            yield Matrix(f"shared_experts.{name}", inputs, outputs, "tensor")


def _attention(shape: Architecture) -> Iterator[Matrix]:
    narrow = shape.kv_heads * shape.head
    yield Matrix("q_proj", shape.hidden, shape.query_width, "tensor", shape.qkv_bias)
    for name in ("k_proj", "v_proj"):
        yield Matrix(name, shape.hidden, narrow, "tensor", shape.qkv_bias)
    yield Matrix("o_proj", shape.value_width, shape.hidden, "tensor", shape.out_bias)


def _latent_attention(shape: Architecture, latent: Latent) -> Iterator[Matrix]:
    if latent.query_rank is None:
        yield Matrix("q_proj", shape.hidden, shape.query_width, "tensor")
    else:
        yield Matrix("q_a_proj", shape.hidden, latent.query_rank, "whole", shape.qkv_bias)
        yield Matrix("q_b_proj", latent.query_rank, shape.query_width, "tensor")
    yield Matrix("kv_a_proj_with_mqa", shape.hidden, latent.key_rank + latent.rotary, "whole", shape.qkv_bias)
    yield Matrix("kv_b_proj", latent.key_rank, shape.heads * (latent.plain + latent.value), "tensor")
    yield Matrix("o_proj", shape.value_width, shape.hidden, "tensor", shape.out_bias)


def vectors(shape: Architecture) -> int:
    """Elements of one layer's norms; every process holds them whole."""
    own = 2 * shape.head if shape.qk_norm else 0
    if shape.latent:
        own = shape.latent.key_rank + (shape.latent.query_rank or 0)
    return shape.norms * shape.hidden + own
