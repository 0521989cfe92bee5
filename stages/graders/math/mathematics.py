"""`math`, `math_strict`, `math_hendrycks`, `math_verify`, `deepscaler`: is the final answer the label?

All take the last box after the reasoning and score 0 or 1. `math_strict` (also `boxed`) wants the label as it is
written, `math_hendrycks` the same text after the normalisation of the MATH data set. `math` and `math_verify` first
bring both sides to one Unicode form. `math` (`math:either`) reads structure, units and values of both and compares
them exactly (equality.py); math-verify decides only what that cannot decide. `math:verify` and `math_verify` ask
math-verify, and score 0 where the two sides are plainly different (it takes words for products of letters, and passes
over signs that it does not know). `math:compat` adds cautious arithmetic to the string rules. The dialects disagree on
purpose, so their scores are not comparable: unreduced fractions, ordered lists, units and \\fbox are examples.

Invariants: equal text is equal before any other comparison; what the guards refuse, and `nan` and `inf`, can be
equal as text only; a comparison that uses up its processor time is wrong; an empty label is an error of the data and
never a wrong answer.

math-verify (`parse` and `verify`, on latex2sympy2_extended and sympy) gets only the content of the box, in a box of its
own, and the label first, as `verify` is not symmetric. Its timeouts, which need the alarm signal, stay off: a grader
process is killed from outside. The library is imported when it is first needed.

`deepscaler` is the DeepScaleR recipe's reward: the solution is the text after the last `</think>`, else the text behind
the first `###Response`; a response with neither scores 0. Its box is then judged as by `math:compat`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache, partial

import msgspec

from stages.graders.grade import Grade, Grader, GradeRequest, UnknownGraderError, failed
from stages.graders.math.answer import Answer, find_answer, math_style, plain_form, unboxed, verdict
from stages.graders.math.compat import compat_equal
from stages.graders.math.equality import same_answer, same_spelling
from stages.graders.math.guards import MAX_PARSED_DEPTH, nesting, refusal_of
from stages.workers.serve import CpuLimitError, cpu_limit

_LIBRARY_LOGGER = "math_verify"
_NOT_A_NUMBER = re.compile(r"[-+]?\s*\\?(?:text\{)?\s*(?:nan|inf|infty|infinity)\s*\}?", re.IGNORECASE)
_PLUS = re.compile(r"^\+\s*(?=\\infty$)")
_INTEGER = re.compile(r"-?[0-9]{1,100}")

SYMBOLIC_S = 1.5  # of processor time for one comparison; a text that takes longer is wrong

Equal = Callable[[str, str], bool | None]  # None: the guards refuse a text, which can be equal as text only
_CLOSE = "</think>"
_MARK = "###Response"


@lru_cache(maxsize=1)
def prepare() -> None:
    """Import what comparing needs and compare once: no item's time pays for it. Raises UnknownGraderError."""
    try:
        verify_equal("2x", "x+x")
    except ImportError as error:
        raise UnknownGraderError(
            f"the graders 'math' and 'math_verify' need the package math-verify ({error}); "
            "install it, or set --rm-type math_hendrycks or gsm8k"
        ) from None
    same_answer("2x", "x+x")


def verify_equal(answer: str, label: str) -> bool:
    """Whether math-verify judges the answer equal to the label."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns once that its timeouts are off, which is meant, and logs texts that it cannot parse, which are graded.
    logging.getLogger(_LIBRARY_LOGGER).setLevel(logging.CRITICAL)
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    given, wanted = (
        parse(rf"\boxed{{{text}}}", extraction_config=targets, parsing_timeout=None) for text in (answer, label)
    )
    return bool(verify(wanted, given, timeout_seconds=None))


def grade_strict(request: GradeRequest) -> Grade:
    """Score 1 if the content of the last box is the label, character by character after trimming."""
    answer = find_answer(request.response)
    label = unboxed(request.label or "")
    return _no_label(request) if not label else verdict(_content(answer) == label, answer)


def grade_hendrycks(request: GradeRequest) -> Grade:
    """Score 1 if the content of the last \\boxed is the label in the form of the MATH data set."""
    answer = find_answer(request.response)
    label = unboxed(request.label or "")
    if not label:
        return _no_label(request)
    content = _content(answer, fbox=False)
    return verdict(content is not None and math_style(content) == math_style(label), answer)


def math_grader(argument: str | None) -> Grader:
    """The grader `math` in a dialect; raises ValueError for another."""
    dialect = "either" if argument is None else argument
    if dialect not in DIALECTS:
        raise ValueError(f"the dialect {dialect!r} is none of {', '.join(DIALECTS)}")
    return symbolic(DIALECTS[dialect])


def symbolic(run: Callable[[GradeRequest], Grade]) -> Grader:
    """A grader that may call sympy. It runs in a grader process, where an answer that takes too long is wrong."""
    return Grader(run, needs_label=True, in_stage=False, wrong=0.0, prepare=prepare)


def _compat_equal(answer: str, label: str) -> bool | None:
    return None if _refused(answer, label) else compat_equal(answer, label)


def _either_equal(answer: str, label: str) -> bool | None:
    if _refused(answer, label, evaluates=False):
        return None
    same = same_answer(answer, label)
    return same if same is not None or _refused(answer, label) else _library_equal(answer, label)


def _verify_equal(answer: str, label: str) -> bool | None:
    if _refused(answer, label):
        return None
    return same_answer(answer, label) is not False and _library_equal(answer, label)


def _refused(answer: str, label: str, *, evaluates: bool = True) -> bool:
    return any(refusal_of(text, evaluates=evaluates) is not None for text in (answer, label))


def _library_equal(answer: str, label: str) -> bool:
    """The verdict of math-verify; False for deeply nested texts, where its time grows with a power of the depth."""
    return max(nesting(answer), nesting(label)) <= MAX_PARSED_DEPTH and verify_equal(answer, label)


def _grade(request: GradeRequest, *, equal: Equal, fbox: bool) -> Grade:
    label = plain_form(unboxed(request.label or ""))
    if not label:
        return _no_label(request)
    answer = find_answer(request.response)
    content = _content(answer, fbox=fbox)
    given = "" if content is None else plain_form(content)
    if not given or given == label:
        return verdict(bool(given), answer)
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(label):
        return verdict(int(given) == int(label), answer)  # the common case: no dialect disagrees, none is needed
    if _NOT_A_NUMBER.fullmatch(given) or _NOT_A_NUMBER.fullmatch(label):
        return verdict(equal is not _compat_equal and _PLUS.sub("", given) == _PLUS.sub("", label), answer)
    prepare()
    try:
        with cpu_limit(SYMBOLIC_S):
            same = equal(given, label)
    except CpuLimitError:
        return msgspec.structs.replace(verdict(False, answer), status="timeout")
    return verdict(same_spelling(given, label) if same is None else same, answer, refused=same is None)


# Each scores 1 if it calls the last box (`compat`: the last \\boxed) equal to the label.
DIALECTS: dict[str, Callable[[GradeRequest], Grade]] = {
    "compat": partial(_grade, equal=_compat_equal, fbox=False),
    "verify": partial(_grade, equal=_verify_equal, fbox=True),
    "either": partial(_grade, equal=_either_equal, fbox=True),
}


def _content(answer: Answer, *, fbox: bool = True) -> str | None:
    return answer.content if fbox or answer.command != "\\fbox" else None


def _no_label(request: GradeRequest) -> Grade:
    return failed(f"the label {(request.label or '')[:80]!r} holds no answer; check --label-key and the data")


def grade_deepscaler(request: GradeRequest) -> Grade:
    """Score 1 if the solution's last \\boxed is the label, as `math:compat` judges it."""
    _, closed, solution = request.response.rpartition(_CLOSE)
    if not closed:
        solution = "".join(request.response.split(_MARK, 2)[1:2])
    return DIALECTS["compat"](msgspec.structs.replace(request, response=solution))
