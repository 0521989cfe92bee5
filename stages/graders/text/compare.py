"""Comparison of text: `exact`, `contains`, `format`, `f1`, `exact_match`, and the letter of a choice: `gpqa`.

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

`gpqa`: the letter of a multiple-choice question (GPQA, arXiv 2311.12022).

The metadata holds `choices` (a list of texts, or an object from letters to texts), and `correct_letter` if the label
is not the letter; a label may also be the text of a choice, in any case, or its number, counted from 0 as data sets
do. A label that is none of these is an error of the data. Without choices the letters are those of `valid_letters`,
else A to D.

Read after the last `</think>`, in this order: a box, "final answer is X", "answer is X", "X is correct", the last
capital that stands alone, and the only choice whose text occurs. A letter counts if it is upper case, stands alone and
is valid; of several in one form the last one counts. An article A at the end of the search can so be taken for an
answer, as in the data's own evaluation; ask for a box.
"""

from __future__ import annotations

import re
import string
from collections import Counter, deque
from functools import lru_cache, partial

import msgspec
from msgspec import Struct

from stages.graders.grade import EXTRACTED_CHARS, Grade, Grader, GradeRequest, clean, failed, judged
from stages.graders.math.answer import TAIL_CHARS, after_thought, last_box

RESPONSE_CHARS = 100_000
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_CLOSED = frozenset(("yes", "no", "noanswer"))
_OPTIONS = {None: False, "exact_empty=0": False, "exact_empty=1": True}


def grade_exact(request: GradeRequest) -> Grade:
    """Score 1 if the trimmed response is the trimmed label."""
    answer = request.response.strip()
    return judged(answer == (request.label or "").strip(), answer)


def grade_contains(text: str | None, request: GradeRequest) -> Grade:
    """Score 1 if `text` occurs in the response; None: the trimmed label."""
    text = (request.label or "").strip() if text is None else text
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


_DEFAULT_LETTERS = "ABCD"
_WRAPPED = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{)?[\s({\[*$]*([A-Z])[\s)}\]*$.:]*\}?")
_NUMBER = re.compile(r"([0-9]{1,2})(?:\.0)?")
_MAX_TEXT = 2048
_MARKS = r"[\s*_`\"'$({\[]{0,8}"


class _Metadata(Struct):
    choices: list[str | int | float] | dict[str, str | int | float] | None = None
    correct_letter: str | None = None
    valid_letters: list[str] | str | None = None


def read_question(request: GradeRequest) -> tuple[str, dict[str, str]]:
    """The letter that is right, and the choices' texts by letter. Raises ValueError for a fault of the data."""
    try:
        metadata = msgspec.json.decode(request.metadata, type=_Metadata)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"gpqa cannot read the row's metadata ({error}); 'choices' is a list of texts") from None
    choices = _choices(metadata)
    if not choices or any(len(letter) != 1 or letter not in string.ascii_uppercase for letter in choices):
        raise ValueError(f"gpqa needs one capital letter for each choice, and finds {', '.join(choices) or 'none'}")
    wanted = (metadata.correct_letter or request.label or "").strip()
    correct = _correct(wanted, choices)
    if correct is None:
        raise ValueError(
            f"gpqa has no correct choice: {wanted[:80]!r} is neither one of {', '.join(choices)} "
            "nor the text or number of one; set 'correct_letter' in the metadata, or the label"
        )
    return correct, choices


def _correct(wanted: str, choices: dict[str, str]) -> str | None:
    """The letter that a label means: a letter, else the text of one choice, else a number from 0."""
    if wanted.upper() in choices:
        return wanted.upper()
    folded = _folded(wanted)
    same = [letter for letter, text in choices.items() if folded and _folded(text) == folded]
    if same:
        return same[0] if len(same) == 1 else None
    number = _NUMBER.fullmatch(wanted)
    letters = list(choices)
    return letters[int(number[1])] if number and int(number[1]) < len(letters) else None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _choices(metadata: _Metadata) -> dict[str, str]:
    if isinstance(metadata.choices, dict):
        return {letter.strip(): str(text) for letter, text in metadata.choices.items()}
    texts = [str(text) for text in metadata.choices or ()]
    letters = list(metadata.valid_letters or string.ascii_uppercase[: len(texts)] or _DEFAULT_LETTERS)
    return {letter: texts[position] if position < len(texts) else "" for position, letter in enumerate(letters)}


def grade_gpqa(request: GradeRequest) -> Grade:
    """Score 1 if the answered letter is the correct one."""
    try:
        correct, choices = read_question(request)
    except ValueError as fault:
        return failed(str(fault))
    text = after_thought(request.response)
    letter = None if text is None else answered_letter(text[-TAIL_CHARS:], choices)
    return judged(letter == correct, letter)


def answered_letter(text: str, choices: dict[str, str]) -> str | None:
    """The letter that a response answers, None if it answers none."""
    boxed = last_box(text)
    inside = _WRAPPED.fullmatch(boxed) if boxed is not None and len(boxed) <= 64 else None
    if inside is not None and inside[1] in choices:
        return inside[1]
    for pattern in _patterns("".join(choices)):
        hits = deque(pattern.finditer(text), maxlen=1)
        if hits:
            return hits[0][1]
    folded = _folded(text)
    named = [letter for letter, choice in choices.items() if _mentions(folded, choice)]
    return named[0] if len(named) == 1 else None


@lru_cache(maxsize=64)
def _patterns(letters: str) -> tuple[re.Pattern[str], ...]:
    alone = rf"(?<![A-Za-z0-9])([{letters}])(?![A-Za-z0-9'’])"
    named = rf"(?:\s{{0,8}}(?::|(?i:is)\b))?:?{_MARKS}{alone}"
    return (
        re.compile(rf"\b(?i:final\s{{1,8}}(?:answer|option)){_MARKS}{named}"),
        re.compile(rf"\b(?i:answer|option|choice)\b[*_]{{0,3}}{named}"),
        re.compile(rf"{alone}[\s*_)\]}}$.]{{0,8}}(?i:is\s{{1,8}}(?:the\s{{1,8}})?correct)\b"),
        re.compile(alone),
    )


def _mentions(folded: str, choice: str) -> bool:
    """Whether the choice's text occurs as whole words."""
    wanted = _folded(choice)
    if not wanted or len(wanted) > _MAX_TEXT:
        return False
    return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", folded) is not None
