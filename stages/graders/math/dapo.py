"""`dapo`: the line behind the last `Answer:` near the end, as the DAPO recipe scores it (arXiv 2503.14476): +1 or -1.

Only the last 300 characters are looked at. The line is brought to a short form (units, degree and dollar signs,
articles and spaces dropped, what stands behind the last equation sign kept, text and boxes unwrapped, thousands commas
removed) and must then be the label: an integral number in digits, anything else in the same short form. No arithmetic:
34.0, `34.` and `**34` are not 34.

The grade's parts hold `acc` (0 or 1); its extracted answer is the short form that was compared.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal, InvalidOperation

from stages.graders.grade import EXTRACTED_CHARS, Grade, GradeRequest, clean

TAIL_CHARS = 300
WRONG = -1.0
_LABEL_CHARS = 1024
_MAX_EXPONENT = 30
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
# Longer words first, where one begins with another.
_WORDS = (
    "childrentickets",
    "students",
    "multiples",
    "integers",
    "minutes",
    "degrees",
    "dollars",
    "inches",
    "meters",
    "pounds",
    "points",
    "digits",
    "square",
    "cents",
    "edges",
    "hours",
    "meals",
    "units",
    "feet",
    "ways",
    "mph",
    "sue",
    "cm",
    "gm",
    "km",
)
_MARKS = (
    "\\ldots",
    "\\dots",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
)
_PIECES = (*_WORDS, *_MARKS, '"')
_TEXT = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
_MATH = re.compile(r"\$([^$]*)\$")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def grade_dapo(request: GradeRequest) -> Grade:
    """Score 1 if the answer line is the label, else -1."""
    line = answer_line(request.response)
    answer = None if line is None else short_form(line)
    correct = answer is not None and answer == label_form(request.label or "")
    shown = None if answer is None else clean(answer[:EXTRACTED_CHARS])
    return Grade(1.0 if correct else WRONG, correct, {"acc": float(correct)}, shown)


def answer_line(response: str) -> str | None:
    """What follows the last `Answer:`, to the end of that line; the line may begin below the colon."""
    lines = deque(_LINE.finditer(response[-TAIL_CHARS:]), maxlen=1)
    return lines[0][1].strip() or None if lines else None


def label_form(label: str) -> str:
    """The label as answers are compared with it: digits for an integral number, else its short form."""
    try:
        number = Decimal(label.strip())
    except InvalidOperation:
        return short_form(label[:_LABEL_CHARS])
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
    text = _unboxed(_TEXT.sub(r"\1", text))
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdecimal() else text


def _unboxed(text: str) -> str:
    """The content of the text's box, up to the last brace."""
    start = text.find("\\boxed{")
    end = text.rfind("}")
    return text if start < 0 or end < start else text[start + len("\\boxed{") : end]
