"""Which grader a row gets.

Order: `custom_rm_path` of the row's metadata, `--custom-rm-path`, `rm_type` of the row's metadata, `--rm-type`. With
`--reward-component` the components take the place of all four, and one whose grader is `auto` follows this order for
the rows that name a grader themselves.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from configs.schema.reward import RewardConfig
from stages.graders.components import Component, parse_components
from stages.graders.entry import Grader
from stages.graders.grade import Grade, GradeRequest, failed

SINGLE: Final = "reward"  # what the only component is called where --reward-component is not used
_MATH: Final = ("math", "boxed_math")
_OF_DEADLINE = 0.8


class Row(Struct, frozen=True):
    """What a row's metadata says about its grader."""

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
        """The name with what other flags say about it: the dialect of `math`, and the time of `code`, which must end
        before the grader process that waits for it is killed."""
        if grader in _MATH:
            return f"{grader}:{self.reward.math_equivalence}"
        return f"{grader}:{_OF_DEADLINE * self.reward.reward_deadline_s:g}" if grader == "code" else grader


def stage_grader(argument: str | None) -> Grader:
    """What stands in the table for `remote` and `judge`: a grader process cannot ask them. Raises ValueError."""
    if argument is not None and not argument.strip():
        raise ValueError("the text after the colon is empty")

    def refuse(request: GradeRequest) -> Grade:
        return failed(f"{request.grader!r} is asked by the reward stage, not by a grader process")

    return Grader(refuse, in_stage=False)


def outside(grader: str) -> tuple[str, str | None] | None:
    """(`remote` or `judge`, its argument) of a grader that the stage asks itself; None if grader processes have it."""
    base, separator, argument = grader.partition(":")
    return (base, argument if separator else None) if base in ("remote", "judge") else None
