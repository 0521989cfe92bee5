"""Rewards of one group become advantages: the group-relative estimators.

Invariants:
- no torch here: stages call this module;
- the unit is the rollout. A rollout that fanned out into several sequences enters the baseline once, and its advantage
  is copied to each of its sequences;
- one call sees exactly one group, so that groups of any sizes never mix;
- a group whose rewards are all equal gives exact zeros.

Sources: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, RLOO arXiv:2402.14740.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from models.algorithms.errors import InconsistentGroup, InsufficientMembers
from models.algorithms.select import pick

FloatArray = npt.NDArray[np.float64]

STD_EPSILON: Final = 1e-6
MEMBER_STATUSES: Final = frozenset({"completed", "truncated"})


class Estimator(Protocol):
    """Advantages [n] of the n rollouts of one group from their rewards [n]."""

    def __call__(self, rewards: FloatArray, *, normalize_std: bool) -> FloatArray: ...


def is_member(status: str) -> bool:
    """Whether a rollout of this status counts in its group and is trained: completed and truncated ones do."""
    return status in MEMBER_STATUSES


def advantages(
    estimator: str,
    rewards: Sequence[float],
    rollout_ids: Sequence[int],
    *,
    normalize_std: bool = True,
) -> FloatArray:
    """Advantages [S] of the S sequences of one group.

    `rewards` [S] and `rollout_ids` [S] describe the counting members only (see `is_member`); sequences of one rollout
    share its id and its reward. `normalize_std=False` leaves out GRPO's division by the standard deviation.

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
    result = pick("advantages", estimator, ESTIMATORS)(per_rollout, normalize_std=normalize_std)
    return np.asarray(result, dtype=np.float64)[inverse]


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


ESTIMATORS: Final[Mapping[str, Estimator]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
GROUP_RELATIVE: Final = frozenset(ESTIMATORS)
