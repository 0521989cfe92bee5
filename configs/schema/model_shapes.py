"""The shape of a model from its Hugging Face config.json, and its matrices, parameters and floating point operations.

One reader for planner, trainers and embedded engine. Families: qwen2, qwen3, qwen3_moe, llama, glm, glm4, glm4_moe,
deepseek_v3 and kimi_k2, with the shapes of transformers' modeling files. Heads for multi-token prediction are left out:
they are not trained.

    forward pass of a token   2 * (active parameters without the embedding table) + attention     multiply and add
    attention of a token      2 * (query width + value width) * (tokens before it, itself included), in every layer
    backward pass             twice the forward pass

Invariants: an unknown or incomplete shape is not guessed; every matrix of a model appears in exactly one `Matrix`.

Sources: Kaplan et al., arXiv:2001.08361, section 2.1, with grouped heads and latent attention counted as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

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


SCALE: Final = "_scale_inv"  # what the name of a matrix in float8 ends with where its scales are


def fp8_block(model: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, if the weights are in float8 as DeepSeek and Qwen publish it; else None."""
    found = model.get("quantization_config") or {}
    block: Sequence[int] = found.get("weight_block_size") or ()
    plain = found.get("fmt", "e4m3") == "e4m3" and found.get("scale_fmt") in (None, "float")
    known = found.get("quant_method") == "fp8" and plain and len(block) == 2
    return (int(block[0]), int(block[1])) if known else None


# How tensor and expert parallelism divide a matrix: over TP, over EP and expert TP, or not at all.
Split = Literal["tensor", "expert", "whole"]


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


def matrices(shape: ModelShape, layer: int) -> Iterator[Matrix]:
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


def _attention(shape: ModelShape) -> Iterator[Matrix]:
    narrow = shape.kv_heads * shape.head
    yield Matrix("q_proj", shape.hidden, shape.query_width, "tensor", shape.qkv_bias)
    for name in ("k_proj", "v_proj"):
        yield Matrix(name, shape.hidden, narrow, "tensor", shape.qkv_bias)
    yield Matrix("o_proj", shape.value_width, shape.hidden, "tensor", shape.out_bias)


def _latent_attention(shape: ModelShape, latent: Latent) -> Iterator[Matrix]:
    if latent.query_rank is None:
        yield Matrix("q_proj", shape.hidden, shape.query_width, "tensor")
    else:
        yield Matrix("q_a_proj", shape.hidden, latent.query_rank, "whole", shape.qkv_bias)
        yield Matrix("q_b_proj", latent.query_rank, shape.query_width, "tensor")
    yield Matrix("kv_a_proj_with_mqa", shape.hidden, latent.key_rank + latent.rotary, "whole", shape.qkv_bias)
    yield Matrix("kv_b_proj", latent.key_rank, shape.heads * (latent.plain + latent.value), "tensor")
    yield Matrix("o_proj", shape.value_width, shape.hidden, "tensor", shape.out_bias)


def vectors(shape: ModelShape) -> int:
    """Elements of one layer's norms; every process holds them whole."""
    own = 2 * shape.head if shape.qk_norm else 0
    if shape.latent:
        own = shape.latent.key_rank + (shape.latent.query_rank or 0)
    return shape.norms * shape.hidden + own


def layer_share(shape: ModelShape, layer: int) -> Counter[Split]:
    """Parameters of one layer by how they are divided."""
    counts: Counter[Split] = Counter({"whole": vectors(shape)})
    for matrix in matrices(shape, layer):
        counts[matrix.split] += matrix.parameters
    return counts


def total_parameters(shape: ModelShape) -> int:
    """All parameters that are trained: the biases by which routers balance their experts are not."""
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return embeddings + shape.hidden + sum(layer_share(shape, layer).total() for layer in range(shape.layers))


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token passes, embedding table and head included, as published figures count them."""
    resting = sum(
        (matrix.copies - matrix.active) * matrix.parameters // matrix.copies
        for layer in range(shape.layers)
        for matrix in matrices(shape, layer)
    )
    return total_parameters(shape) - resting


def adapter_parameters(shape: ModelShape, rank: int, targets: tuple[str, ...]) -> int:
    """Of LoRA: rank * (inputs + outputs) for each linear module that is meant; routed experts and routers get none."""
    everything = "all-linear" in targets
    return sum(
        rank * (matrix.inputs + matrix.outputs)
        for layer in range(shape.layers)
        for matrix in matrices(shape, layer)
        if matrix.split != "expert" and matrix.name != "router"
        if everything or matrix.name.rpartition(".")[2] in targets
    )


def forward_flops(shape: ModelShape, length: int) -> int:
    """Of one sequence of `length` tokens through the model and its head, attention causal."""
    used = active_parameters(shape) - (0 if shape.tied else shape.vocabulary * shape.hidden)
    pairs = length * (length + 1) // 2
    attention = 2 * (shape.query_width + shape.value_width) * pairs * shape.layers
    return 2 * used * length + attention
