"""The final answer of a response, as all graders of mathematics read it.

Text before the last `</think>` is reasoning and does not count; a thought that was never closed has no answer. The
answer is the last box and nothing else. It is compared as written (`math_strict`, `math_hendrycks`) or in one Unicode
form (`math`, `math_verify`): compatibility forms folded (NFKC), minus signs, dashes and multiplication signs in ASCII,
superscripts as powers, what cannot be seen removed.

Invariant: an answer has at most 1024 characters, of the last 100 000 of the response.
"""

from __future__ import annotations

import re
import unicodedata

from msgspec import Struct

from stages.graders.grade import EXTRACTED_CHARS as ANSWER_CHARS
from stages.graders.grade import Grade, clean
from stages.graders.math.boxed import TAIL_CHARS, Box, find_box

_OPEN, _CLOSE = "<think>", "</think>"


class Answer(Struct, frozen=True):
    """The box that counts, None without one. `oversize`: longer than the caps, so that there is no answer."""

    box: Box | None
    oversize: bool = False


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
        return Answer(None)
    box = find_box(text)
    if box is None:
        return Answer(None, oversize=len(text) > TAIL_CHARS)
    if len(box.content) > ANSWER_CHARS:
        return Answer(None, oversize=True)
    return Answer(box)


def verdict(correct: bool, answer: Answer, *, refused: bool = False) -> Grade:
    """1.0 or 0.0. Parts: `oversize`, and `refused` if only the text was compared, as the guards saw a danger."""
    shown = None if answer.box is None else clean(answer.box.content)
    parts = {"oversize": float(answer.oversize), "refused": float(refused)}
    return Grade(1.0 if correct else 0.0, correct, parts, shown)


_SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁱⁿ"
_SUBSCRIPT = "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎"
_RAISED = re.compile(f"[{_SUPERSCRIPT}]+")
_LOWERED = re.compile(f"[{_SUBSCRIPT}]+")
_FROM_RAISED = str.maketrans(_SUPERSCRIPT, "0123456789+-=()in")
_FROM_LOWERED = str.maketrans(_SUBSCRIPT, "0123456789+-=()")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")  # 1/2 and the like as one character
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
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
        text = _RAISED.sub(lambda found: "^{" + found[0].translate(_FROM_RAISED) + "}", text)
        text = _LOWERED.sub(lambda found: "_{" + found[0].translate(_FROM_LOWERED) + "}", text)
        text = _VULGAR.sub(_fraction, text)
        text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or ''}}}", text)
        text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)
    return "".join(character for character in text if _visible(character)).strip()


def _visible(character: str) -> bool:
    return character in "\t\n " or character.isprintable() or unicodedata.category(character) not in ("Cc", "Cf", "Cs")


def _fraction(found: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return rf"\frac{{{over}}}{{{under}}}"
