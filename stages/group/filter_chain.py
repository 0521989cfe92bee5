"""Group filters: which complete groups are worth an optimizer step.

A filter is `(slice) -> FilterDecision | bool`, sync or async. Filters are chained in the order given, the custom one
last; the first rejection names the reason. A filtered group's place is refilled at once by the gate, so nothing waits
for a whole new wave.

`nonzero_std_fallback` is no link of this chain: such groups pass, and the train stage takes them only where the batch
would otherwise have to wait for new prompts (stages/train/buffer.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from configs.schema import Config, FilterConfig
from configs.schema.did_you_mean import nearest
from models.import_path import import_function
from stages.errors import FilterNameError
from stages.group.filter_rules import (
    FilterDecision,
    FilterState,
    GroupFilter,
    duplicate_rule,
    length_rule,
    max_failed_rule,
    nonzero_std,
    pass_rate_rule,
    reward_rule,
    staleness_rule,
)

FALLBACK = "nonzero_std_fallback"
FORMS = {  # what is written after the name
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


def filters_on(config: FilterConfig) -> bool:
    """Whether any group may be dropped."""
    return bool(config.dynamic_sampling_filter) or config.dynamic_sampling_filter_path is not None


def parse_filters(names: Sequence[str], state: FilterState | None = None) -> list[GroupFilter]:
    """The chain of the built-in filters of these names, e.g. `["nonzero_std", "pass_rate:0.1_0.9"]`.

    Raises FilterNameError with the filter, what is wrong with it and how to write it.
    """
    state = state or FilterState()
    chain = [_parse(text, state) for text in names]
    return [one for one in chain if one is not None]


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
            return None  # the trainer's to judge
        case "duplicate_prompt":
            return duplicate_rule(state)
        case "pass_rate":
            return pass_rate_rule(*_range(text, name, argument, 0.0, 1.0))
        case "reward":
            return reward_rule(*_range(text, name, argument, -math.inf, math.inf))
        case "length":
            return length_rule(*_range(text, name, argument, 0.0, math.inf))
        case "max_failed":
            return max_failed_rule(_number(text, name, argument, 0.0, 1.0))
        case _:
            bound = _number(text, name, argument, 0.0, math.inf)
            if bound != int(bound):
                raise _unreadable(text, name, f"{bound:g} is no whole number of versions")
            return staleness_rule(int(bound), state)


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
    return FilterNameError(
        f"--dynamic-sampling-filter {text!r}: {why}; write {name}:{form}, for example {name}:{example}"
    )


def resolve_filter(
    config: FilterConfig, state: FilterState | None = None, whole: Config | None = None
) -> list[GroupFilter]:
    """The configured chain, built-in filters first. Raises FilterNameError and ImportPathError.

    `whole`: the settings that a filter with slime's signature is given as `args`.
    """
    chain = parse_filters(config.dynamic_sampling_filter, state)
    if config.dynamic_sampling_filter_path:
        chain.append(import_filter(config.dynamic_sampling_filter_path, whole))
    return chain


def import_filter(path: str, config: Config | None = None) -> GroupFilter:
    """The filter of an import path, plain or async, or with slime's signature `(args, samples)`. Raises
    ImportPathError, also for a wrong signature."""
    from stages.slime.hooks import group_filter, slime_function

    if slime_function(path):
        judge = group_filter(path, config)
        return lambda slice_: FilterDecision(*judge(slice_))
    return import_function(path, "group")
