"""`gsm8k`, `gsm8k_flex` and `dapo`: the answer at the end of a response, within its last 300 characters.

`gsm8k` (Cobbe et al. 2021) takes the last `#### number`, `gsm8k_flex` the last number. Numbers are compared as decimals
after dropping thousands commas and dollar signs: 72.0 equals 72. A number in exponent notation is no answer, and after
the mark neither is a badly grouped number such as 1,00. A hyphen between digits is no sign. The label is the number
after its last `####`, else the label itself.

`dapo` takes the line behind the last `Answer:`, as the DAPO recipe scores it (arXiv 2503.14476): +1 or -1. The line is
brought to a short form (units, degree and dollar signs, articles and spaces dropped, the text behind the last equation
sign kept, text and boxes unwrapped, thousands commas removed) and must then be the label: an integral number in digits,
anything else in the same short form. No arithmetic: 34.0, `34.` and `**34` are not 34. The grade's parts hold `acc` (0
or 1); its extracted answer is the short form that was compared.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from stages.graders.grade import EXTRACTED_CHARS, Grade, GradeRequest, clean, failed, judged
from stages.graders.math.answer import last_box

TAIL_CHARS = 300
_LABEL_CHARS = 1024

# Possessive quantifiers keep the search linear; `_END` refuses a part of a number. Groups have none: in a group that is
# captured, Python before 3.11.4 leaves a possessive one behind text that it did not match.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++"
_SIGNED = rf"-?+(?:\$-?+)?(?:{_DIGITS})"
_END = r"(?![eE][+-]?[0-9])(?!,?[0-9])(?!\.[0-9])"
_MARKED = re.compile(rf"####\s*+(?P<number>{_SIGNED}){_END}")
_ANY = re.compile(
    rf"(?P<power>[0-9][0-9.,]*+[eE][+-]?[0-9]++)|(?P<number>(?:(?<![0-9A-Za-z.,)\]])-)?(?:\$-?+)?(?:{_DIGITS})){_END}"
)
_LABEL_MARK = "####"

# Full-width forms, minus signs and dashes, odd spaces and invisible characters; superscripts stay what they are.
_PLAIN = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", None)
)
WRONG = -1.0
_MAX_EXPONENT = 30
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
# Longer words first, where one begins with another.
_PIECES = (
    *("childrentickets", "students", "multiples", "integers", "minutes", "degrees", "dollars", "inches", "meters"),
    *("pounds", "points", "digits", "square", "cents", "edges", "hours", "meals", "units"),
    *("feet", "ways", "mph", "sue"),
    *("cm", "gm", "km", r"\ldots", r"\dots", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"'),
)
_TEXT = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
_MATH = re.compile(r"\$([^$]*)\$")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def marked_number(text: str) -> str | None:
    """The last `#### number` of a text."""
    return _last(_MARKED, text)


def last_number(text: str) -> str | None:
    """The last number of a text, None if there is none or if it is written with an exponent."""
    return _last(_ANY, text)


def label_number(label: str) -> Decimal | None:
    """The number that a label means, None if it is none."""
    label = label[-_LABEL_CHARS:]
    if _LABEL_MARK in label:
        label = label[label.rindex(_LABEL_MARK) :]
        text = marked_number(label)
    else:
        whole = _MARKED.fullmatch(_LABEL_MARK + _plain(label).strip())
        text = None if whole is None else whole["number"]
    return None if text is None else _decimal(text)


def grade_gsm8k(request: GradeRequest) -> Grade:
    """Score 1 if the last `#### number` is the label's number."""
    return _grade(marked_number(request.response[-TAIL_CHARS:]), request.label or "")


def grade_gsm8k_flex(request: GradeRequest) -> Grade:
    """Score 1 if the last number is the label's number."""
    return _grade(last_number(request.response[-TAIL_CHARS:]), request.label or "")


def _grade(answer: str | None, label: str) -> Grade:
    wanted = label_number(label)
    if wanted is None:
        shown = label if len(label) <= 80 else "..." + label[-77:]
        return failed(f"the label {shown!r} holds no number; gsm8k needs '#### number' or a plain number as the label")
    return judged(answer is not None and _decimal(answer) == wanted, answer)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = deque(pattern.finditer(_plain(text)), maxlen=1)
    number: str | None = found[0]["number"] if found else None
    return number


def _plain(text: str) -> str:
    return text if text.isascii() else text.translate(_PLAIN)


def _decimal(text: str) -> Decimal:
    negative = text.count("-") % 2 == 1
    value = Decimal(text.replace("-", "").replace("$", "").replace(",", ""))
    return -value if negative else value


def grade_dapo(request: GradeRequest) -> Grade:
    """Score 1 if the answer line is the label, else -1."""
    # What follows the last `Answer:`, to the end of that line; the line may begin below the colon.
    lines = deque(_LINE.finditer(request.response[-TAIL_CHARS:]), maxlen=1)
    line = lines[0][1].strip() if lines else ""
    answer = short_form(line) if line else None
    correct = answer is not None and answer == label_form(request.label or "")
    shown = None if answer is None else clean(answer[:EXTRACTED_CHARS])
    return Grade(1.0 if correct else WRONG, correct, {"acc": float(correct)}, shown)


def math_dapo_compute_score(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> dict[str, Any]:
    """slime's function of this name: score 1 or -1, `acc`, and `pred`, what was read. Strict: the last box of the last
    100 characters is the label, character by character."""
    pred = last_box(solution_str[-100:])
    correct = pred == ground_truth
    if not strict_box_verify:
        grade = grade_dapo(GradeRequest(grader="dapo", response=solution_str, label=ground_truth))
        pred, correct = grade.extracted, bool(grade.is_correct)
    return {"score": 1.0 if correct else WRONG, "acc": correct, "pred": pred}


def label_form(label: str) -> str:
    """The label as answers are compared with it: digits for an integral number, else its short form."""
    with suppress(InvalidOperation):
        number = Decimal(label.strip())
        if number.is_finite() and abs(number.adjusted()) <= _MAX_EXPONENT and number == number.to_integral_value():
            return str(int(number))
    return short_form(label[:_LABEL_CHARS])


def short_form(text: str) -> str:
    """The answer without what the recipe takes for decoration."""
    text = text.rpartition("=")[2]
    text = text.replace("an ", "").replace("a ", "").replace(".$", "$").replace("\\$", "").replace("\\ ", "")
    text = text.replace(" ", "").replace("mbox", "text").replace(",\\text{and}", ",").replace("\\text{and}", ",")
    text = text.replace("\\text{m}", "\\text{}")
    for piece in _PIECES:
        text = text.replace(piece, "")
    inline = _MATH.search(text)
    if inline:
        text = inline[1]
    text = _TEXT.sub(r"\1", text)
    start, end = text.find("\\boxed{"), text.rfind("}")
    if 0 <= start < end:  # the content of the box, up to the last brace
        text = text[start + len("\\boxed{") : end]
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdecimal() else text
