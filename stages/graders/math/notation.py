"""One spelling of an answer: what LaTeX offers several ways to write is written one way, and no meaning is dropped.

Spacing, sizes, fonts and mathematical delimiters go; thousands separators are closed up; short forms of commands get
their braces; exponent notation, periodic decimals and degrees inside of functions are written out. Words stay in
`\\text{}`, units and relations stay where they are. Pure functions of text, linear in its length.
"""

from __future__ import annotations

import re
from fractions import Fraction

_SPELLINGS = (
    *((rf"\{name}", r"\frac") for name in ("dfrac", "tfrac", "cfrac")),
    *((rf"\{name}", r"\binom") for name in ("dbinom", "tbinom")),
    *((rf"\{name}", r"\emptyset") for name in ("varnothing", "text{empty set}", "text{the empty set}")),
    ("\u2205", r"\emptyset"),
    (r"\lbrace", r"\{"),
    (r"\rbrace", r"\}"),
    (r"\langle", "("),
    (r"\rangle", ")"),
    (r"\degree", r"^\circ"),
    (r"\geqslant", r"\ge"),
    (r"\leqslant", r"\le"),
    (r"\lg", r"\log"),
    ("{:}", ":"),
    ("**", "^"),
)
_COMMAND_END = r"(?![A-Za-z])"
_SPELLED = [
    (re.compile(re.escape(old) + (_COMMAND_END if old[-1].isalpha() else "")), new.replace("\\", "\\\\"))
    for old, new in _SPELLINGS
]
_GAP = r"(?:\{,\}|,\\!|\{\\,\}|\\[,!;: ]|~)"
_SPACED_GROUPS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_GAP}\d{{3}})+(?!\d)", re.ASCII)
_COMMA_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)", re.ASCII)
_NOT_DIGITS = re.compile(r"\D", re.ASCII)
_SIZES = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|boldmath|color\{[a-z]*\})" + _COMMAND_END
)
_SPACES = re.compile(r"(?:\\[,;:> ]|\\q?quad(?![A-Za-z])|~|\s)+")
_DELIMITERS = re.compile(r"\\[()]|(?<!\\)\$|\\!|\\[\[\]](?![0-9])")
_FONT = re.compile(r"\\(?:mathbf|mathit|mathsf|mathtt|mathcal|boldsymbol|bm|textcolor\{[a-z]*\}|mathop)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox|operatorname\*?)\s*\{([^{}]*)\}")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "exp")
)
_PLAIN_WORD = re.compile(r"\s*(?:[A-Za-z]|\([A-Za-z]\)|[-+0-9., ]*[0-9][-+0-9., ]*)\s*")
_JOINED = re.compile(r"\s+(?:or|and)\s+|\s*,?\s*\\text\{\s*,?\s*(?:or|and)\s*\}\s*")
_SHORT = re.compile(r"\\(frac|binom)\s*(?:\{|(?P<over>[0-9A-Za-z]))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose" + _COMMAND_END + r"([^{}]*)\}")
_PERIODIC = re.compile(r"(?<![\d.])(\d{1,12})\.(\d{0,12})\\(?:overline|dot|bar)\s*\{(\d{1,12})\}", re.ASCII)
_SCIENTIFIC = re.compile(r"(?<![\dA-Za-z.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])", re.ASCII)
_CIRCLE = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ" + _COMMAND_END + ")")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)" + _COMMAND_END)
_IN_DEGREES = re.compile(r"(\d+(?:\.\d+)?|(?<![A-Za-z])[A-Za-z]|\\(?:alpha|beta|gamma|theta|phi|pi))\^\\circ", re.ASCII)
_TRAILING = re.compile(r"(?<![.\\])[.,;]\s*$|^\s*=")


def canonical(text: str, *, commas_group: bool = True) -> str:
    """The text in one spelling. `commas_group`: 1,234 outside of brackets is one number, and no list of two."""
    text = text.replace("\\\\", r"\cr " if r"\begin" in text else "\\").replace(r"\$", r"\dollar ")
    text = _SPACED_GROUPS.sub(lambda found: _NOT_DIGITS.sub("", found[0]), text)
    for pattern, new in _SPELLED:
        text = pattern.sub(new, text)
    text = _DELIMITERS.sub("", _SIZES.sub("", text).replace("{,}", ","))
    text = _JOINED.sub(", ", _FONT.sub(r"\1", _WORDS.sub(_word, text)))
    text = _CIRCLE.sub(r"^\\circ", _CHOOSE.sub(r"\\binom{\1}{\2}", text))
    text = _SPACES.sub(" ", text).strip()
    text = _TRAILING.sub("", text).strip()
    if commas_group:
        text = _grouped(text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _braced(text))
    text = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", _PERIODIC.sub(_periodic, text))
    if _ANGLE.search(text):
        text = _IN_DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    return text


def _word(found: re.Match[str]) -> str:
    """A word stays one; a letter, a number or a function in upright type is what it would be without."""
    inside = found[1]
    follows = found.string[: found.start()].rstrip()[-1:]
    unit = (follows.isdigit() or follows in ("}", ")")) and inside.strip() not in ("i", "e")
    if _PLAIN_WORD.fullmatch(inside) and not (unit and inside.strip().isalpha()):
        return inside
    if inside.strip() in _FUNCTIONS:
        return f"\\{inside.strip()} "
    return rf"\text{{{' '.join(inside.split())}}}" if inside.strip() else " "


def _grouped(text: str) -> str:
    """Thousands commas outside of round, square and set brackets closed up; braces that group are none."""
    pieces, start, depth = [], 0, 0
    for position, character in enumerate(text):
        escaped = text[position - 1 : position] == "\\"
        step = (character in "([" or (character == "{" and escaped)) - (
            character in ")]" or (character == "}" and escaped)
        )
        if step and depth in (0, 1):
            piece = text[start:position]
            pieces.append(piece if depth else _COMMA_GROUPS.sub(lambda found: found[0].replace(",", ""), piece))
            start = position
        depth = max(0, depth + step)
    piece = text[start:]
    pieces.append(piece if depth else _COMMA_GROUPS.sub(lambda found: found[0].replace(",", ""), piece))
    return "".join(pieces)


def _braced(text: str) -> str:
    """Fractions and binomials with both of their arguments in braces: \\frac12, \\frac{1}2, \\binom52."""
    position = 0
    while (found := _SHORT.search(text, position)) is not None:
        over_end = found.end() if found["over"] else _group_end(text, found.end() - 1)
        over = "{" + found["over"] + "}" if found["over"] else text[found.end() - 1 : over_end]
        rest = text[over_end:].lstrip()
        under = "{" + rest[0] + "}" if rest[:1].isalnum() else ""
        position = found.start() + len(found[1]) + 1 + (len(over) if found["over"] else 1)
        text = f"{text[: found.start()]}\\{found[1]}{over}{under}{rest[1:] if under else rest}"
    return text


def _group_end(text: str, start: int) -> int:
    """Behind the brace that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position + 1
    return len(text)


def _periodic(found: re.Match[str]) -> str:
    """A decimal with a period, as a fraction: 0.1(6) is 1/6."""
    whole, head, period = found[1], found[2], found[3]
    value = Fraction(int(whole + head + period) - int(whole + head), 10 ** len(head + period) - 10 ** len(head))
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"
