"""Graders of the user, by import path `package.module:function`.

The function is called as `function(response, label, metadata)`, with text, text or None, and the row's metadata as a
dict; a parameter of the name `prompt` gets the prompt as the engine saw it. It may be plain or async. It returns a
number, a dict with `score`, or a Grade. A group grader (--group-rm) is called the same way with the list of the group's
responses, and returns a list with one of these for each. A function whose first parameter is `args` is called as slime
calls it: `(args, sample)`, or `(args, samples)`.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache, partial

import msgspec

from models.import_path import ImportPathError, import_function
from stages.graders.grade import Grade, GradeRequest, Run, UnknownGraderError, as_grade, failed

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PARAMETERS = ("response", "label", "metadata")

_Ask = Callable[[GradeRequest, dict[str, object]], object]  # (request, its metadata) -> the function's return value


def custom_grader(path: str) -> Run:
    """The grader of an import path. Raises UnknownGraderError, also for a signature that cannot be called."""
    from stages.slime.hooks import slime_function

    try:
        slime = slime_function(path)
        names, optional = (("args", "sample"), ()) if slime else (_PARAMETERS, ("prompt",))
        function = import_function(path, *names, optional=optional)
    except ImportPathError as error:
        raise UnknownGraderError(f"grader: {error}") from error
    ask = partial(_ask_as_slime, function) if slime else partial(_ask, function, _has_prompt(path, function))
    return partial(_grade, ask)


def _grade(ask: _Ask, request: GradeRequest) -> Grade:
    """Call the user's function; its exceptions pass to the caller."""
    answer = ask(request, msgspec.json.decode(request.metadata, type=dict[str, object]))
    if inspect.isawaitable(answer):
        answer = _runner().run(_finish(answer))
    return _of_group(answer, request) if request.responses else as_grade(answer, request.reward_key)


def _ask(
    function: Callable[..., object], with_prompt: bool, request: GradeRequest, metadata: dict[str, object]
) -> object:
    subject = list(request.responses) if request.responses else request.response
    named = {"prompt": request.prompt} if with_prompt else {}
    return function(subject, request.label, metadata, **named)


def _ask_as_slime(function: Callable[..., object], request: GradeRequest, metadata: dict[str, object]) -> object:
    """Call a function of slime's signature: `(args, sample)`, or `(args, samples)` for a group."""
    from stages.slime.hooks import graded_samples
    from stages.slime.types import SlimeArguments

    responses = request.responses or (request.response,)
    lengths = [request.n_tokens] if not request.responses else [0] * len(responses)
    samples = graded_samples(request.prompt, responses, request.label, metadata, lengths)
    return function(SlimeArguments(reward_key=request.reward_key), samples if request.responses else samples[0])


def _has_prompt(path: str, function: Callable[..., object]) -> bool:
    """Whether the function has a parameter `prompt` after its first three, or takes any keyword.

    Raises UnknownGraderError if `prompt` is among the first three: the call passes these three by position.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return False  # a builtin
    if "prompt" in list(parameters)[: len(_PARAMETERS)]:
        raise UnknownGraderError(
            f"grader {path!r} has 'prompt' among its first three parameters, which get response, label and metadata; "
            "move it behind them: function(response, label, metadata, prompt)"
        )
    return "prompt" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


@lru_cache(maxsize=1)
def _runner() -> asyncio.Runner:
    """One event loop for the life of the process: a client that an async grader keeps stays usable."""
    return asyncio.Runner()


async def _finish(answer: Awaitable[object]) -> object:
    return await answer


def _of_group(answers: object, request: GradeRequest) -> Grade:
    """A grade whose members are those of the group, or one failed grade for all of it."""
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
