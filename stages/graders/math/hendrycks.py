"""String forms in which two spellings of a mathematical answer become the same text.

`math_style` is the normalisation of the MATH data set (Hendrycks et al. 2021, arXiv 2103.03874): spellings of
fractions, roots, units and spacing, one equation sign, no arithmetic. It is a compatibility dialect: its scores are
comparable with published ones only as long as the rules stay as they are, oddities included.
"""

from __future__ import annotations

import re

_DROPPED = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%")
_ROOT = re.compile(r"\\sqrt(?=[^{])(.)", re.DOTALL)
_FRACTION = re.compile(r"\\frac(?:(?P<over>[^{\s])(?P<under>[^{\s])|(?P<over_short>[^{\s])(?P<under_braced>\{))")
_SLASH = re.compile(r"(?P<over>-?\d+)/(?P<under>-?\d+)", re.ASCII)
_UNIT = re.compile(
    r"\\text\{ (?!\s*(?:or|and|hundred|thousand|million|billion|trillion)\b)[^{}]*\}(?:\^\{?[0-9]\}?)?\s*$"
)
_TEXT = re.compile(r"\\text\{(?P<inside>[^{}]+)\}")


def math_style(text: str, *, strict_units: bool = False) -> str:
    """The answer in the form of the MATH data set.

    The data set's rule takes everything from `\\text{ ` on for a unit, also in `5 \\text{ or } 4`. With `strict_units`
    only a text at the very end is one, and neither a number word nor a list word.
    """
    text = text.replace("\\\\", "\\")
    for spelling in ("\\tfrac", "\\dfrac"):
        text = text.replace(spelling, "\\frac")
    for piece in _DROPPED:
        text = text.replace(piece, "")
    text = _UNIT.sub("", text) if strict_units else text.partition("\\text{ ")[0]
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = text.replace(" ", "")
    text = _FRACTION.sub(_braced, text)
    if text == "0.5":
        return "\\frac{1}{2}"
    slash = _SLASH.fullmatch(text)
    return f"\\frac{{{slash['over']}}}{{{slash['under']}}}" if slash else text


def untexted(text: str) -> str:
    """An answer that is wholly inside \\text{}, without it."""
    text = text.strip()
    whole = _TEXT.fullmatch(text)
    return whole["inside"].strip() if whole else text


def _braced(found: re.Match[str]) -> str:
    if found["over"] is not None:
        return f"\\frac{{{found['over']}}}{{{found['under']}}}"
    return f"\\frac{{{found['over_short']}}}{{"
