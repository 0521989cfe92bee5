"""Columns of tokens from examples: what every loss and every fact of a step is computed from.

Invariant: the order is that of the examples given, token by token; all tokens are trainable ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.algorithms.tokens import PolicyTokens, StepStatistics
from models.errors import BackendMisuse
from models.train.dp_group import Float32Array
from models.train.step.examples import Example

Int64Array = npt.NDArray[np.int64]


def token_counts(examples: Sequence[Example]) -> Int64Array:
    """Trainable tokens [S] of each example."""
    return np.array([len(example.chosen) for example in examples], dtype=np.int64)


def float_column(parts: Sequence[Float32Array | None], device: torch.device) -> Tensor:
    """One flat fp32 tensor [N] on the device from the values of each example. Raises `BackendMisuse` for a gap."""
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        raise BackendMisuse("some examples of a batch have old log-probs and others not; begin a new batch")
    if not present:
        return torch.zeros(0, device=device)
    return torch.from_numpy(np.concatenate(present).astype(np.float32, copy=False)).to(device)


def optional_column(parts: Sequence[Float32Array | None], device: torch.device) -> Tensor | None:
    """As `float_column`, but None if no example has the values."""
    return None if all(part is None for part in parts) else float_column(parts, device)


def weight_column(examples: Sequence[Example], device: torch.device) -> Tensor:
    """Coefficient [N] of each token in the loss."""
    coefficients = np.array([example.coefficient for example in examples], dtype=np.float32)
    return torch.from_numpy(np.repeat(coefficients, token_counts(examples))).to(device)


def policy_tokens(
    examples: Sequence[Example],
    log_probs: Tensor,
    *,
    bypass: bool,
    device: torch.device,
    statistics: StepStatistics,
    entropy: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
) -> PolicyTokens:
    """The tokens of `examples` with `log_probs` [N] under the current weights.

    Old log-probs are mu with `bypass`, else those stored, else those of the current weights: with one step per batch
    they are those of its start. `ref_log_probs`: those of the examples unless given.
    """
    counts = token_counts(examples)
    rollout_log_probs = float_column([example.rollout_log_probs for example in examples], device)
    old = None if bypass else optional_column([example.old_log_probs for example in examples], device)
    if ref_log_probs is None:
        ref_log_probs = optional_column([example.ref_log_probs for example in examples], device)
    stale = [np.zeros(len(e.chosen), np.int64) if e.staleness is None else e.staleness for e in examples]
    return PolicyTokens(
        log_probs=log_probs,
        old_log_probs=rollout_log_probs if bypass else log_probs.detach() if old is None else old,
        rollout_log_probs=rollout_log_probs,
        advantages=float_column([example.advantages for example in examples], device),
        mask=torch.ones(int(counts.sum()), dtype=torch.bool, device=device),
        sequence=torch.from_numpy(np.repeat(np.arange(len(examples)), counts)).to(device),
        n_sequences=len(examples),
        ref_log_probs=ref_log_probs,
        entropy=entropy,
        staleness=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *stale])).to(device),
        rejected=torch.tensor([example.rejected for example in examples], dtype=torch.bool, device=device),
        kept_scale=_scale(examples, device),
        statistics=statistics,
    )


def rollout_numbers(examples: Sequence[Example]) -> tuple[Tensor, int]:
    """The rollout [S] of each example, counted from 0, and how many there are."""
    keys = np.array([example.key for example in examples], dtype=np.int64).reshape(-1, 2)
    rollouts, rollout = np.unique(keys, axis=0, return_inverse=True)
    return torch.from_numpy(rollout.reshape(-1)), len(rollouts)


def _scale(examples: Sequence[Example], device: torch.device) -> Tensor | None:
    scales = [example.kept_scale for example in examples]
    return None if all(scale == 1.0 for scale in scales) else torch.tensor(scales, dtype=torch.float32, device=device)
