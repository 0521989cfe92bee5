"""Several graders of one sample: `--reward-component name=GRADER@WEIGHT`, their weighted sum, and `--reward-key`.

Invariants: pure; a component that failed fails the whole grade, for a sum with a hole is no reward; parts carry the
names of the components, and the parts that a component's grader returned come as `name/part`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stages.graders.errors import UnknownGraderError
from stages.graders.grade import Grade, failed

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_FORM = "write name=GRADER@WEIGHT, for example acc=math@0.8"


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
    found: dict[str, Component] = {}
    for text in texts:
        name, separator, rest = text.partition("=")
        grader, at, number = rest.rpartition("@")
        if not separator or not at or not grader:
            raise UnknownGraderError(f"--reward-component is {text!r}, but has no grader and weight; {_FORM}")
        if not _NAME.fullmatch(name):
            raise UnknownGraderError(f"--reward-component is {text!r}, but {name!r} is no name of a metric; {_FORM}")
        if name in found:
            raise UnknownGraderError(f"--reward-component names {name!r} twice; give each component its own name")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):
            raise UnknownGraderError(f"--reward-component is {text!r}, but {number!r} is no finite weight; {_FORM}")
        found[name] = Component(name, grader, weight)
    return tuple(found.values())


def combined(components: Sequence[Component], grades: Sequence[Grade]) -> Grade:
    """The weighted sum of the components' scores, of which there is one grade for each.

    `is_correct` and `extracted` are those of the first component that says whether the response is right.
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
        found = ", ".join(["score", *grade.parts])
        return failed(f"--reward-key is {key!r}, but {grader} returned only: {found}; set it to one of these")
    score = grade.parts[key]
    parts = {"score": grade.score, **grade.parts}
    return Grade(score, grade.is_correct, parts, grade.extracted, status=grade.status)
