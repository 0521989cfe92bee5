"""Which graders a row gets, and its reward from their grades. No I/O, no clock.

A row gets one grader, or the weighted components of `--reward-component name=GRADER@WEIGHT`. Order: `custom_rm_path` of
the row's metadata, `--custom-rm-path`, `rm_type` of the row's metadata, `--rm-type`. With `--reward-component` the
components take the place of all four, and a component whose grader is `auto` follows this order for the rows that name
a grader themselves. The reward is the weighted sum of the components, after `--reward-key`, with overlong shaping
(DAPO, arXiv 2503.14476) and masking of truncated samples.

Invariants: a component that failed fails the whole grade, since a sum with a hole is no reward; parts carry the names
of the components, and the parts of a component's own grade come as `name/part`; a sample is shaped once, however
often it comes; the grader's own score stays in `Sample.raw_reward` wherever shaping changed it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema.data import RewardConfig
from stages.graders.grade import Grade, UnknownGraderError, failed
from stages.graders.registry import normal_import_path
from stages.messages import Sample

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_FORM = "write name=GRADER@WEIGHT, for example acc=math@0.8"
SINGLE: Final = "reward"  # name of the only component without --reward-component
_MATH: Final = ("math", "boxed_math")
_OF_DEADLINE = 0.8


class Component(Struct, frozen=True):
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

    def __post_init__(self) -> None:
        if self.custom_rm_path:
            msgspec.structs.force_setattr(self, "custom_rm_path", normal_import_path(self.custom_rm_path))


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


PART = "overlong_penalty"


class Overlong(Struct, frozen=True):
    """A penalty that grows linearly over the last `buffer` tokens before `limit`."""

    limit: int  # L_max, tokens of the response
    buffer: float  # B, tokens; 0 = no penalty
    factor: float  # p, the penalty at the limit

    def penalty(self, length: int) -> float:
        """min(0, -(L - (L_max - B)) / B * p), and no less than -p: beyond the limit it grows no more.

        `length` is L, the trainable tokens of the response.
        """
        if self.buffer == 0:
            return 0.0
        beyond = length - (self.limit - self.buffer)
        return -self.factor * min(1.0, max(0.0, beyond / self.buffer))


def shaped(sample: Sample, overlong: Overlong, length: int, *, mask_truncated: bool) -> Sample:
    """A graded sample with its penalty, and taken out of training if it is truncated and `mask_truncated` is set.

    A sample without a reward gets no penalty. While shaping is on, every sample has the part `overlong_penalty`, so
    that its mean is over all of them.
    """
    if mask_truncated and sample.status == "truncated":
        sample = msgspec.structs.replace(sample, remove_sample=True)
    if sample.reward is None or overlong.buffer == 0 or PART in sample.reward_parts:
        return sample
    penalty = overlong.penalty(length)
    parts = {**sample.reward_parts, PART: penalty}
    if penalty == 0.0:
        return msgspec.structs.replace(sample, reward_parts=parts)
    return msgspec.structs.replace(sample, reward=sample.reward + penalty, raw_reward=sample.reward, reward_parts=parts)


def combined(components: Sequence[Component], grades: Sequence[Grade]) -> Grade:
    """The weighted sum of the components' scores, of which there is one grade for each.

    `is_correct` and `extracted` come from the first component that reports `is_correct`.
    """
    score, parts = 0.0, {}
    correct: bool | None = None
    extracted: str | None = None
    timed_out = False
    for component, grade in zip(components, grades, strict=True):
        if grade.error is not None:
            reason = f"component {component.name!r}: {grade.error}"
            return failed(reason, "timeout" if grade.status == "timeout" else "error")
        timed_out |= grade.status == "timeout"
        score += component.weight * grade.score
        parts[component.name] = grade.score
        parts.update({f"{component.name}/{part}": value for part, value in grade.parts.items()})
        if correct is None and grade.is_correct is not None:
            correct, extracted = grade.is_correct, grade.extracted
    if not math.isfinite(score):
        return failed(f"the weighted sum of the components is {score}; lower the weights")
    return Grade(score, correct, parts, extracted, status="timeout" if timed_out else "ok")


def picked(grade: Grade, key: str | None, grader: str) -> Grade:
    """The grade with the part `key` (--reward-key) as its score; unchanged for None and `score`."""
    if key is None or key == "score" or grade.error is not None:
        return grade
    if key not in grade.parts:
        keys = ", ".join(["score", *grade.parts])
        return failed(f"--reward-key is {key!r}, but {grader} returned only: {keys}; set it to one of these")
    score = grade.parts[key]
    parts = {"score": grade.score, **grade.parts}
    return Grade(score, grade.is_correct, parts, grade.extracted, status=grade.status)
