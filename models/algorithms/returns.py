"""Rewards and returns of the trainable tokens of a sequence, and whitening over a batch.

Invariants:
- no torch here, fp64 throughout, arguments are never changed;
- masked tokens are transparent: neither gamma nor lambda is applied to them, and their value is exactly 0;
- the terminal reward stands at the last trainable token, not at the last position; a turn's at its own last one;
- whitening sees all trainable tokens of the batch, in two passes: every process has all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

WHITEN_EPSILON: Final = 1e-8


def token_rewards(
    reward: float, mask: Mask, kl: FloatArray | None = None, *, kl_coef: float = 0.0, turns: FloatArray | None = None
) -> FloatArray:
    """r_t = -kl_coef kl_t, plus `reward` at the last trainable token; [T], zeros if no token is trainable.

    `turns` [T]: more rewards. One at a token that is not trained counts for the last trainable one before it; before
    the first trainable token nothing could have earned it.
    """
    rewards = minus(np.zeros(len(mask)), kl_coef, kl if kl is None else masked(kl, mask))
    trainable = np.flatnonzero(mask)
    if turns is not None and trainable.size:
        given = np.flatnonzero(turns)
        place = np.searchsorted(trainable, given, side="right") - 1
        np.add.at(rewards, trainable[place[place >= 0]], turns[given[place >= 0]])
    if trainable.size:
        rewards[trainable[-1]] += reward
    return rewards


def gae(
    rewards: FloatArray, values: FloatArray, mask: Mask, *, gamma: float, lambd: float, bootstrap: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Generalised advantages and returns [T] over the trainable tokens alone (arXiv:1506.02438).

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lambda A_next, where "next" is the next trainable
    token; behind the last one stand the value `bootstrap` and advantage 0. Returns are A + V.
    """
    own, value = rewards[mask], values[mask]
    following = np.append(value[1:], bootstrap)[: len(value)]
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    advantages[mask] = discounted_sums(own + gamma * following - value, gamma * lambd)
    returns[mask] = advantages[mask] + value
    return advantages, returns


def reward_to_go(rewards: FloatArray, mask: Mask, *, gamma: float) -> FloatArray:
    """G_t = r_t + gamma G_next over the trainable tokens, [T] (arXiv:2501.03262)."""
    out = np.zeros(len(mask))
    out[mask] = discounted_sums(rewards[mask], gamma)
    return out


def discounted_sums(terms: FloatArray, factor: float) -> FloatArray:
    """y_t = x_t + factor y_{t+1}, [T]; in log2(T) vector operations, since responses have many thousands of tokens."""
    out = np.array(terms, dtype=np.float64)
    shift = 1
    while shift < len(out) and factor**shift > 0.0:
        out[:-shift] += factor**shift * out[shift:]
        shift *= 2
    return out


def log_difference(left: FloatArray, right: FloatArray, mask: Mask) -> FloatArray:
    """left - right where the mask is set, else exactly 0, whatever stands there."""
    return masked(left, mask) - masked(right, mask)


def whiten(parts: Sequence[FloatArray], masks: Sequence[Mask]) -> list[FloatArray]:
    """(A - mean) / sqrt(var + 1e-8) over all trainable tokens, var with N - 1; 0 where masked.

    With fewer than two trainable tokens nothing is changed.
    """
    kept = [part[mask] for part, mask in zip(parts, masks, strict=True)]
    mean, variance, count = moments(kept)
    if count < 2:
        return [masked(part, mask) for part, mask in zip(parts, masks, strict=True)]
    scale = 1.0 / math.sqrt(variance + WHITEN_EPSILON)
    return [masked((part - mean) * scale, mask) for part, mask in zip(parts, masks, strict=True)]


def moments(parts: Sequence[FloatArray]) -> tuple[float, float, int]:
    """Mean, variance (N - 1) and N of all numbers, in two passes: E[x^2] - mean^2 would cancel."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values give nan, which the optimizer refuses
        count = sum(part.size for part in parts)
        mean = sum(float(part.sum()) for part in parts) / max(count, 1)
        squares = sum(float(np.square(part - mean).sum()) for part in parts)
    return mean, squares / max(count - 1, 1), count


def masked(values: FloatArray, mask: Mask) -> FloatArray:
    return np.where(mask, values, 0.0)


def minus(values: FloatArray, weight: float, term: FloatArray | None) -> FloatArray:
    return values.copy() if term is None else values - weight * term
