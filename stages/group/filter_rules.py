"""The built-in group filters: each says of one complete group whether it is worth an optimizer step.

Invariants: the unit is the rollout, never the sequence; rewards are those of the grader and of the turns, before any
shaping, because a length penalty gives an all-wrong group a spread that teaches nothing; a rule changes nothing, and
what it knows beyond the group is in `FilterState`, which the group stage keeps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct

from stages.errors import FilterError
from stages.messages import PromptGroup, RolloutSlice
from stages.rollouts import closing, oldest_version, pass_rate, raw_returns, rollouts, trained_masks

ZERO_STD = 1e-6  # rewards closer than this are equal: sums of floats are noisy


class FilterDecision(Struct, frozen=True):
    keep: bool
    reason: str | None = None


GroupFilter = Callable[[RolloutSlice], "FilterDecision | bool | Awaitable[FilterDecision | bool]"]
KEEP = FilterDecision(True)


@dataclass
class FilterState:
    """What the filters know beyond the group before them."""

    version: int = 0  # newest published weights
    remembers: bool = False  # a rule asks for `passed`
    passed: dict[int, dict[str, int]] = field(default_factory=dict)  # epoch -> prompt -> group passed on to training

    def passes(self, group: PromptGroup) -> None:
        """Remember that the group goes on to training. Epochs before the last one are forgotten."""
        if not self.remembers:
            return
        self.passed.setdefault(group.epoch, {})[group.prompt] = group.group_id
        for epoch in [e for e in self.passed if e < group.epoch - 1]:
            del self.passed[epoch]


def zero_std(slice_: RolloutSlice) -> str | None:
    """`zero_std_<mean>` if the raw rewards are all equal (population std <= 1e-6), or there are fewer than two."""
    rewards = raw_returns(slice_.samples)
    if len(rewards) >= 2 and float(rewards.std()) > ZERO_STD:
        return None
    return f"zero_std_{float(rewards.mean()) if len(rewards) else 0.0:.1f}"


def nonzero_std(slice_: RolloutSlice) -> FilterDecision:
    """Drop groups without a group-relative signal (DAPO, arXiv:2503.14476)."""
    reason = zero_std(slice_)
    return KEEP if reason is None else FilterDecision(False, reason)


def pass_rate_rule(low: float, high: float) -> GroupFilter:
    """Keep groups of which this share is correct, bounds included. Raises FilterError where no grader says it."""

    def rule(slice_: RolloutSlice) -> FilterDecision:
        rate = pass_rate(slice_.samples)
        if rate is None:
            raise FilterError(
                "pass_rate needs a grader that says which responses are correct, and this group's does not; "
                "return is_correct beside the score, or filter by reward:LOW_HIGH"
            )
        return _within(rate, low, high, "pass_rate_low", "pass_rate_high")

    return rule


def reward_rule(low: float, high: float) -> GroupFilter:
    """Keep groups whose mean raw reward lies within the bounds."""
    return lambda slice_: _within(float(raw_returns(slice_.samples).mean()), low, high, "reward_low", "reward_high")


def length_rule(shortest: float, longest: float) -> GroupFilter:
    """Keep groups whose rollouts have this many trainable tokens on average, all their sequences together."""

    def rule(slice_: RolloutSlice) -> FilterDecision:
        tokens = [sum(map(np.count_nonzero, trained_masks(parts))) for parts in rollouts(slice_.samples)]
        return _within(sum(tokens) / max(len(tokens), 1), shortest, longest, "too_short", "too_long")

    return rule


def _within(value: float, low: float, high: float, below: str, above: str) -> FilterDecision:
    if value < low:
        return FilterDecision(False, below)
    return FilterDecision(False, above) if value > high else KEEP


def staleness_rule(bound: int, state: FilterState) -> GroupFilter:
    """Drop groups whose oldest trained token is more than `bound` versions behind the newest published weights."""

    def rule(slice_: RolloutSlice) -> FilterDecision:
        oldest = oldest_version(slice_.samples)
        return FilterDecision(False, "too_stale") if oldest is not None and state.version - oldest > bound else KEEP

    return rule


def max_failed_rule(share: float) -> GroupFilter:
    """Drop groups of which more than this share of the rollouts failed. The filter sees the members that are left."""

    def rule(slice_: RolloutSlice) -> FilterDecision:
        wanted = slice_.group.n_samples
        lost = wanted - len(closing(slice_.samples))
        return FilterDecision(False, "failed_members") if lost > share * wanted else KEEP

    return rule


def duplicate_rule(state: FilterState) -> GroupFilter:
    """Drop a group whose prompt text another group of the same epoch has taken to training.

    A prompt that is asked once more, since its group became too old, is no duplicate.
    """
    state.remembers = True

    def rule(slice_: RolloutSlice) -> FilterDecision:
        group = slice_.group
        first = state.passed.get(group.epoch, {}).get(group.prompt, group.group_id)
        again = first != group.group_id and group.requeued == 0
        return FilterDecision(False, "duplicate_prompt") if again else KEEP

    return rule
