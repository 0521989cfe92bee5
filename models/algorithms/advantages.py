"""Rewards of one group become advantages of its rollouts: every estimator, as far as it looks at rewards alone.

    grpo, gspo, cispo              (R - mean) / (std + 1e-6), or R - mean without the standard deviation
    dr_grpo                        R - mean
    rloo                           R - mean of the others
    reinforce_plus_plus_baseline   R - mean; whitened over the batch afterwards
    reinforce_plus_plus, ppo       R; spread over tokens afterwards (`token_advantages.py`)
    on_policy_distillation         0; the divergence from the teacher is all there is

Invariants:
- no torch here: stages call this module;
- the unit is the rollout. A rollout that fanned out into several sequences enters the baseline once, and its advantage
  is copied to each of its sequences;
- one call sees exactly one group, so that groups of any sizes never mix;
- a group whose rewards are all equal gives exact zeros under a group-relative estimator.

Sources: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, RLOO arXiv:2402.14740, REINFORCE++ arXiv:2501.03262, GSPO
arXiv:2507.18071, CISPO arXiv:2506.13585.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from configs.schema.algorithm import GROUP_RELATIVE
from models.algorithms.errors import InconsistentGroup, InsufficientMembers
from models.algorithms.select import pick

FloatArray = npt.NDArray[np.float64]

STD_EPSILON: Final = 1e-6


class Estimator(Protocol):
    """Advantages [n] of the n rollouts of one group from their rewards [n]."""

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
    lengths differ, a reward is not finite or one rollout carries two rewards, `UnknownAlgorithm` for a wrong name.
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
    chosen = pick("advantages", estimator, ESTIMATORS)
    if not normalize and estimator in GROUP_RELATIVE:
        chosen = unchanged
    result = np.asarray(chosen(per_rollout, normalize_std=normalize_std), dtype=np.float64)
    if result.shape != per_rollout.shape:
        raise InconsistentGroup(
            f"estimator {estimator!r} returned shape {list(result.shape)} for {per_rollout.size} rollouts: return one "
            "advantage for each"
        )
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


ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": grpo,
    "gspo": grpo,
    "cispo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus_baseline": dr_grpo,
    "reinforce_plus_plus": unchanged,
    "ppo": unchanged,
    "on_policy_distillation": nothing,
}
