"""`format:REGEX`: 1 if the whole response has the form of a regular expression, else 0.

`.` matches line breaks too, and spaces around the response do not count. Python's expressions can take exponential time
on a text made for it, so this grader runs in a grader process with a deadline, and a response that overruns is wrong.
"""

from __future__ import annotations

import re
from functools import partial

from stages.graders.entry import Grader
from stages.graders.grade import Grade, GradeRequest

RESPONSE_CHARS = 100_000


def format_grader(argument: str | None) -> Grader:
    """Raises ValueError for an expression that cannot be compiled or matches everything because it is empty."""
    if not argument:
        raise ValueError("the expression is empty")
    try:
        pattern = re.compile(argument, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the expression cannot be compiled: {error}") from None
    return Grader(partial(grade_format, pattern), in_stage=False, wrong=0.0)


def grade_format(pattern: re.Pattern[str], request: GradeRequest) -> Grade:
    """Score 1 if the trimmed response matches from its begin to its end. No claim about being correct."""
    text = request.response.strip()
    return Grade(float(len(text) <= RESPONSE_CHARS and pattern.fullmatch(text) is not None))
