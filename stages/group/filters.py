"""Group filters: which complete groups are worth an optimizer step.

A filter is `(slice) -> FilterDecision | bool`, sync or async. Filters are chained in the order given, the custom one
last; the first rejection names the reason. A filtered group's place is refilled at once by the gate, so nothing waits
for a whole new wave.

`nonzero_std_fallback` is no link of this chain: such groups pass, and the train stage takes them only where the batch
would otherwise have to wait for new prompts (stages/train/held_groups.py).

Invariants: the unit is the rollout, never the sequence; rewards are those of the grader and of the turns, before any
shaping, because a length penalty gives an all-wrong group a spread that teaches nothing; a rule changes nothing; all
state beyond the group is in `FilterState`, which the group stage keeps.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec import Struct

from configs.schema import Config
from configs.schema.notation import nearest
from models.import_path import import_function
from stages.errors import FilterError, FilterNameError
from stages.messages import PromptGroup, RolloutSlice
from stages.rollouts import closing, oldest_version, pass_rate, raw_returns, rollouts, trained_masks

ZERO_STD = 1e-6  # rewards closer than this are equal: sums of floats are noisy
FALLBACK = "nonzero_std_fallback"
EARLY = ", early"  # ends the reason of a group that was dropped for its first rollouts: the others were cut short
FORMS = {  # of the argument after the colon
    "nonzero_std": "",
    FALLBACK: "",
    "duplicate_prompt": "",
    "pass_rate": "LOW_HIGH",
    "reward": "LOW_HIGH",
    "length": "MIN_MAX",
    "staleness": "N",
    "max_failed": "SHARE",
}
EXAMPLES = {"pass_rate": "0.1_0.9", "reward": "-0.5_0.5", "length": "16_4096", "staleness": "2", "max_failed": "0.25"}


class FilterDecision(Struct, frozen=True):
    keep: bool
    reason: str | None = None


GroupFilter = Callable[[RolloutSlice], "FilterDecision | bool | Awaitable[FilterDecision | bool]"]
KEEP = FilterDecision(True)


@dataclass
class FilterState:
    """State of the filters beyond the current group."""

    version: int = 0  # newest published weights
    remembers: bool = False  # whether a rule needs `passed`
    passed: dict[int, dict[str, int]] = field(default_factory=dict)  # epoch -> prompt -> group passed on to training

    def passes(self, group: PromptGroup) -> None:
        """Remember a group that is passed on to training. Forgets all epochs but the newest two."""
        if not self.remembers:
            return
        self.passed.setdefault(group.epoch, {})[group.prompt] = group.group_id
        for epoch in [e for e in self.passed if e < group.epoch - 1]:
            del self.passed[epoch]


def zero_std(slice_: RolloutSlice) -> str | None:
    """`zero_std_<mean>` if the raw rewards are all equal (population std <= 1e-6), or there are fewer than two."""
    rewards = raw_returns(slice_.samples).tolist()  # a few numbers, for which numpy's own std takes far longer
    n, mean = len(rewards), sum(rewards) / max(len(rewards), 1)
    if n >= 2 and math.dist(rewards, [mean] * n) / math.sqrt(n) > ZERO_STD:
        return None
    return f"zero_std_{mean:.1f}"


def nonzero_std(slice_: RolloutSlice) -> FilterDecision:
    """Drop groups without a group-relative signal (DAPO, arXiv:2503.14476)."""
    reason = zero_std(slice_)
    return KEEP if reason is None else FilterDecision(False, reason)


def pass_rate_rule(low: float, high: float, slice_: RolloutSlice) -> FilterDecision:
    """Keep groups of which this share is correct, bounds included. Raises FilterError where no grader reports it."""
    rate = pass_rate(slice_.samples)
    if rate is None:
        raise FilterError(
            "pass_rate needs a grader that reports is_correct, and this group's grader does not; "
            "return is_correct beside the score, or filter by reward:LOW_HIGH"
        )
    return _within(rate, low, high, "pass_rate_low", "pass_rate_high")


def reward_rule(low: float, high: float, slice_: RolloutSlice) -> FilterDecision:
    """Keep groups whose mean raw reward lies within the bounds."""
    return _within(float(raw_returns(slice_.samples).mean()), low, high, "reward_low", "reward_high")


def length_rule(shortest: float, longest: float, slice_: RolloutSlice) -> FilterDecision:
    """Keep groups whose rollouts have this many trainable tokens on average, all their sequences together."""
    tokens = [sum(map(np.count_nonzero, trained_masks(parts))) for parts in rollouts(slice_.samples)]
    return _within(sum(tokens) / max(len(tokens), 1), shortest, longest, "too_short", "too_long")


def _within(value: float, low: float, high: float, below: str, above: str) -> FilterDecision:
    if value < low:
        return FilterDecision(False, below)
    return FilterDecision(False, above) if value > high else KEEP


def staleness_rule(bound: float, state: FilterState, slice_: RolloutSlice) -> FilterDecision:
    """Drop groups whose oldest trained token is more than `bound` versions behind the newest published weights."""
    oldest = oldest_version(slice_.samples)
    return FilterDecision(False, "too_stale") if oldest is not None and state.version - oldest > bound else KEEP


def max_failed_rule(share: float, slice_: RolloutSlice) -> FilterDecision:
    """Drop groups of which more than this share of the rollouts failed. Failed members are not in the slice."""
    wanted = slice_.group.n_samples
    lost = wanted - len(closing(slice_.samples))
    return FilterDecision(False, "failed_members") if lost > share * wanted else KEEP


def duplicate_rule(state: FilterState, slice_: RolloutSlice) -> FilterDecision:
    """Drop a group whose prompt text another group of the same epoch has taken to training.

    A prompt that is sampled once more, since its group became too old, is no duplicate.
    """
    group = slice_.group
    first = state.passed.get(group.epoch, {}).get(group.prompt, group.group_id)
    again = first != group.group_id and group.requeued == 0
    return FilterDecision(False, "duplicate_prompt") if again else KEEP


def parse_filters(names: Sequence[str], state: FilterState | None = None) -> list[GroupFilter]:
    """The chain of the built-in filters of these names, e.g. `["nonzero_std", "pass_rate:0.1_0.9"]`.

    Raises FilterNameError with the filter, its fault and its form.
    """
    state = state or FilterState()
    return [rule for text in names if (rule := _parse(text, state)) is not None]


def _parse(text: str, state: FilterState) -> GroupFilter | None:
    name, separator, argument = text.partition(":")
    if name not in FORMS:
        near = nearest(name, FORMS)
        cure = f"did you mean {near}?" if near else f"choose one of {', '.join(FORMS)}"
        raise FilterNameError(f"--dynamic-sampling-filter {text!r} is unknown; {cure}")
    if separator and not FORMS[name]:
        raise FilterNameError(f"--dynamic-sampling-filter {text!r}: {name} takes no argument; write {name}")
    match name:
        case "nonzero_std":
            return nonzero_std
        case "nonzero_std_fallback":
            return None  # the train stage applies it
        case "duplicate_prompt":
            state.remembers = True
            return partial(duplicate_rule, state)
        case "pass_rate":
            return partial(pass_rate_rule, *_range(text, name, argument, 0.0, 1.0))
        case "reward":
            return partial(reward_rule, *_range(text, name, argument, -math.inf, math.inf))
        case "length":
            return partial(length_rule, *_range(text, name, argument, 0.0, math.inf))
        case "max_failed":
            return partial(max_failed_rule, _number(text, name, argument, 0.0, 1.0))
        case _:
            bound = _number(text, name, argument, 0.0, math.inf)
            if bound != int(bound):
                raise _unreadable(text, name, f"{bound:g} is no whole number of versions")
            return partial(staleness_rule, bound, state)


def _range(text: str, name: str, argument: str, least: float, most: float) -> tuple[float, float]:
    low_text, separator, high_text = argument.partition("_")
    if not separator:
        raise _unreadable(text, name, f"{argument!r} is no range")
    low, high = (_number(text, name, part, least, most) for part in (low_text, high_text))
    if low > high:
        raise _unreadable(text, name, f"the lower bound {low:g} is above the upper bound {high:g}")
    return low, high


def _number(text: str, name: str, argument: str, least: float, most: float) -> float:
    try:
        value = float(argument)
    except ValueError:
        raise _unreadable(text, name, f"{argument!r} is no number") from None
    if not math.isfinite(value) or not least <= value <= most:
        within = f"between {least:g} and {most:g}" if most < math.inf else f"finite and at least {least:g}"
        raise _unreadable(text, name, f"{value:g} must be {within}")
    return value


def _unreadable(text: str, name: str, why: str) -> FilterNameError:
    form, example = FORMS[name], EXAMPLES[name]
    return FilterNameError(f"--dynamic-sampling-filter {text!r}: {why}; write {name}:{form}, as in {name}:{example}")


def resolve_filter(config: Config, names: Sequence[str], state: FilterState) -> list[GroupFilter]:
    """The filters of these names, then the custom one. Raises FilterNameError and ImportPathError."""
    path = config.filter.dynamic_sampling_filter_path
    return [*parse_filters(names, state), *([import_filter(path, config)] if path else [])]


def import_filter(path: str, config: Config | None = None) -> GroupFilter:
    """The filter of an import path, plain or async, or with slime's signature `(args, samples)`, whose `args` are the
    settings. Raises ImportPathError, also for a wrong signature."""
    from stages.slime.hooks import group_filter, slime_function

    if slime_function(path):
        judge = group_filter(path, config)
        return lambda slice_: FilterDecision(*judge(slice_))
    return import_function(path, "group")
