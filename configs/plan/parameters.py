"""Parameters and floating point operations of a model, from its shapes. Pure arithmetic.

    forward pass of a token   2 * (active parameters without the embedding table) + attention     multiply and add
    attention of a token      2 * (query width + value width) * (tokens before it, itself included), in every layer
    backward pass             twice the forward pass

Sources: Kaplan et al., arXiv:2001.08361, section 2.1, with grouped heads and latent attention counted as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from configs.plan.architecture import Architecture, architecture, matrices, vectors


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
    shape = architecture(model)
    return total_parameters(shape) if shape is not None else None


def layer_share(shape: Architecture, layer: int) -> Share:
    """Parameters of one layer."""
    counts = {"tensor": 0, "expert": 0, "whole": vectors(shape)}
    for matrix in matrices(shape, layer):
        counts[matrix.split] += matrix.parameters
    return Share(**counts)


def total_parameters(shape: Architecture) -> int:
    """All parameters that are trained: the biases by which routers balance their experts are not."""
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return embeddings + shape.hidden + sum(layer_share(shape, layer).total for layer in range(shape.layers))


def active_parameters(shape: Architecture) -> int:
    """Parameters that one token passes, embedding table and head included, as published figures count them."""
    resting = sum(
        (matrix.copies - matrix.active) * matrix.parameters // matrix.copies
        for layer in range(shape.layers)
        for matrix in matrices(shape, layer)
    )
    return total_parameters(shape) - resting


def adapter_parameters(shape: Architecture, rank: int, targets: tuple[str, ...]) -> int:
    """Of LoRA: rank * (inputs + outputs) for each linear module that is meant; routed experts and routers get none."""
    everything = "all-linear" in targets
    return sum(
        rank * (matrix.inputs + matrix.outputs)
        for layer in range(shape.layers)
        for matrix in matrices(shape, layer)
        if matrix.split != "expert" and matrix.name != "router"
        if everything or matrix.name.rpartition(".")[2] in targets
    )


def forward_flops(shape: Architecture, length: int) -> int:
    """Of one sequence of `length` tokens through the model and its head, attention causal."""
    used = active_parameters(shape) - (0 if shape.tied else shape.vocabulary * shape.hidden)
    pairs = length * (length + 1) // 2
    attention = 2 * (shape.query_width + shape.value_width) * pairs * shape.layers
    return 2 * used * length + attention
