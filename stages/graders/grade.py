"""What a grader is: its request, its grade, its errors, and its line in the registry; grades counted and kept.

A grader that fails on one sample raises nothing: it returns a Grade with an error. Errors of grading itself:

GradingError
├── UnknownGraderError   no grader has this name, or its argument is wrong
└── PoolError            worker processes cannot be started, or the pool is not open

To add a grader: a function `GradeRequest -> Grade`, and one line in the table `GRADERS` of registry.py: `"name":
Grader(...)` or, with an argument, `"name": Entry(build, form)`, where `build` makes a `Grader` of the text after the
colon.

Invariants: a score is finite; a grade with an error carries the score 0.0, which must not be trained on; the status
`timeout` without an error is a wrong answer, whose text kept the grader busy until its deadline; text in a grade is
valid Unicode (lone surrogates are replaced), so any wire or log can carry it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from models.errors import UserFault

EXTRACTED_CHARS = 1024
_REASON_CHARS = 500


class GradingError(UserFault):
    """Base of everything that `stages.graders` raises on purpose."""


class UnknownGraderError(GradingError):
    """No grader has this name, its argument is wrong, or its function cannot be imported."""


class PoolError(GradingError):
    """Worker processes cannot be started, or the pool is not open."""


class GradeRequest(Struct, frozen=True, array_like=True):
    """One response to grade."""

    grader: str  # "gsm8k", "length:100", "boxed_exact", "package.module:function"
    response: str
    label: str | None = None
    metadata: str = "{}"  # JSON object of the row
    n_tokens: int = 0  # of the response
    seed: int = 0  # f(run seed, sample id), for graders that draw
    reward_key: str | None = None  # which number of a custom grader's dict is the score, where it has no 'score'
    responses: tuple[str, ...] = ()  # of a whole group, for a group grader; `response` is then empty
    prompt: str = ""  # for custom graders


class Grade(Struct, frozen=True, array_like=True):
    """A grader's result. With `error` set there is no result, and the score means nothing."""

    score: float
    is_correct: bool | None = None
    parts: dict[str, float] = {}
    extracted: str | None = None  # the answer that was compared
    error: str | None = None
    status: Literal["ok", "timeout", "error"] = "ok"
    members: tuple[Grade, ...] = ()  # of a group grader: one for each response


def failed(reason: str, status: Literal["timeout", "error"] = "error") -> Grade:
    """A grade without a score, with the reason."""
    return Grade(0.0, error=clean(reason)[:_REASON_CHARS], status=status)


def judged(correct: bool, extracted: str | None) -> Grade:
    """1.0 or 0.0, with the extracted answer."""
    shown = None if extracted is None else clean(extracted[:EXTRACTED_CHARS])
    return Grade(1.0 if correct else 0.0, correct, extracted=shown)


def clean(text: str) -> str:
    """The text with lone surrogates replaced by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def as_grade(value: object, key: str | None = None) -> Grade:
    """Accept a number, a mapping with `score`, or a Grade; anything else is a failed grade with the reason.

    Of a mapping, `is_correct` (boolean) and `extracted` or `pred` (text) are kept as such, every other number becomes a
    part, and other texts are left out. `key` (--reward-key) names the score where the mapping has no `score`.
    """
    if isinstance(value, Grade):
        return _checked(value)
    if isinstance(value, Mapping):
        return _from_mapping(value, key)
    number = _number(value)
    if number is None:
        return failed(f"the grader returned {type(value).__name__}; return a number, a dict with 'score', or a Grade")
    return _checked(Grade(number))


def _from_mapping(value: Mapping[object, object], key: str | None) -> Grade:
    source = "score" if "score" in value or key is None else key
    score = _number(value.get(source))
    if score is None:
        keys = ", ".join(str(name) for name in list(value)[:20]) or "none"
        return failed(f"the grader's dict needs a number under {source!r}; its keys: {keys}")
    correct, extracted = value.get("is_correct"), value.get("extracted", value.get("pred"))
    if correct is not None and not isinstance(correct, bool):
        return failed(f"'is_correct' in the grader's dict is {type(correct).__name__}; it must be a bool or None")
    parts: dict[str, float] = {}
    for name, item in value.items():
        if name in ("score", "is_correct", "extracted") or isinstance(item, str | None):
            continue
        number = _number(item)
        if number is None:
            return failed(f"{name!r} in the grader's dict is {type(item).__name__}; every part must be a number")
        parts[clean(str(name))] = number
    shown = None if extracted is None else clean(str(extracted)[:EXTRACTED_CHARS])
    return _checked(Grade(score, correct, parts, shown))


def _checked(grade: Grade) -> Grade:
    if grade.error is not None:
        return failed(grade.error, "timeout" if grade.status == "timeout" else "error")
    for name, number in (("score", grade.score), *grade.parts.items()):
        if not math.isfinite(number):
            return failed(f"{name!r} is {number}; a grade must be a finite number")
    return grade


def _number(value: object) -> float | None:
    """The value as a float, if it is one number (also of numpy or torch) and no text."""
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 1) in (1, None):
        scalar = item()
        return float(scalar) if isinstance(scalar, bool | int | float) else None
    return None


Run = Callable[[GradeRequest], Grade]


class Grader(Struct, frozen=True):
    """A grader as it is called.

    `wrong` is the score of a response whose text makes the grader overrun its deadline; None where an overrun is not
    the text's fault, which fails the sample. `prepare` imports what the grader needs, and raises UnknownGraderError; a
    worker calls it once, outside of any item's deadline.
    """

    run: Run
    needs_label: bool = False
    in_stage: bool = True  # cheap and safe enough to run in the stage's own process
    wrong: float | None = None
    prepare: Callable[[], object] | None = None


class Entry(Struct, frozen=True):
    """A name that takes an argument. `build` gets it (None without one); ValueError refuses it."""

    build: Callable[[str | None], Grader]
    form: str  # what the user writes


WINDOW = 2048  # newest grades
_EVERY_S = 0.5

CacheKey = tuple[str, int, int, int, str, bytes]


class Observed:
    """Counts since the start, and latencies of the newest grades: the whole wait of a sample for its grade."""

    def __init__(self) -> None:
        self.graded = self.timeouts = self.errors = self.cached = 0
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        self._reported = 0.0

    def add(self, grade: Grade, seconds: float) -> None:
        self.graded += 1
        self.timeouts += grade.status == "timeout"
        self.errors += grade.error is not None
        self._latencies.append(1000.0 * seconds)

    def due(self) -> bool:
        """Whether the last figures are old enough: sorting at each slice would cost more than grading."""
        return time.monotonic() - self._reported >= _EVERY_S

    def figures(self) -> dict[str, float]:
        """By name, for `Activity.extra`. Counts add up over replicas; shares and latencies are this replica's."""
        self._reported = time.monotonic()
        figures = {
            "graded": float(self.graded),
            "grade_timeouts": float(self.timeouts),
            "grade_errors": float(self.errors),
            "grades_from_cache": float(self.cached),
            "timeout_frac": self.timeouts / self.graded if self.graded else 0.0,
            "error_frac": self.errors / self.graded if self.graded else 0.0,
        }
        if self._latencies:
            import numpy as np  # not at the top: the processes of graders start without it

            p50, p99 = np.quantile(self._latencies, (0.50, 0.99), method="inverted_cdf").tolist()
            figures |= {"latency_ms/p50": p50, "latency_ms/p99": p99}
        return figures


class GradeCache:
    """The newest grades by sample and content: a redelivered sample is not graded twice. Failures are not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._grades: OrderedDict[CacheKey | None, Grade] = OrderedDict()

    def get(self, key: CacheKey | None) -> Grade | None:
        if key in self._grades:
            self._grades.move_to_end(key)
        return self._grades.get(key)

    def put(self, key: CacheKey | None, grade: Grade) -> None:
        if key is None or grade.error is not None:
            return
        self._grades[key] = grade
        self.get(key)  # the newest one
        if len(self._grades) > self._size:
            self._grades.popitem(last=False)
