"""From the name of a grader to a function, built in or the user's, and the one entry point `grade_request`.

A name is `name` or `name:argument`; a `boxed_` in front takes the last box of the response first. `auto` chooses by the
labels. A name is refused before anything is graded with it. `grade_request` raises nothing for a bad sample: an
exception of a grader is a failed grade with its type and text.

A user's function has an import path `package.module:function` and is called as `function(response, label, metadata)`,
with text, text or None, and the row's metadata as a dict; a parameter of the name `prompt` gets the prompt as the
engine saw it. It may be plain or async. It returns a number, a dict with `score`, or a Grade. A group grader
(--group-rm) is called the same way with the list of the group's responses, and returns a list with one of these for
each. A function whose first parameter is `args` is called as slime calls it: `(args, sample)`, or `(args, samples)`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

import msgspec

from configs.schema.notation import nearest
from models.import_path import ImportPathError, import_function, raised
from models.slime_arguments import SlimeArguments
from stages.graders import synthetic
from stages.graders.code import code_grader
from stages.graders.grade import Entry, Grade, Grader, GradeRequest, Run, UnknownGraderError, as_grade, failed
from stages.graders.math import mathematics
from stages.graders.math.answer import last_box
from stages.graders.math.final_line import WRONG, grade_dapo, grade_gsm8k, grade_gsm8k_flex, marked_number
from stages.graders.text import compare, ifeval, ifeval_rules

IMPORT_PATH = re.compile(r"(?:[A-Za-z_][\w.]*|[\w./~-]+\.py):[A-Za-z_]\w*")
_PARAMETERS = ("response", "label", "metadata")

ARGS: Final = SlimeArguments()  # the run's settings, for functions of slime's signature; set where graders run

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
    from stages.slime.convert import put_back
    from stages.slime.types import Sample, label_of

    length = 0 if request.responses else request.n_tokens
    ended: Any = metadata.get("group_members", ())
    own: dict[str, Any] = {"attributes": metadata.pop("sample_attributes", {})}
    label, answers = label_of(request.label), request.responses or (request.response,)
    samples = [
        Sample(prompt=request.prompt, response=response, response_length=length, label=label, metadata={**metadata})
        for response in answers
    ]
    lefts = [one.get("left", {}) for one in ended if one["graded"]] if request.responses else [own]
    for sample, left in zip(samples, lefts, strict=False):
        put_back(sample, left)
    args = SlimeArguments(**{**vars(ARGS), "reward_key": request.reward_key})
    return function(args, samples if request.responses else samples[0])


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
    return "prompt" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


@lru_cache(maxsize=1)
def _runner() -> asyncio.Runner:
    """One event loop for the life of the process: a client that an async grader keeps stays usable."""
    return asyncio.Runner()


async def _finish(answer: Awaitable[object]) -> object:
    return await answer


def _of_group(answers: object, request: GradeRequest) -> Grade:
    """A grade whose members are those of the group, or one failed grade for all of it."""
    if isinstance(answers, str | bytes | Mapping | Grade) or not isinstance(answers, Iterable):
        return failed(f"the group grader returned {type(answers).__name__}; return a list, a grade for each response")
    members = tuple(as_grade(answer, request.reward_key) for answer in answers)
    if len(members) != len(request.responses):
        return failed(
            f"the group grader returned {len(members)} grades for {len(request.responses)} responses; return one each"
        )
    return Grade(0.0, members=members)


BOXED = "boxed_"
_CURE = "set --rm-type to the grader that fits"


def grade_auto(request: GradeRequest) -> Grade:
    """`gsm8k` for a label with '#### number', else `exact`."""
    return compare.grade_exact(request) if marked_number(request.label or "") is None else grade_gsm8k(request)


def stage_grader(argument: str | None) -> Grader:
    """The entry of `remote` and `judge`, which run in the reward stage. Raises ValueError."""
    if argument is not None and not argument.strip():
        raise ValueError("the text after the colon is empty")
    reason = "runs in the reward stage, not in a grader process"
    return Grader(lambda request: failed(f"{request.grader!r} {reason}"), in_stage=False)


def _contains(argument: str | None) -> Grader:
    if argument == "":
        raise ValueError("the text is empty, and every response contains it")
    return Grader(partial(compare.grade_contains, argument), needs_label=argument is None)


def against_label(run: Run) -> Grader:
    """A grader that compares with the label and is cheap."""
    return Grader(run, needs_label=True)


GRADERS: dict[str, Grader | Entry] = {
    "auto": against_label(grade_auto),
    "exact": against_label(compare.grade_exact),
    "contains": Entry(_contains, "contains or contains:TEXT"),
    "boxed": against_label(mathematics.grade_strict),
    "gsm8k": against_label(grade_gsm8k),
    "gsm8k_flex": against_label(grade_gsm8k_flex),
    "math": Entry(mathematics.math_grader, "math, math:compat, math:verify or math:either"),
    "math_strict": against_label(mathematics.grade_strict),
    "math_hendrycks": against_label(mathematics.grade_hendrycks),
    "math_verify": mathematics.symbolic(mathematics.DIALECTS["verify"]),
    "deepscaler": mathematics.symbolic(mathematics.grade_deepscaler),
    "dapo": Grader(grade_dapo, needs_label=True, wrong=WRONG),
    "f1": Entry(compare.f1_grader, "f1 or f1:exact_empty=1"),
    "exact_match": against_label(compare.grade_exact_match),
    "gpqa": Grader(compare.grade_gpqa),
    "ifeval": Grader(ifeval.grade_ifeval, in_stage=False, wrong=0.0, prepare=ifeval_rules.prepare_language),
    "ifbench": Grader(ifeval.grade_ifbench, in_stage=False, wrong=0.0, prepare=ifeval.checkers),
    "code": Entry(code_grader, "code or code:SECONDS"),
    "format": Entry(compare.format_grader, "format:REGEX"),
    "remote": Entry(stage_grader, "remote or remote:URL"),
    "judge": Entry(stage_grader, "judge or judge:NAME"),
    "length": Entry(synthetic.length_grader, "length:N (tokens)"),
    "random": Entry(synthetic.random_grader, "random or random:P"),
    "constant": Entry(synthetic.constant_grader, "constant:X"),
    "sleep": Entry(synthetic.sleep_grader, synthetic.SLEEP_FORM),
    "crash": Entry(synthetic.crash_grader, "crash or crash:P"),
}
# They read no text of the response, so that `boxed_` in front makes no sense.
NO_TEXT = frozenset(("code", "remote", "judge", "length", "random", "constant", "sleep", "crash"))


@lru_cache(maxsize=256)
def find_grader(name: str) -> Grader:
    """The grader of a name. Raises UnknownGraderError, which suggests the nearest name."""
    base, separator, argument = name.partition(":")
    known = base if base in GRADERS else base.removeprefix(BOXED)
    boxed, entry = known != base, GRADERS.get(known)
    if entry is None:
        _check_form(name, base)
        return Grader(custom_grader(name), in_stage=False)
    if boxed and known in NO_TEXT:
        raise UnknownGraderError(f"rm_type {name!r}: {BOXED!r} needs a grader that reads the response; leave it off")
    if isinstance(entry, Grader):
        if separator:
            raise UnknownGraderError(f"rm_type {name!r} cannot be used (it takes no argument); write {known}")
        grader = entry
    else:
        try:
            grader = entry.build(argument if separator else None)
        except ValueError as error:
            raise UnknownGraderError(f"rm_type {name!r} cannot be used ({error}); write {entry.form}") from None
    return msgspec.structs.replace(grader, run=partial(_grade_box, grader)) if boxed else grader


def normal_import_path(path: str) -> str:
    """`package.module.function`, as slime writes it, as `package.module:function`."""
    return path if ":" in path else ":".join(path.rsplit(".", 1))


def is_import_path(name: str) -> bool:
    """Whether a name is the import path of a custom grader."""
    base = name.partition(":")[0]
    known = base in GRADERS or base.removeprefix(BOXED) in GRADERS
    return not known and IMPORT_PATH.fullmatch(name) is not None


@lru_cache(maxsize=256)
def listed_grader(name: str) -> Grader | None:
    """The built-in grader of a name; None for a custom grader, which is not imported here, and for an unknown name."""
    try:
        return None if is_import_path(name) else find_grader(name)
    except UnknownGraderError:
        return None


def _check_form(name: str, base: str) -> None:
    """Refuse a name that is no import path, and a misspelt built-in name: `exakt:fn` if there is no module `exakt`."""
    names = [*GRADERS, *(BOXED + known for known in GRADERS if known not in NO_TEXT)]
    near = nearest(base, names)
    guess = f"did you mean {near!r}? " if near else ""
    if not IMPORT_PATH.fullmatch(name) or (near and "." not in base and not _is_module(base)):
        raise UnknownGraderError(
            f"rm_type {name!r} is no grader; {guess}Known: {', '.join(GRADERS)}, boxed_ before one that reads text, "
            "or your own as package.module:function"
        )


def _is_module(name: str) -> bool:
    """Whether a module without dots can be found; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _grade_box(grader: Grader, request: GradeRequest) -> Grade:
    content = last_box(request.response)
    if content is None:
        return Grade(grader.wrong or 0.0, False)
    return grader.run(msgspec.structs.replace(request, response=content))


def refusal(name: str) -> str | None:
    """Why a name is no grader; None if it is one. Does not import the module of an import path."""
    try:
        if is_import_path(name):
            _check_form(name, name.partition(":")[0])
        else:
            find_grader(name)
    except UnknownGraderError as error:
        return str(error)
    return None


def grade_request(request: GradeRequest) -> Grade:
    """Grade one response. A bad sample or a grader that raises gives a failed grade, never an exception."""
    try:
        grader = find_grader(request.grader)
        if grader.needs_label and not (request.label or "").strip():
            return failed(f"the sample has no label, which {request.grader!r} needs; check --label-key and the data")
        return grader.run(request)
    except (Exception, SystemExit) as error:  # a grader is the user's program; the sample fails with its error
        return failed(f"{raised(error)}")


def choose_auto(labels: Iterable[str | None]) -> tuple[str, str]:
    """(grader, reason) from a sample of the labels. Raises UnknownGraderError if the labels do not agree."""
    known = [label for label in labels if label is not None and label.strip()]
    if not known:
        raise UnknownGraderError(f"rm_type 'auto' chooses by labels, but there are none; set --label-key, or {_CURE}")
    marked = sum(marked_number(label) is not None for label in known)
    if marked == len(known):
        return "gsm8k", f"all {marked} sampled labels end in '#### number'"
    if marked:
        raise UnknownGraderError(
            f"rm_type 'auto' finds '#### number' in {marked} of {len(known)} sampled labels; {_CURE}"
        )
    return "exact", f"none of the {len(known)} sampled labels has a '#### number', so responses must equal the label"


def outside(grader: str) -> tuple[str, str | None] | None:
    """(`remote` or `judge`, argument) if the reward stage itself runs this grader, else None."""
    base, separator, argument = grader.partition(":")
    return (base, argument if separator else None) if base in ("remote", "judge") else None
