"""Group filters: which complete groups are worth an optimizer step.

A filter is `(slice) -> FilterDecision | bool`, sync or async. Filters are chained; the first rejection names the
reason. A filtered group's place is refilled at once by the gate, so nothing waits for a whole new wave.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from msgspec import Struct

from configs.schema import FilterConfig
from stages.messages import RolloutSlice


class FilterDecision(Struct, frozen=True):
    keep: bool
    reason: str | None = None


GroupFilter = Callable[[RolloutSlice], "FilterDecision | Awaitable[FilterDecision]"]


class FilterPathError(Exception):
    """A filter's import path does not lead to a function."""


def nonzero_std(slice_: RolloutSlice) -> FilterDecision:
    """Drop groups whose rewards are all equal (population std <= 1e-6): no group-relative signal (DAPO, 2503.14476)."""
    rewards = np.array([s.reward if s.reward is not None else 0.0 for s in slice_.samples], dtype=np.float64)
    if len(rewards) < 2 or float(rewards.std()) <= 1e-6:
        return FilterDecision(False, f"zero_std_{rewards.mean() if len(rewards) else 0.0:g}")
    return FilterDecision(True)


def import_path(path: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise FilterPathError(f"import path {path!r} must have the form package.module:name")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FilterPathError(
            f"import path {path!r} cannot be loaded ({error}); check that it is importable from where you start"
        ) from error


def resolve_filter(config: FilterConfig) -> list[GroupFilter]:
    """The configured chain, built-in filter first."""
    chain: list[GroupFilter] = []
    if "nonzero_std" in config.dynamic_sampling_filter:
        chain.append(nonzero_std)
    if config.dynamic_sampling_filter_path:
        custom = import_path(config.dynamic_sampling_filter_path)

        def adapted(slice_: RolloutSlice) -> FilterDecision | Awaitable[FilterDecision]:
            answer: FilterDecision | bool | Awaitable[FilterDecision] = custom(slice_)
            return FilterDecision(answer, None if answer else "custom") if isinstance(answer, bool) else answer

        chain.append(adapted)
    return chain
