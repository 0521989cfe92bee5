"""`gsm8k` and `gsm8k_flex`: the final number of a grade-school problem (Cobbe et al. 2021).

The strict form takes the last `#### number` within the last 300 characters of the response, the flexible one the last
number there. Numbers are compared as decimals after dropping thousands commas and dollar signs: 72.0 equals 72. A
number in exponent notation is no answer, and after the mark neither is a badly grouped one such as 1,00. A hyphen
between digits is no sign. The label is the number after its last `####`, else the label itself.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal

from stages.graders.grade import Grade, GradeRequest, failed, judged

TAIL_CHARS = 300
_LABEL_CHARS = 1024

# Possessive quantifiers keep a failing match from being retried on parts of a number, and the search linear.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++"
_SIGNED = rf"-?+(?:\$-?+)?+(?:{_DIGITS})"
_END = r"(?![eE][+-]?[0-9])(?!,?[0-9])(?!\.[0-9])"
_MARKED = re.compile(rf"####\s*+(?P<number>{_SIGNED}){_END}")
_ANY = re.compile(
    rf"(?P<power>[0-9][0-9.,]*+[eE][+-]?[0-9]++)|(?P<number>(?:(?<![0-9A-Za-z.,)\]])-)?+(?:\$-?+)?+(?:{_DIGITS})){_END}"
)
_LABEL_MARK = "####"

# Full-width forms, minus signs and dashes, odd spaces and invisible characters; superscripts stay what they are.
_PLAIN = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", None)
)


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
