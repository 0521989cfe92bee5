"""Graders of the user, by import path `package.module:function`.

The function is called as `function(response, label, metadata)`, with text, text or None, and the row's metadata as a
dict. It returns a number, a dict with `score`, or a Grade. A group grader (--group-rm) is called the same way with the
list of the group's responses, and returns a list with one of these for each.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping

import msgspec

from models.import_path import ImportPathError, import_path
from stages.graders.errors import UnknownGraderError
from stages.graders.grade import Grade, GradeRequest, as_grade, failed

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

Function = Callable[[str, str | None, Mapping[str, object]], object]
GroupFunction = Callable[[list[str], str | None, Mapping[str, object]], object]


def import_function(path: str) -> Function:
    """The grader function of an import path. Raises UnknownGraderError, also for a signature that cannot be called."""
    try:
        function = import_path(path)
    except ImportPathError as error:
        raise UnknownGraderError(f"grader {path!r}: {error}") from error
    if not callable(function):
        raise UnknownGraderError(f"grader {path!r} is no function; check the name after the colon")
    if inspect.iscoroutinefunction(function):
        raise UnknownGraderError(
            f"grader {path!r} is an async function; graders run in processes, so write a plain function"
        )
    # A builtin has no readable signature (ValueError): calling it will tell.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(function).bind("response", "label", {})
        except TypeError as error:
            raise UnknownGraderError(
                f"grader {path!r} cannot be called as function(response, label, metadata) ({error}); "
                "take these three arguments"
            ) from error
    found: Function = function
    return found


def grade_custom(function: Callable[..., object], request: GradeRequest) -> Grade:
    """Call the user's function; what it raises is for the caller to attribute."""
    metadata: dict[str, object] = msgspec.json.decode(request.metadata, type=dict[str, object])
    if request.responses:
        return _grade_group(function, request, metadata)
    return as_grade(function(request.response, request.label, metadata), request.reward_key)


def _grade_group(function: GroupFunction, request: GradeRequest, metadata: Mapping[str, object]) -> Grade:
    """A grade whose members are those of the group, or one failed grade for all of it."""
    answers = function(list(request.responses), request.label, metadata)
    if isinstance(answers, str | bytes | Mapping | Grade) or not isinstance(answers, Iterable):
        return failed(
            f"the group grader returned {type(answers).__name__}; it must return a list with a grade for each response"
        )
    members = tuple(as_grade(answer, request.reward_key) for answer in answers)
    if len(members) != len(request.responses):
        return failed(
            f"the group grader returned {len(members)} grades for {len(request.responses)} responses; "
            "it must return one for each, in their order"
        )
    return Grade(0.0, members=members)
