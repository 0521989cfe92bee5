"""Matrices, parameters and floating point operations of a model, from its shape. No I/O.

    forward pass of a token   2 * (active parameters without the embedding table) + attention     multiply and add
    attention of a token      2 * (query width + value width) * (tokens before it, itself included), in every layer
    backward pass             twice the forward pass

Invariant: every matrix of a model appears in exactly one `Matrix`.

Sources: Kaplan et al., arXiv:2001.08361, section 2.1, with grouped heads and latent attention counted as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from configs.schema.model_shapes import Latent, ModelShape, known_shape

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


class Share(Struct, frozen=True):
    """Parameters by how they are divided: over tensor parallel processes, over experts' processes, not at all."""

    tensor: int = 0
    expert: int = 0
    whole: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(self.tensor + other.tensor, self.expert + other.expert, self.whole + other.whole)

    @property
    def total(self) -> int:
        return self.tensor + self.expert + self.whole


def parameters(model: Mapping[str, Any]) -> int | None:
    """Trainable parameters of a Hugging Face config.json; None for a family that is not known."""
    shape = known_shape(model)
    return total_parameters(shape) if shape is not None else None


def layer_share(shape: ModelShape, layer: int) -> Share:
    """Parameters of one layer."""
    counts = {"tensor": 0, "expert": 0, "whole": vectors(shape)}
    for matrix in matrices(shape, layer):
        counts[matrix.split] += matrix.parameters
    return Share(**counts)


def total_parameters(shape: ModelShape) -> int:
    """All parameters that are trained: the biases by which routers balance their experts are not."""
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return embeddings + shape.hidden + sum(layer_share(shape, layer).total for layer in range(shape.layers))


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
