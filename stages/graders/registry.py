"""From the name of a grader to a function, and the one entry point `grade_request`.

A name is `name` or `name:argument`; a `boxed_` in front takes the last box of the response first;
`package.module:function` is the user's own grader. `auto` chooses by the labels.

Invariants: a name is refused before anything is graded with it; `grade_request` raises nothing for a bad sample: an
exception of a grader is a failed grade with its type and text.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import lru_cache, partial

import msgspec

from configs.schema.notation import nearest
from stages.graders import synthetic
from stages.graders.code import code_grader
from stages.graders.custom import IMPORT_PATH, custom_grader
from stages.graders.grade import Entry, Grade, Grader, GradeRequest, UnknownGraderError, against_label, failed, fixed
from stages.graders.math import mathematics
from stages.graders.math.answer import last_box
from stages.graders.math.final_line import WRONG, grade_dapo, grade_gsm8k, grade_gsm8k_flex, marked_number
from stages.graders.text import compare, ifeval, ifeval_rules
from stages.graders.text.gpqa import grade_gpqa

BOXED = "boxed_"
_CURE = "set --rm-type to the grader that fits"


def grade_auto(request: GradeRequest) -> Grade:
    """`gsm8k` for a label with '#### number', else `exact`."""
    return compare.grade_exact(request) if marked_number(request.label or "") is None else grade_gsm8k(request)


def stage_grader(argument: str | None) -> Grader:
    """The entry of `remote` and `judge`, which run in the reward stage. Raises ValueError."""
    if argument is not None and not argument.strip():
        raise ValueError("the text after the colon is empty")

    def refuse(request: GradeRequest) -> Grade:
        return failed(f"{request.grader!r} runs in the reward stage, not in a grader process")

    return Grader(refuse, in_stage=False)


def _contains(argument: str | None) -> Grader:
    if argument is None:
        return Grader(compare.grade_contains_label, needs_label=True)
    if not argument:
        raise ValueError("the text is empty, and every response contains it")
    return Grader(partial(compare.grade_contains, argument))


GRADERS: dict[str, Entry] = {
    "auto": against_label(grade_auto, "auto"),
    "exact": against_label(compare.grade_exact, "exact"),
    "contains": Entry(_contains, "contains or contains:TEXT"),
    "boxed": against_label(mathematics.grade_strict, "boxed"),
    "gsm8k": against_label(grade_gsm8k, "gsm8k"),
    "gsm8k_flex": against_label(grade_gsm8k_flex, "gsm8k_flex"),
    "math": Entry(mathematics.math_grader, "math, math:compat, math:verify or math:either"),
    "math_strict": against_label(mathematics.grade_strict, "math_strict"),
    "math_hendrycks": against_label(mathematics.grade_hendrycks, "math_hendrycks"),
    "math_verify": fixed(mathematics.symbolic(mathematics.grade_verify), "math_verify"),
    "deepscaler": fixed(mathematics.symbolic(mathematics.grade_deepscaler), "deepscaler"),
    "dapo": fixed(Grader(grade_dapo, needs_label=True, wrong=WRONG), "dapo"),
    "f1": Entry(compare.f1_grader, "f1 or f1:exact_empty=1"),
    "exact_match": against_label(compare.grade_exact_match, "exact_match"),
    "gpqa": fixed(Grader(grade_gpqa), "gpqa"),
    "ifeval": fixed(
        Grader(ifeval.grade_ifeval, in_stage=False, wrong=0.0, prepare=ifeval_rules.prepare_language), "ifeval"
    ),
    "ifbench": fixed(
        Grader(ifeval.grade_ifbench, in_stage=False, wrong=0.0, prepare=ifeval.prepare_ifbench), "ifbench"
    ),
    "code": Entry(code_grader, "code or code:SECONDS", reads_text=False),
    "format": Entry(compare.format_grader, "format:REGEX"),
    "remote": Entry(stage_grader, "remote or remote:URL", reads_text=False),
    "judge": Entry(stage_grader, "judge or judge:NAME", reads_text=False),
    "length": Entry(synthetic.length_grader, "length:N (tokens)", reads_text=False),
    "random": Entry(synthetic.random_grader, "random or random:P", reads_text=False),
    "constant": Entry(synthetic.constant_grader, "constant:X", reads_text=False),
    "sleep": Entry(synthetic.sleep_grader, synthetic.SLEEP_FORM, reads_text=False),
    "crash": Entry(synthetic.crash_grader, "crash or crash:P", reads_text=False),
}


@lru_cache(maxsize=256)
def find_grader(name: str) -> Grader:
    """The grader of a name. Raises UnknownGraderError, which suggests the nearest name."""
    base, separator, argument = name.partition(":")
    entry = GRADERS.get(base)
    boxed = entry is None and base.startswith(BOXED)
    if boxed:
        entry = GRADERS.get(base.removeprefix(BOXED))
    if entry is None:
        return _find_custom(name, base)
    if boxed and not entry.reads_text:
        raise UnknownGraderError(f"rm_type {name!r}: {BOXED!r} needs a grader that reads the response; leave it off")
    try:
        grader = entry.build(argument if separator else None)
    except ValueError as error:
        raise UnknownGraderError(f"rm_type {name!r} cannot be used ({error}); write {entry.form}") from None
    return msgspec.structs.replace(grader, run=partial(_grade_box, grader)) if boxed else grader


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


def _find_custom(name: str, base: str) -> Grader:
    _check_form(name, base)
    return Grader(custom_grader(name), in_stage=False)


def _check_form(name: str, base: str) -> None:
    """Refuse a name that is no import path, and a misspelt built-in name: `exakt:fn` if there is no module `exakt`."""
    names = [*GRADERS, *(BOXED + known for known, entry in GRADERS.items() if entry.reads_text)]
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
        return failed(f"{type(error).__name__}: {error}")


def choose_auto(labels: Iterable[str | None]) -> tuple[str, str]:
    """(grader, reason) from a sample of the labels. Raises UnknownGraderError if the labels do not agree."""
    known = [label for label in labels if label is not None and label.strip()]
    if not known:
        raise UnknownGraderError(
            f"rm_type 'auto' chooses by the labels, but there are none; set --label-key, or {_CURE}"
        )
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
