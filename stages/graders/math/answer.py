"""The final answer of a response, as all graders of mathematics read it, and its text in one form.

Text before the last `</think>` is reasoning and does not count; a thought that was never closed has no answer. The
answer is the last \\boxed{...} or \\fbox{...} and nothing else, also when that box is broken: an answer that was cut
off is no answer. `math_strict` compares it as written, `math_hendrycks` in the form of the MATH data set
(`math_style`), `math` and `math_verify` in one Unicode form (`plain_form`).

`math_style` is the normalisation of Hendrycks et al. 2021 (arXiv 2103.03874): spellings of fractions, roots, units and
spacing, one equation sign, no arithmetic. Its scores are comparable with published scores only as long as the rules
stay as they are, oddities included.

Invariant: an answer has at most 1024 characters, of the last 100 000 of the response.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final, Literal

from msgspec import Struct

from stages.graders.grade import EXTRACTED_CHARS as ANSWER_CHARS
from stages.graders.grade import Grade, clean

TAIL_CHARS = 100_000
_COMMANDS: tuple[Literal["\\boxed"], Literal["\\fbox"]] = ("\\boxed", "\\fbox")
_SPACE = re.compile(r"\s*")
_EMPTY = re.compile(r"\s*\\(?:boxed|fbox)\s*\{\s*\}\s*")
_BARE = re.compile(r"[^\s$]+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character
_OPEN, _CLOSE = "<think>", "</think>"
_DROPPED = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%")
_ROOT = re.compile(r"\\sqrt(?=[^{])(.)", re.DOTALL)
_FRACTION = re.compile(r"\\frac(?:(?P<over>[^{\s])(?P<under>[^{\s])|(?P<over_short>[^{\s])(?P<under_braced>\{))")
_SLASH = re.compile(r"(?P<over>-?\d+)/(?P<under>-?\d+)", re.ASCII)
_UNIT = re.compile(
    r"\\text\{ (?!\s*(?:or|and|hundred|thousand|million|billion|trillion)\b)[^{}]*\}(?:\^\{?[0-9]\}?)?\s*$"
)
_TEXT = re.compile(r"\\text\{(?P<inside>[^{}]+)\}")


class Answer(Struct, frozen=True):
    """The box that counts. `oversize`: longer than the caps, so that there is no answer."""

    content: str | None = None  # trimmed, not empty; None without a box
    command: Literal["\\boxed", "\\fbox"] = "\\boxed"
    oversize: bool = False


NO_ANSWER: Final = Answer()


def find_box(text: str) -> Answer:
    """The last box; no content without one, or if it is empty or not closed.

    `\\boxed x` (without braces) gives the token up to a space or a dollar sign. Looks at the last 100 000 characters.
    """
    text = text[-TAIL_CHARS:]
    start, command = max(((text.rfind(name), name) for name in _COMMANDS), key=lambda found: found[0])
    if start < 0:
        return NO_ANSWER
    after = start + len(command)
    inner = _SPACE.match(text, after)
    position = inner.end() if inner is not None else after
    if position < len(text) and text[position] == "{":
        content = _in_braces(text, position)
    elif text[after : after + 1].isalpha():
        return NO_ANSWER  # \boxedfoo is another command
    else:
        bare = _BARE.match(text, position)
        content = bare.group() if bare is not None else None
    return Answer((content or "").strip() or None, command)


def last_box(text: str) -> str | None:
    """Content of the last box, trimmed; None without a box, or if it is empty or not closed."""
    return find_box(text).content


def unboxed(label: str) -> str:
    """A label that is itself boxed, unboxed once; a box with nothing in it is an empty label."""
    inner = last_box(label)
    if inner is not None:
        return inner
    return "" if _EMPTY.fullmatch(label) else label.strip()


def _in_braces(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and the one that closes it; escaped braces do not count."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0:
            return text[start + 1 : found.start()]
    return None


def after_thought(response: str) -> str | None:
    """The text after the last `</think>`, all of it without that tag; None if a thought is still open at the end."""
    closed = response.rfind(_CLOSE)
    if response.rfind(_OPEN) > closed:
        return None
    return response if closed < 0 else response[closed + len(_CLOSE) :]


def find_answer(response: str) -> Answer:
    """The last box after the reasoning."""
    text = after_thought(response)
    if text is None:
        return NO_ANSWER
    found = find_box(text)
    oversize = len(text) > TAIL_CHARS if found.content is None else len(found.content) > ANSWER_CHARS
    return Answer(oversize=True) if oversize else found


def verdict(correct: bool, answer: Answer, *, refused: bool = False) -> Grade:
    """1.0 or 0.0. Parts: `oversize`, and `refused` if only the text was compared, as the guards saw a danger."""
    shown = None if answer.content is None else clean(answer.content)
    parts = {"oversize": float(answer.oversize), "refused": float(refused)}
    return Grade(1.0 if correct else 0.0, correct, parts, shown)


_SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁱⁿ"
_SUBSCRIPT = "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎"
_RAISED = re.compile(f"[{_SUPERSCRIPT}]+")
_LOWERED = re.compile(f"[{_SUBSCRIPT}]+")
_FROM_RAISED = str.maketrans(_SUPERSCRIPT, "0123456789+-=()in")
_FROM_LOWERED = str.maketrans(_SUBSCRIPT, "0123456789+-=()")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")  # 1/2 and the like as one character
_ROOT_SIGN = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
_THIN_SPACE = re.compile("(?<=[0-9])[\u2009\u202f\u00a0](?=[0-9]{3}(?![0-9]))")  # between groups of digits
_SIGNS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("×·⋅∙", "*")
    | {"÷": "/", "\u2044": "/", "\u2215": "/", "∶": ":", "′": "'"}
    | {"π": r"\pi ", "∞": r"\infty ", "°": r"^{\circ}", "∪": r"\cup ", "∩": r"\cap ", "±": r"\pm "}
    | {"≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq "}
)


def plain_form(text: str) -> str:
    """The text in one Unicode form, without control and invisible characters; trimmed."""
    if not text.isascii():
        text = _THIN_SPACE.sub(r"\\,", text)
        text = _RAISED.sub(lambda found: "^{" + found[0].translate(_FROM_RAISED) + "}", text)
        text = _LOWERED.sub(lambda found: "_{" + found[0].translate(_FROM_LOWERED) + "}", text)
        text = _VULGAR.sub(_fraction, text)
        text = _ROOT_SIGN.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or ''}}}", text)
        text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)
    hidden = ("Cc", "Cf", "Cs")
    visible = (c for c in text if c in "\t\n " or c.isprintable() or unicodedata.category(c) not in hidden)
    return "".join(visible).strip()


def _fraction(found: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return rf"\frac{{{over}}}{{{under}}}"


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
