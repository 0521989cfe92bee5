"""Log-probs and entropies where each tensor-parallel process holds the logits of a part of the vocabulary.

Equal to `models.algorithms.entropy.token_log_probs` on all logits, values and gradients: every process of the group
finds the same numbers, computes the same loss from them, and gets the gradient of its own logits.

Invariants: arithmetic in fp32 whatever the model's precision; ids from `vocab_size` on are padding of the matrices, to
which no probability belongs; no process ever holds logits of the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class VocabularyPart:
    """Which ids this process has logits of: `width` from `first` on."""

    group: Any  # tensor-parallel processes, by rank
    first: int
    width: int
    vocab_size: int  # ids that exist

    @classmethod
    def of(cls, group: Any, width: int, vocab_size: int) -> VocabularyPart:
        """The part of this process of `group`, whose parts are all of `width` ids."""
        return cls(group, group.rank() * width, width, vocab_size)


def vocabulary_log_probs(
    logits: Tensor, targets: Tensor, part: VocabularyPart, *, temperature: float = 1.0, entropy: str = "none"
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] of `targets` [N] under softmax(logits / temperature), and the entropies [N]. Collective.

    `logits` [N, width] of this process. `entropy`: "none"; "value" without a graph; "graph" with one.
    """
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region as total

    scaled = _scaled(logits, part, temperature)
    with torch.no_grad():
        largest = scaled.amax(dim=-1)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=part.group)
    # Forward a sum over the group, backward nothing: each process has the whole loss, and its own addend.
    normaliser = total((scaled - largest.unsqueeze(-1)).exp().sum(dim=-1), group=part.group)
    log_normaliser = largest + normaliser.log()
    own = (targets >= part.first) & (targets < part.first + part.width)
    at = torch.where(own, targets - part.first, 0)
    chosen = torch.where(own, scaled.gather(-1, at.unsqueeze(-1)).squeeze(-1), 0.0)
    log_probs = total(chosen, group=part.group) - log_normaliser
    if entropy == "none":
        return log_probs, None
    with torch.set_grad_enabled(entropy == "graph" and torch.is_grad_enabled()):
        return log_probs, _entropy(scaled, log_normaliser, part)


def _scaled(logits: Tensor, part: VocabularyPart, temperature: float) -> Tensor:
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    real = max(min(part.vocab_size - part.first, part.width), 0)
    if real < part.width:
        padding = torch.arange(part.width, device=logits.device) >= real
        scaled = scaled.masked_fill(padding, -torch.inf)
    return scaled


def _entropy(scaled: Tensor, log_normaliser: Tensor, part: VocabularyPart) -> Tensor:
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region as shared
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region as total

    # The normaliser is used by every process for its own addends: their gradients to it are summed.
    probabilities = (scaled - shared(log_normaliser, group=part.group).unsqueeze(-1)).exp()
    # A logit of -inf has probability 0 and contributes 0, not 0 * inf.
    finite = torch.where(probabilities > 0, scaled, 0.0)
    return log_normaliser - total((probabilities * finite).sum(dim=-1), group=part.group)
