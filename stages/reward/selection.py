"""Which graders a row gets: one, or the weighted components of `--reward-component name=GRADER@WEIGHT`.

Order: `custom_rm_path` of the row's metadata, `--custom-rm-path`, `rm_type` of the row's metadata, `--rm-type`. With
`--reward-component` the components take the place of all four, and a component whose grader is `auto` follows this
order for the rows that name a grader themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from configs.schema.data import RewardConfig
from stages.graders.grade import UnknownGraderError

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_FORM = "write name=GRADER@WEIGHT, for example acc=math@0.8"
SINGLE: Final = "reward"  # name of the only component without --reward-component
_MATH: Final = ("math", "boxed_math")
_OF_DEADLINE = 0.8


@dataclass(frozen=True)
class Component:
    """One addend of a reward."""

    name: str
    grader: str
    weight: float


def parse_components(texts: Sequence[str]) -> tuple[Component, ...]:
    """Read the flag's values. The grader is what stands between the first `=` and the last `@`.

    Raises UnknownGraderError with the value that cannot be used.
    """
    components: dict[str, Component] = {}
    for text in texts:
        name, separator, rest = text.partition("=")
        grader, sign, number = rest.rpartition("@")
        if not separator or not sign or not grader:
            raise UnknownGraderError(f"--reward-component is {text!r}, but has no grader and weight; {_FORM}")
        if not _NAME.fullmatch(name):
            raise UnknownGraderError(f"--reward-component is {text!r}, but {name!r} is no name of a metric; {_FORM}")
        if name in components:
            raise UnknownGraderError(f"--reward-component names {name!r} twice; give each component its own name")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise UnknownGraderError(f"--reward-component is {text!r}, but {number!r} is no finite weight; {_FORM}")
        components[name] = Component(name, grader, weight)
    return tuple(components.values())


class Row(Struct, frozen=True):
    """The grader that a row's metadata names."""

    rm_type: str | None = None
    custom_rm_path: str | None = None


class Selection:
    """The graders of a run. Raises UnknownGraderError for a component that cannot be read."""

    def __init__(self, reward: RewardConfig) -> None:
        self.reward = reward
        self.components = parse_components(reward.reward_component)

    def graders(self, row: Row) -> tuple[Component, ...]:
        """The graders of a row: the components, or one of weight 1."""
        if not self.components:
            return (Component(SINGLE, self._full(self._single(row)), 1.0),)
        own = row.custom_rm_path or row.rm_type
        return tuple(
            Component(part.name, self._full(own if part.grader == "auto" and own else part.grader), part.weight)
            for part in self.components
        )

    def group_grader(self, row: Row) -> str:
        """The function that grades a whole group (--group-rm)."""
        return row.custom_rm_path or self.reward.custom_rm_path or ""

    def configured(self) -> tuple[str, ...]:
        """All graders that the flags name, for a check before anything is generated."""
        if self.components:
            return tuple(dict.fromkeys(self._full(part.grader) for part in self.components))
        return (self._full(self._single(Row())),)

    def _single(self, row: Row) -> str:
        return row.custom_rm_path or self.reward.custom_rm_path or row.rm_type or self.reward.rm_type

    def _full(self, grader: str) -> str:
        """The name with its argument from other flags: the dialect of `math`, and the time of `code`, which ends before
        the deadline of the grader process."""
        if grader in _MATH:
            return f"{grader}:{self.reward.math_equivalence}"
        return f"{grader}:{_OF_DEADLINE * self.reward.reward_deadline_s:g}" if grader == "code" else grader
