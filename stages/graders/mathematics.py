"""`math`, `math_strict`, `math_hendrycks`, `math_verify`: is the final answer the label?

All take the last box after the reasoning and score 0 or 1. `math_strict` (also `boxed`) wants the label as it is
written, `math_hendrycks` the same text after the normalisation of the MATH data set. `math` and `math_verify` first
bring both sides to one Unicode form. `math:compat` adds cautious arithmetic to the string rules, `math:verify` and
`math_verify` ask math-verify, `math` (`math:either`) takes what either calls equal. The dialects disagree on purpose,
so their scores are not comparable: unreduced fractions, ordered lists, mixed numbers and \\fbox are examples.

Invariants: equal text is equal before anything else is asked; what the guards refuse, and `nan` and `inf`, can be
equal as text only; an empty label is an error of the data and never a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from stages.graders.answer import Answer, find_answer, plain_form, verdict
from stages.graders.boxed import unboxed
from stages.graders.compat import compat_equal, same_text, same_value
from stages.graders.entry import Grader
from stages.graders.grade import Grade, GradeRequest, failed
from stages.graders.guards import MAX_PARSED_DEPTH, nesting, refusal_of
from stages.graders.hendrycks import math_style
from stages.graders.verify import prepare_symbolic, verify_equal

DIALECTS = ("compat", "verify", "either")
_NOT_A_NUMBER = re.compile(r"[-+]?\s*\\?(?:text\{)?\s*(?:nan|inf|infty|infinity)\s*\}?", re.IGNORECASE)
_INTEGER = re.compile(r"-?[0-9]{1,100}")

Equal = Callable[[str, str], bool]


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
    return symbolic(_DIALECTS[dialect])


def symbolic(run: Callable[[GradeRequest], Grade]) -> Grader:
    """A grader that may ask sympy: in a process of its own, where an answer that takes too long is wrong."""
    return Grader(run, needs_label=True, in_stage=False, wrong=0.0, prepare=prepare_symbolic)


def grade_compat(request: GradeRequest) -> Grade:
    """Score 1 if string rules or cautious arithmetic call the last \\boxed equal to the label."""
    return _grade(request, compat_equal, fbox=False)


def grade_verify(request: GradeRequest) -> Grade:
    """Score 1 if math-verify calls the last box equal to the label."""
    return _grade(request, _verify_equal, fbox=True)


def grade_either(request: GradeRequest) -> Grade:
    """Score 1 if either of the two does."""
    return _grade(request, _either_equal, fbox=True)


_DIALECTS = {"compat": grade_compat, "verify": grade_verify, "either": grade_either}


def _either_equal(answer: str, label: str) -> bool:
    return same_text(answer, label) or same_value(answer, label) or _verify_equal(answer, label)


def _verify_equal(answer: str, label: str) -> bool:
    """What math-verify says; of deeply nested texts, whether they are the same in the form of the MATH data set."""
    if max(nesting(answer), nesting(label)) > MAX_PARSED_DEPTH:
        return same_text(answer, label)
    return verify_equal(answer, label)


def _grade(request: GradeRequest, equal: Equal, *, fbox: bool) -> Grade:
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
        return verdict(False, answer)
    if refusal_of(given) is not None or refusal_of(label) is not None:
        return verdict(same_text(given, label), answer, refused=True)
    return verdict(equal(given, label), answer)


def _content(answer: Answer, *, fbox: bool = True) -> str | None:
    if answer.box is None or (answer.box.command == "\\fbox" and not fbox):
        return None
    return answer.box.content


def _no_label(request: GradeRequest) -> Grade:
    return failed(f"the label {(request.label or '')[:80]!r} holds no answer; check --label-key and the data")
