"""Advantages of single tokens, decided once for a whole rollout batch before its first optimizer step.

    ppo                           r_t = -kl_coef kl_t + terminal reward, then GAE against the critic
    reinforce_plus_plus           r_t as above, A_t = sum of the discounted rewards from t on
    reinforce_plus_plus_baseline  A_t = (R - group mean) - kl_coef kl_t
    on_policy_distillation        A_t = 0
    all others                    A_t as given (the group's advantage, broadcast)

then, in this order: the distillation term -opd_kl_coef (log student - log teacher), and whitening over the batch.

Invariants:
- no torch here, fp64 throughout, arguments are never changed;
- masked tokens are transparent: neither gamma nor lambda is applied to them, and their advantage is exactly 0;
- the terminal reward stands at the last trainable token, not at the last position; a turn's at its own last one;
- kl_t is the plain log-ratio to the reference (k1): as a reward, its expected gradient is that of the divergence, which
  the other estimators' is not;
- whitening sees all trainable tokens of the batch, in two passes: every process has all of them.

Sources: PPO arXiv:1707.06347, GAE arXiv:1506.02438, REINFORCE++ arXiv:2501.03262.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from configs.schema.algorithm import KL_IN_REWARD, AlgorithmConfig
from models.algorithms.errors import AlgorithmError

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

WHITEN_EPSILON = 1e-8


@dataclass(frozen=True)
class Episode:
    """What one sequence gives to its advantages. T response tokens; masked ones may be left out beforehand."""

    mask: Mask  # [T], True = trainable
    advantages: FloatArray  # [T] from the estimator of the group
    reward: float = 0.0  # at the end
    turn_rewards: FloatArray | None = None  # [T] at the tokens that they are for
    student: FloatArray | None = None  # [T] log-probs of the policy at the batch's start (or of the sampler)
    reference: FloatArray | None = None  # [T] log-probs
    teacher: FloatArray | None = None  # [T] log-probs
    values: FloatArray | None = None  # [T] the critic's, of the state before each token
    bootstrap: float = 0.0  # value of the state after the last token; 0 = the episode ended


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of one sequence. Masked tokens have exactly 0 in each array."""

    advantages: FloatArray  # [T]
    returns: FloatArray | None = None  # [T] what the critic learns (ppo)
    reward_kl: FloatArray | None = None  # [T] kl_t, where it is part of the reward
    reverse_kl: FloatArray | None = None  # [T] log student - log teacher, where there is a teacher


def batch_advantages(
    config: AlgorithmConfig,
    episodes: Sequence[Episode],
    found: Sequence[TokenAdvantages] | None = None,
    *,
    opd_kl_coef: float | None = None,
) -> list[TokenAdvantages]:
    """Advantages of all sequences of a rollout batch, in which each token stands in one episode only.

    `found`: what the estimator says of each, where that is no matter of the episode alone. `opd_kl_coef`: weight of the
    distillation term, None = off. With `config.normalize_advantages` unset, nothing is whitened. Raises
    `AlgorithmError` if a sequence lacks log-probs or values that the estimator needs.
    """
    if found is None:
        found = [estimated(config, episode) for episode in episodes]
    found = [_distilled(one, episode, opd_kl_coef) for one, episode in zip(found, episodes, strict=True)]
    if not config.normalize_advantages:
        return found
    white = whiten([one.advantages for one in found], [episode.mask for episode in episodes])
    return [
        TokenAdvantages(values, one.returns, one.reward_kl, one.reverse_kl)
        for values, one in zip(white, found, strict=True)
    ]


def estimated(config: AlgorithmConfig, episode: Episode) -> TokenAdvantages:
    """By the estimator alone, before distillation and whitening. Raises `AlgorithmError`."""
    mask, estimator = episode.mask, config.advantage_estimator
    kl: FloatArray | None = None
    if estimator in KL_IN_REWARD and config.kl_coef > 0:
        kl = log_difference(
            _needed(episode.student, "kl_coef", "log-probs of the policy"),
            _needed(episode.reference, "kl_coef", "log-probs of the reference"),
            mask,
        )
    if estimator == "on_policy_distillation":
        return TokenAdvantages(np.zeros(len(mask)))
    if estimator == "reinforce_plus_plus_baseline":
        return TokenAdvantages(_minus(_masked(episode.advantages, mask), config.kl_coef, kl), reward_kl=kl)
    if estimator == "reinforce_plus_plus":
        rewards = token_rewards(episode.reward, mask, kl, kl_coef=config.kl_coef, turns=episode.turn_rewards)
        return TokenAdvantages(reward_to_go(rewards, mask, gamma=config.gamma), reward_kl=kl)
    if estimator == "ppo":
        rewards = token_rewards(episode.reward, mask, kl, kl_coef=config.kl_coef, turns=episode.turn_rewards)
        values = _needed(episode.values, "advantage_estimator=ppo", "values of the critic")
        advantages, returns = gae(
            rewards, values, mask, gamma=config.gamma, lambd=config.lambd, bootstrap=episode.bootstrap
        )
        return TokenAdvantages(advantages, returns, reward_kl=kl)
    return TokenAdvantages(_masked(episode.advantages, mask))


def _distilled(one: TokenAdvantages, episode: Episode, opd_kl_coef: float | None) -> TokenAdvantages:
    if opd_kl_coef is None:
        return one
    reverse_kl = log_difference(
        _needed(episode.student, "opd_kl_coef", "log-probs of the policy"),
        _needed(episode.teacher, "opd_kl_coef", "log-probs of the teacher"),
        episode.mask,
    )
    return TokenAdvantages(_minus(one.advantages, opd_kl_coef, reverse_kl), one.returns, one.reward_kl, reverse_kl)


def token_rewards(
    reward: float,
    mask: Mask,
    kl: FloatArray | None = None,
    *,
    kl_coef: float = 0.0,
    turns: FloatArray | None = None,
) -> FloatArray:
    """r_t = -kl_coef kl_t, plus `reward` at the last trainable token; [T], zeros if no token is trainable.

    `turns` [T]: more rewards. One at a token that is not trained counts for the last trainable one before it; before
    the first trainable token nothing could have earned it.
    """
    rewards = _minus(np.zeros(len(mask)), kl_coef, kl if kl is None else _masked(kl, mask))
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
    return _masked(left, mask) - _masked(right, mask)


def whiten(parts: Sequence[FloatArray], masks: Sequence[Mask]) -> list[FloatArray]:
    """(A - mean) / sqrt(var + 1e-8) over all trainable tokens, var with N - 1; 0 where masked.

    With fewer than two trainable tokens nothing is changed.
    """
    kept = [part[mask] for part, mask in zip(parts, masks, strict=True)]
    mean, variance, count = moments(kept)
    if count < 2:
        return [_masked(part, mask) for part, mask in zip(parts, masks, strict=True)]
    scale = 1.0 / math.sqrt(variance + WHITEN_EPSILON)
    return [_masked((part - mean) * scale, mask) for part, mask in zip(parts, masks, strict=True)]


def moments(parts: Sequence[FloatArray]) -> tuple[float, float, int]:
    """Mean, variance (N - 1) and N of all numbers, in two passes: E[x^2] - mean^2 would cancel."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values give nan, which the optimizer refuses
        count = sum(part.size for part in parts)
        mean = sum(float(part.sum()) for part in parts) / max(count, 1)
        squares = sum(float(np.square(part - mean).sum()) for part in parts)
    return mean, squares / max(count - 1, 1), count


def _masked(values: FloatArray, mask: Mask) -> FloatArray:
    return np.where(mask, values, 0.0)


def _minus(values: FloatArray, weight: float, term: FloatArray | None) -> FloatArray:
    return values.copy() if term is None else values - weight * term


def _needed(array: FloatArray | None, key: str, what: str) -> FloatArray:
    if array is None:
        raise AlgorithmError(
            f"{key} needs {what} for every sequence, and one has none; hand them over, or leave it out"
        )
    return array
