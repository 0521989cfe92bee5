"""How token losses become one number: numerators of parts of a step, one denominator of the whole step.

    mode          loss of the step
    rollout_mean  1/G  sum over rollouts [ sum of m L over the rollout's sequences / max(sum of m over them, 1) ]
    token_mean    sum of m L / max(sum of m, 1)
    seq_mean      mean over sequences of (sum of m L / max(sum of m, 1))
    constant      sum of m L / (G C), C = longest response possible (arXiv:2503.20783)

G = rollouts of the step, fully masked ones included.

Every mode is  sum of c(token) m L / D  with a coefficient c known from the token's own rollout and one number D known
when the step is complete. Hence gradients of the numerators may be summed over micro-batches in any split, and be
divided by D at the end. All terms of the loss and all metrics use the same c and D.

Invariant: no torch here; D is a fact of the step, never of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from models.errors import AlgorithmError

Aggregation = Literal["rollout_mean", "token_mean", "seq_mean", "constant"]
FloatArray = npt.NDArray[np.float64]


def coefficients(mode: Aggregation, sequence_tokens: npt.ArrayLike, rollout_tokens: npt.ArrayLike) -> FloatArray:
    """c [S] of the tokens of each of S sequences.

    `sequence_tokens` [S]: trainable tokens of each sequence; `rollout_tokens` [S]: trainable tokens of the whole
    rollout that the sequence belongs to.
    """
    own = np.asarray(sequence_tokens, dtype=np.float64)
    if mode == "rollout_mean":
        return 1.0 / np.maximum(np.asarray(rollout_tokens, dtype=np.float64), 1.0)
    if mode == "seq_mean":
        return 1.0 / np.maximum(own, 1.0)
    if mode in ("token_mean", "constant"):
        return np.ones_like(own)
    raise _unknown(mode)


@dataclass(frozen=True)
class StepSize:
    """What a step consists of, fully masked rollouts and sequences included."""

    rollouts: int = 0
    sequences: int = 0
    tokens: int = 0  # trainable

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(self.rollouts + other.rollouts, self.sequences + other.sequences, self.tokens + other.tokens)


def denominator(mode: Aggregation, size: StepSize, *, max_response_len: int) -> float:
    """D of the step; at least 1 so that an empty step is 0 and not NaN."""
    if mode == "rollout_mean":
        return float(max(size.rollouts, 1))
    if mode == "token_mean":
        return float(max(size.tokens, 1))
    if mode == "seq_mean":
        return float(max(size.sequences, 1))
    if mode == "constant":
        return float(max(size.rollouts, 1) * max_response_len)
    raise _unknown(mode)


def metric_mode(mode: Aggregation) -> Aggregation:
    """The reducer of metrics: that of the loss, but a token mean for `constant`, whose divisor is no count."""
    return "token_mean" if mode == "constant" else mode


def _unknown(mode: str) -> AlgorithmError:
    return AlgorithmError(
        f"loss_aggregation={mode!r} is unknown: choose rollout_mean, token_mean, seq_mean or constant"
    )
