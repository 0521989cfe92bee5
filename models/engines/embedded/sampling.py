"""Drawing tokens: one log-softmax, log-probs after temperature and before truncation, noise per request.

Invariants:
- a row's token depends on that row's logits, rule, seed and position only: rows with truncation are filtered in
  vocabulary order, so that they draw like rows without, whatever else is in the batch;
- the log-prob of a token is log_softmax(logits / T) over the whole vocabulary; for T = 0 (greedy) T counts as 1.
Tokens come from the inverse distribution function: one uniform number per row, cheap at any vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models.engines.core import Completion
from models.engines.noise import GOLDEN, MASK, MIX_1, MIX_2, mix


def signed(x: int) -> int:
    """The 64 bits of `x` as torch's int64 has them."""
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def uniform(mixed_seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`noise.uniform` for int64 tensors [B]; `mixed_seeds` are mixed already. Returns float64 [B]."""
    x = mixed_seeds + positions * signed(GOLDEN)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(MIX_2)
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


@dataclass(frozen=True)
class SamplingBatch:
    """Rules of the rows of a batch on the device; None where no row needs it."""

    mixed_seeds: torch.Tensor  # [B] int64
    inverse_temperature: torch.Tensor | None  # [B, 1]
    greedy: torch.Tensor | None  # [B] bool
    truncation: Truncation | None

    @classmethod
    def of(cls, completions: Sequence[Completion], device: torch.device) -> SamplingBatch:
        rules = [c.rule for c in completions]
        seeds = torch.tensor([signed(mix(c.seed)) for c in completions], dtype=torch.int64)
        inverse: torch.Tensor | None = None
        greedy: torch.Tensor | None = None
        if any(rule.temperature != 1.0 for rule in rules):
            inverse = torch.tensor([[1.0 if rule.greedy else 1.0 / rule.temperature] for rule in rules]).to(device)
        if any(rule.greedy for rule in rules):
            greedy = torch.tensor([rule.greedy for rule in rules]).to(device)
        return cls(seeds.to(device), inverse, greedy, Truncation.of(completions, device))


@dataclass(frozen=True)
class Truncation:
    """Rows that keep only part of the vocabulary."""

    rows: torch.Tensor  # [N] int64
    top_k: torch.Tensor  # [N, 1]
    top_p: torch.Tensor  # [N, 1]
    min_p: torch.Tensor  # [N, 1]

    @classmethod
    def of(cls, completions: Sequence[Completion], device: torch.device) -> Truncation | None:
        rows = [index for index, c in enumerate(completions) if c.rule.truncates and not c.rule.greedy]
        if not rows:
            return None
        rules = [completions[index].rule for index in rows]
        return cls(
            rows=torch.tensor(rows).to(device),
            top_k=torch.tensor([[rule.top_k if rule.top_k > 0 else 1 << 30] for rule in rules]).to(device),
            top_p=torch.tensor([[rule.top_p] for rule in rules], dtype=torch.float64).to(device),
            min_p=torch.tensor([[rule.min_p] for rule in rules], dtype=torch.float64).to(device),
        )

    def apply(self, probabilities: torch.Tensor) -> None:
        """Zero what is cut off, in place. A token stays if its rank is below top_k, the mass before it (of the whole
        distribution) is below top_p, and it has at least min_p times the largest probability."""
        part = probabilities[self.rows]
        ordered, order = part.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        ranks = torch.arange(part.shape[-1], device=part.device)
        kept = (ranks < self.top_k) & (before < self.top_p) & (ordered >= self.min_p * ordered[:, :1])
        mask = torch.zeros_like(kept).scatter_(-1, order, kept)
        probabilities[self.rows] = part * mask


def draw(logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> torch.Tensor:
    """Tokens and log-probs of fp32 logits [B, V], as float64 [2, B] so that one transfer brings both.

    `positions` [B]: where the new token will stand, counted from the start of the prompt.
    """
    scaled = logits if batch.inverse_temperature is None else logits * batch.inverse_temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    probabilities = log_probs.exp()
    if batch.truncation is not None:
        batch.truncation.apply(probabilities)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    target = uniform(batch.mixed_seeds, positions).unsqueeze(-1) * cumulative[:, -1:]
    tokens = (cumulative <= target).sum(dim=-1).clamp_(max=logits.shape[-1] - 1)
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, logits.argmax(dim=-1), tokens)
    chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.stack((tokens.to(torch.float64), chosen.to(torch.float64)))


def forbid(logits: torch.Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
    """Make tokens impossible in rows, in place: stop tokens before `min_new_tokens` is reached."""
    logits[torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)] = float("-inf")
