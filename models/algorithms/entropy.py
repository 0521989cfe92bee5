"""Log-probabilities of chosen tokens and entropy of whole distributions, from logits.

Invariants: arithmetic in fp32 at least, whatever the model's precision; logits are divided by the temperature first,
so that the trainer's numbers and the engine's describe the same distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_log_probs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, entropy: str = "none"
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] of `targets` [N] under softmax(`logits` [N, V] / temperature), and the entropies [N].

    `entropy`: "none"; "value" computes it without a graph; "graph" keeps the graph, for a bonus in the loss.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    log_normaliser = scaled.logsumexp(dim=-1)
    chosen = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normaliser
    if entropy == "none":
        return chosen, None
    with torch.set_grad_enabled(entropy == "graph" and torch.is_grad_enabled()):
        return chosen, _entropy(scaled, log_normaliser)


def _entropy(scaled: Tensor, log_normaliser: Tensor) -> Tensor:
    probabilities = (scaled - log_normaliser.unsqueeze(-1)).exp()
    # A logit of -inf has probability 0 and contributes 0, not 0 * inf; replaced before the product, whose gradient
    # would be 0 * inf otherwise.
    finite = torch.where(probabilities > 0, scaled, 0.0)
    return log_normaliser - (probabilities * finite).sum(dim=-1)
