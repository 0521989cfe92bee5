"""Advantages: every estimator, with its part over the rewards of a group and its part over the tokens of a batch.

    estimator                      value of a rollout, in its group               A_t of its tokens, over the batch
    grpo, gspo, cispo              (R - mean) / (std + 1e-6), or R - mean         the value
    dr_grpo                        R - mean                                       the value
    rloo                           R - mean of the others                         the value
    reinforce_plus_plus_baseline   R - mean                                       the value - kl_coef kl_t
    reinforce_plus_plus            R                                              sum of the discounted r_t from t on
    ppo                            R                                              GAE of r_t against the critic
    maxrl                          (R - mean) / mean                              the value
    gdpo                           as grpo for each component, weighted and added the value
    on_policy_distillation         0                                              0

with r_t = -kl_coef kl_t, and the reward at the last trainable token. Then, in this order: the distillation term
-opd_kl_coef (log student - log teacher), and whitening over the batch.

The train stage computes the value of a rollout when it takes a group: an estimator that fails then ends this group
alone, and another group takes its place in the batch. The trainer decides the tokens' advantages.

Invariants:
- no torch here, fp64 throughout, arguments are never changed;
- the unit is the rollout. A rollout that fanned out into several sequences enters the baseline once, and its value is
  copied to each of its sequences;
- one call of `advantages` sees exactly one group, so that groups of any sizes never mix;
- a group whose rewards are all equal gives exact zeros under a group-relative estimator;
- kl_t is the plain log-ratio to the reference (k1): as a reward, its expected gradient is that of the divergence.

Sources: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, RLOO arXiv:2402.14740, REINFORCE++ arXiv:2501.03262, GSPO
arXiv:2507.18071, CISPO arXiv:2506.13585, PPO arXiv:1707.06347, GAE arXiv:1506.02438, VAPO arXiv:2504.05118, MaxRL
arXiv:2602.02710, GDPO arXiv:2601.05242.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from configs.schema.algorithm import GROUP_RELATIVE, KL_IN_REWARD, AlgorithmConfig
from models.algorithms.returns import (
    FloatArray,
    Mask,
    gae,
    log_difference,
    masked,
    minus,
    reward_to_go,
    token_rewards,
    whiten,
)
from models.errors import AlgorithmError, InconsistentGroup, InsufficientMembers
from models.import_path import pick, raised

STD_EPSILON: Final = 1e-6


class GroupEstimator(Protocol):
    """Values [n] of the n rollouts of one group from their rewards [n]."""

    def __call__(self, rewards: FloatArray, *, normalize_std: bool) -> FloatArray: ...


def advantages(
    estimator: str,
    rewards: Sequence[float],
    rollout_ids: Sequence[int],
    *,
    normalize_std: bool = True,
    normalize: bool = True,
) -> FloatArray:
    """Advantages [S] of the S sequences of one group.

    `rewards` [S] and `rollout_ids` [S] describe the members that completed or were truncated; sequences of one rollout
    share its id and its reward. `normalize_std=False` leaves out GRPO's division by the standard deviation;
    `normalize=False` leaves out the baseline as well and gives the rewards as they are, from any estimator but
    on_policy_distillation and import paths, and for a single rollout, too.

    Raises `InsufficientMembers` for fewer than two rollouts under a group-relative estimator, `InconsistentGroup` if
    lengths differ, a reward is not finite, one rollout carries two rewards or a custom estimator fails, and
    `UnknownAlgorithm` for a wrong name.
    """
    values = np.asarray(rewards, dtype=np.float64)
    ids = np.asarray(rollout_ids, dtype=np.int64)
    if values.ndim != 1 or values.shape != ids.shape:
        raise InconsistentGroup(
            f"{values.size} rewards for {ids.size} rollout ids: give one of each for every sequence of the group"
        )
    if not np.isfinite(values).all():
        raise InconsistentGroup(
            f"reward {values[~np.isfinite(values)][0]} is not finite: a failed grading must mark its sample as failed"
        )
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    per_rollout = values[first]
    if not np.array_equal(per_rollout[inverse], values):
        where = int(np.flatnonzero(per_rollout[inverse] != values)[0])
        raise InconsistentGroup(
            f"rollout {ids[where]} carries rewards {per_rollout[inverse][where]} and {values[where]}: "
            "all sequences of one rollout share one reward"
        )
    chosen = pick("advantages", estimator, {name: both.group for name, both in ESTIMATORS.items()})
    if not normalize and estimator in GROUP_RELATIVE:
        chosen = unchanged
    try:
        result = np.asarray(chosen(per_rollout, normalize_std=normalize_std), dtype=np.float64)
    except Exception as error:
        if ":" not in estimator:
            raise
        raise InconsistentGroup(f"--advantage-estimator {estimator} raised {raised(error)}") from error
    if result.shape != per_rollout.shape:
        raise InconsistentGroup(
            f"estimator {estimator!r} returned shape {list(result.shape)} for {per_rollout.size} rollouts: return one "
            "advantage for each"
        )
    if not np.isfinite(result).all():
        raise InconsistentGroup(f"--advantage-estimator {estimator} gave {result.tolist()!r:.200}, which is not finite")
    return result[inverse]


def centred(rewards: FloatArray) -> FloatArray:
    """R_i - mean(R); exact zeros for equal rewards. Raises `InsufficientMembers` for fewer than two rollouts."""
    if rewards.size < 2:
        raise InsufficientMembers(
            f"a group of {rewards.size} rollouts has nothing to compare with: group-relative estimators need "
            "at least 2 (raise --n-samples-per-prompt, or drop the group)"
        )
    if np.ptp(rewards) == 0.0:
        return np.zeros_like(rewards)
    difference: FloatArray = rewards - rewards.mean()
    return difference


def grpo(rewards: FloatArray, *, normalize_std: bool) -> FloatArray:
    """(R_i - mean) / (std + 1e-6), standard deviation with n - 1 (arXiv:2402.03300)."""
    difference = centred(rewards)
    if not normalize_std:
        return difference
    scaled: FloatArray = difference / (rewards.std(ddof=1) + STD_EPSILON)
    return scaled


def maxrl(rewards: FloatArray, *, normalize_std: bool) -> FloatArray:
    """(R_i - mean) / mean, 0 if all are 0 (arXiv:2602.02710); `normalize_std` has no meaning here.

    With rewards of 0 and 1 its expected gradient is that of the log of the chance of success, up to an order that grows
    with the group. Raises `InconsistentGroup` for a mean below 0.
    """
    del normalize_std
    difference, mean = centred(rewards), float(rewards.mean())
    if difference.any() and mean <= 0:
        raise InconsistentGroup(
            f"--advantage-estimator maxrl divides by the mean reward of a group, here {mean}: give rewards from 0 on"
        )
    return difference / (mean or 1.0)


def dr_grpo(rewards: FloatArray, *, normalize_std: bool) -> FloatArray:
    """R_i - mean (arXiv:2503.20783); `normalize_std` has no meaning here."""
    del normalize_std
    return centred(rewards)


def rloo(rewards: FloatArray, *, normalize_std: bool) -> FloatArray:
    """R_i - mean of the others = n/(n-1) (R_i - mean) (arXiv:2402.14740); `normalize_std` has no meaning here."""
    del normalize_std
    return centred(rewards) * (rewards.size / max(rewards.size - 1, 1))


def unchanged(rewards: FloatArray, *, normalize_std: bool) -> FloatArray:
    """R_i: what the group thinks of it does not count."""
    del normalize_std
    return rewards.copy()


def nothing(rewards: FloatArray, *, normalize_std: bool) -> FloatArray:
    """0: rewards are for show."""
    del normalize_std
    return np.zeros_like(rewards)


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

    `found`: the estimates of each episode, where they do not depend on the episode alone. `opd_kl_coef`: weight of the
    distillation term, None = off. With `config.normalize_advantages` unset, nothing is whitened. Raises
    `AlgorithmError` if a sequence lacks log-probs or values that the estimator needs.
    """
    if found is None:
        found = [estimated(config, episode) for episode in episodes]
    found = [_distilled(one, episode, opd_kl_coef) for one, episode in zip(found, episodes, strict=True)]
    if not config.normalize_advantages:
        return found
    white = whiten([one.advantages for one in found], [episode.mask for episode in episodes])
    return [replace(one, advantages=values) for one, values in zip(found, white, strict=True)]


def estimated(config: AlgorithmConfig, episode: Episode) -> TokenAdvantages:
    """By the estimator alone, before distillation and whitening. Raises `AlgorithmError`."""
    estimator, kl = ESTIMATORS.get(config.advantage_estimator), None
    if config.advantage_estimator in KL_IN_REWARD and config.kl_coef > 0:
        kl = log_difference(
            _needed(episode.student, "kl_coef", "log-probs of the policy"),
            _needed(episode.reference, "kl_coef", "log-probs of the reference"),
            episode.mask,
        )
    return (rollout_value if estimator is None else estimator.tokens)(config, episode, kl)


# Advantages of one sequence from its episode and, if KL is part of the reward, kl_t [T].
TokenEstimator = Callable[[AlgorithmConfig, Episode, FloatArray | None], TokenAdvantages]


def rollout_value(config: AlgorithmConfig, episode: Episode, kl: FloatArray | None) -> TokenAdvantages:
    """The value of the rollout for each of its tokens, less the weighted kl_t."""
    return TokenAdvantages(minus(masked(episode.advantages, episode.mask), config.kl_coef, kl), reward_kl=kl)


def rewards_to_go(config: AlgorithmConfig, episode: Episode, kl: FloatArray | None) -> TokenAdvantages:
    """Sums of the discounted rewards from each token on (REINFORCE++)."""
    rewards = token_rewards(episode.reward, episode.mask, kl, kl_coef=config.kl_coef, turns=episode.turn_rewards)
    return TokenAdvantages(reward_to_go(rewards, episode.mask, gamma=config.gamma), reward_kl=kl)


def ppo(config: AlgorithmConfig, episode: Episode, kl: FloatArray | None) -> TokenAdvantages:
    """Generalised advantages against the critic, and the returns that it learns.

    With `lambd_alpha` the policy's lambda is 1 - 1 / (alpha l) for l trainable tokens, not below 0; the returns have
    `critic_lambd` (arXiv:2504.05118).
    """
    rewards = token_rewards(episode.reward, episode.mask, kl, kl_coef=config.kl_coef, turns=episode.turn_rewards)
    values = _needed(episode.values, "advantage_estimator=ppo", "values of the critic")

    def estimate(lambd: float) -> tuple[FloatArray, FloatArray]:
        return gae(rewards, values, episode.mask, gamma=config.gamma, lambd=lambd, bootstrap=episode.bootstrap)

    lambd, length = config.lambd, max(int(episode.mask.sum()), 1)
    if config.lambd_alpha is not None:
        lambd = max(1.0 - 1.0 / (config.lambd_alpha * length), 0.0)
    advantages, returns = estimate(lambd)
    critic = config.lambd if config.critic_lambd is None else config.critic_lambd
    return TokenAdvantages(advantages, returns if critic == lambd else estimate(critic)[1], reward_kl=kl)


def zeros(config: AlgorithmConfig, episode: Episode, kl: FloatArray | None) -> TokenAdvantages:
    """0: the teacher's log-probs are the only signal."""
    del config, kl
    return TokenAdvantages(np.zeros(len(episode.mask)))


def _distilled(one: TokenAdvantages, episode: Episode, opd_kl_coef: float | None) -> TokenAdvantages:
    if opd_kl_coef is None:
        return one
    reverse_kl = log_difference(
        _needed(episode.student, "opd_kl_coef", "log-probs of the policy"),
        _needed(episode.teacher, "opd_kl_coef", "log-probs of the teacher"),
        episode.mask,
    )
    return replace(one, advantages=minus(one.advantages, opd_kl_coef, reverse_kl), reverse_kl=reverse_kl)


def _needed(array: FloatArray | None, key: str, what: str) -> FloatArray:
    if array is None:
        raise AlgorithmError(f"{key} needs {what} for every sequence, and one has none; hand them over or leave it out")
    return array


@dataclass(frozen=True)
class Estimator:
    """Both parts of an estimator. A custom estimator has a group part only."""

    group: GroupEstimator
    tokens: TokenEstimator = rollout_value


ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": Estimator(grpo),
    "gspo": Estimator(grpo),
    "cispo": Estimator(grpo),
    "dr_grpo": Estimator(dr_grpo),
    "rloo": Estimator(rloo),
    "reinforce_plus_plus_baseline": Estimator(dr_grpo),
    "reinforce_plus_plus": Estimator(unchanged, rewards_to_go),
    "ppo": Estimator(unchanged, ppo),
    "on_policy_distillation": Estimator(nothing, zeros),
    "maxrl": Estimator(maxrl),
    "gdpo": Estimator(grpo),  # of one component
}
# Their advantages of tokens are no copy of a value of the rollout: the trainer decides them over the whole batch.
TOKEN_ESTIMATORS: Final = frozenset(name for name, one in ESTIMATORS.items() if one.tokens is not rollout_value)
