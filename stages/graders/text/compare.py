"""Comparison of text: `exact`, `contains`, `format`, `f1`, `exact_match`.

`exact` wants the whole response, trimmed, to be the trimmed label. `contains` wants the label to occur in the response,
`contains:TEXT` the given text. Neither looks at numbers, case or Unicode forms.

`format:REGEX` is 1 if the whole response has the form of a regular expression, else 0. `.` matches line breaks too, and
spaces around the response do not count. Python's expressions can take exponential time on a text made for it, so this
grader runs in a grader process with a deadline, and a response that overruns is wrong.

`f1` and `exact_match` compare short answers as the SQuAD evaluation does (arXiv 1606.05250). Both sides are
lower-cased, freed of ASCII punctuation and of the articles a, an, the, and split at spaces. `f1` is the harmonic mean
of precision and recall of the words, counted as often as they occur; a side that is exactly yes, no or noanswer scores
0 against anything else. A label that is a JSON list of texts means any of them; the best counts. An answer without
words scores 0, also against such a label; `f1:exact_empty=1` makes two empty sides equal.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import partial

import msgspec

from stages.graders.grade import EXTRACTED_CHARS, Grade, Grader, GradeRequest, clean, judged

RESPONSE_CHARS = 100_000
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_CLOSED = frozenset(("yes", "no", "noanswer"))
_OPTIONS = {None: False, "exact_empty=0": False, "exact_empty=1": True}


def grade_exact(request: GradeRequest) -> Grade:
    """Score 1 if the trimmed response is the trimmed label."""
    answer = request.response.strip()
    return judged(answer == (request.label or "").strip(), answer)


def grade_contains_label(request: GradeRequest) -> Grade:
    """Score 1 if the trimmed label occurs in the response."""
    return grade_contains((request.label or "").strip(), request)


def grade_contains(text: str, request: GradeRequest) -> Grade:
    """Score 1 if `text` occurs in the response."""
    contained = text in request.response
    return judged(contained, text if contained else None)


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


def words_of(text: str) -> list[str]:
    """The words of a text that count."""
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def answers_of(label: str) -> list[str]:
    """The texts that a label accepts."""
    if label.lstrip().startswith("["):
        try:
            return msgspec.json.decode(label, type=list[str]) or [label]
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return [label]  # a bracket that opens no list
    return [label]


def f1_score(given: Counter[str], wanted: Counter[str], *, exact_empty: bool = False) -> float:
    """Harmonic mean of precision and recall of counted words, in [0, 1]. Time is linear in `wanted`."""
    total = given.total() + wanted.total()
    if not given or not wanted:
        return float(exact_empty and total == 0)
    if given != wanted and (_is_closed(given) or _is_closed(wanted)):
        return 0.0
    return 2.0 * (wanted & given).total() / total


def _is_closed(words: Counter[str]) -> bool:
    return words.total() == 1 and not _CLOSED.isdisjoint(words)


def f1_grader(argument: str | None) -> Grader:
    """The grader `f1`; raises ValueError for an unknown option."""
    if argument not in _OPTIONS:
        raise ValueError(f"the option {argument!r} is none of exact_empty=0, exact_empty=1")
    return Grader(partial(_grade_f1, _OPTIONS[argument]), needs_label=True, wrong=0.0)


def _grade_f1(exact_empty: bool, request: GradeRequest) -> Grade:
    given = words_of(request.response)
    counted = Counter(given)  # once: a label may list thousands of answers, and a response may have a megabyte
    wanted = (Counter(words_of(answer)) for answer in answers_of(request.label or ""))
    best = max(f1_score(counted, answer, exact_empty=exact_empty) for answer in wanted)
    return Grade(best, best == 1.0, extracted=clean(" ".join(given)[:EXTRACTED_CHARS]))


def grade_exact_match(request: GradeRequest) -> Grade:
    """Score 1 if the words of the response are those of the label, in order."""
    given = words_of(request.response)
    correct = bool(given) and any(given == words_of(answer) for answer in answers_of(request.label or ""))
    return judged(correct, " ".join(given)[:EXTRACTED_CHARS])
