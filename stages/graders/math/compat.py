"""The `compat` dialect of `math`: equal as strings in the form of the MATH data set, or equal by careful arithmetic.

The symbolic pass rewrites an answer to one line of plain arithmetic, splits it at its commas, and compares element by
element in order. Two fractions of integers must agree literally (6/8 is not 3/4: unreduced), an integer equals only an
integer as written, and brackets must be of the same kind. What is left goes to `arithmetic`, which knows numbers,
letters, roots and pi; anything else is equal as text only.
"""

from __future__ import annotations

import re

from stages.graders.math.arithmetic import NotArithmetic, equal_values
from stages.graders.math.hendrycks import math_style, untexted

_WORD = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_MARKS = re.compile(r"\\[%$!,;:]|\\ |[$%~]|\\left|\\right|\\displaystyle|\\limits|\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_LIST_WORD = re.compile(r"\s(?:or|and)\s")
_POWER_OF_TEN = (("million", "6"), ("billion", "9"), ("trillion", "12"))
_UNIT = re.compile(
    r"(?<![a-z\\])(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)"
    r"(?:es|s)?(?![a-z])(?:\s*\^\s*\{?[0-9]+\}?)?"
)
_SIMPLE_FRACTION = re.compile(r"\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", re.ASCII)
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_ROOT = re.compile(r"\\sqrt\s*\{([^{}]*)\}")
_BRACELESS_ROOT = re.compile(r"\\sqrt\s*([0-9a-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9a-z])\s*(?:([0-9a-z])|(?=\{))")
_MIXED = re.compile(r"(?<![\d./)])(\d+)\s+(\d+/\d+)(?![\d.(])", re.ASCII)
_ATOM = re.compile(r"(?<![a-z])\{([0-9]+|[a-z])\}")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_INTEGRAL = re.compile(r"(-?[0-9]+)\.0*")
_INTEGER = re.compile(r"-?[0-9]+")
_PLAIN_FRACTION = re.compile(r"-?[0-9]+/[0-9]+")
_SPELLINGS = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\cdot", "*"),
    ("\\times", "*"),
    ("\\div", "/"),
    ("\\pi", "pi"),
    ("\\{", "\x01"),  # a set's braces, kept apart from those that group
    ("\\}", "\x02"),
    ("**", "^"),
)
_OPEN, _CLOSE = "([\x01", ")]\x02"
_MAX_NESTING = 16


def compat_equal(answer: str, label: str) -> bool:
    """Whether two answers are equal in this dialect."""
    return same_text(answer, label) or same_value(answer, label)


def same_text(answer: str, label: str) -> bool:
    """Equal in the form of the MATH data set, after unwrapping \\text{}; units only at the end."""
    one, other = (math_style(untexted(text), strict_units=True) for text in (answer, label))
    return one == other


def same_value(answer: str, label: str) -> bool:
    """Equal element by element, as plain arithmetic."""
    given, wanted = plain_arithmetic(answer), plain_arithmetic(label)
    if not given or not wanted:
        return False
    if given == wanted:
        return True
    given_parts, wanted_parts = _elements(given), _elements(wanted)
    if len(given_parts) != len(wanted_parts):
        return False
    if len(wanted_parts) > 1 and _brackets(given) != _brackets(wanted):
        return False
    return all(_same_element(one, other) for one, other in zip(given_parts, wanted_parts, strict=True))


def plain_arithmetic(text: str) -> str:
    """An answer as one line of lower-case arithmetic without spaces; commands that it does not know stay in it."""
    text = untexted(text).lower().replace("{,}", ",")
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    text = _MARKS.sub(lambda found: "" if found[0] not in ("\\,", "\\;", "\\:", "\\ ", "~") else " ", text)
    text = _LIST_WORD.sub(", ", _WORD.sub(r" \1 ", text))
    for word, zeros in _POWER_OF_TEN:
        text = re.sub(rf"(?<![a-z]){word}(?![a-z])", f"*10^{zeros}", text)
    text = _UNIT.sub("", text).strip()
    text = _without_commands(text)
    text = _MIXED.sub(r"(\1+\2)", text)
    text = re.sub(r"\s+", "", text)
    text = _outer_braces_off(text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    integral = _INTEGRAL.fullmatch(text)
    return integral[1] if integral else text


def _without_commands(text: str) -> str:
    """Fractions and roots as arithmetic, from the inside out; then the braces that are left as round brackets."""
    text = _BRACELESS_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_FRACTION.sub(lambda found: rf"\frac{{{found[1]}}}" + (f"{{{found[2]}}}" if found[2] else ""), text)
    for _ in range(_MAX_NESTING):
        before = text
        text = _SIMPLE_FRACTION.sub(r" \1/\2", text)
        text = _FRACTION.sub(r"((\1)/(\2))", text)
        text = _ROOT.sub(r"sqrt(\1)", text)
        if text == before:
            break
        if len(text) > 8192:
            return text
    text = _ATOM.sub(r"\1", text)
    return text if "\\" in text else text.replace("{", "(").replace("}", ")")


def _outer_braces_off(text: str) -> str:
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:]:
        text = text[1:-1]
    return text


def _elements(text: str) -> list[str]:
    """The parts between the commas at the top, of a bracketed list inside its brackets."""
    inside = text[1:-1] if _is_bracketed(text) and "," in text else text
    parts, depth, start = [], 0, 0
    for position, character in enumerate(inside):
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(inside[start:position])
            start = position + 1
    parts.append(inside[start:])
    return parts if len(parts) > 1 else [text]


def _is_bracketed(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    if len(text) < 2 or text[0] not in _OPEN or text[-1] not in _CLOSE:
        return False
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0:
            return position == len(text) - 1
    return False


def _brackets(text: str) -> tuple[str, str]:
    return (text[0], text[-1]) if _is_bracketed(text) else ("", "")


def _same_element(given: str, wanted: str) -> bool:
    given, wanted = _integral(given), _integral(wanted)
    if given == wanted:
        return bool(given)
    if _PLAIN_FRACTION.fullmatch(given) and _PLAIN_FRACTION.fullmatch(wanted):
        return False
    if (_INTEGER.fullmatch(given) is None) != (_INTEGER.fullmatch(wanted) is None):
        return False
    try:
        return equal_values(given, wanted)
    except NotArithmetic:
        return False


def _integral(text: str) -> str:
    integral = _INTEGRAL.fullmatch(text)
    return integral[1] if integral else text
