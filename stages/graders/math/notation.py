"""One spelling of an answer, and a number apart from its unit.

`canonical`: what LaTeX offers several ways to write is written one way, and no meaning is dropped. Spacing, sizes,
fonts and mathematical delimiters go; thousands separators are closed up; short forms of commands get their braces;
exponent notation, periodic decimals and degrees inside of functions are written out. Words stay in `\\text{}`, units
and relations stay where they are. Its time is linear in the text.

`quantity`: 5 m is not 5 km, and 5 is right where the label is 5 cm. A unit follows a number as `\\text{}` or, after a
space, as known letters or words; a currency sign stands in front. Units are compared by name: nothing is converted,
except per cent, degrees and number words such as million.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate, groupby, islice
from operator import itemgetter

from msgspec import Struct

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
    (">=", r"\ge "),
    ("<=", r"\le "),
    (r"\lg", r"\log"),
    ("{:}", ":"),
    ("**", "^"),
)
_COMMAND_END = r"(?![A-Za-z])"
_SPELLED = [
    (re.compile(re.escape(old) + (_COMMAND_END if old[-1].isalpha() else "")), new.replace("\\", "\\\\"))
    for old, new in _SPELLINGS
]
_GAP = r"(?:\{,\}|,\\! ?|\{\\,\}|\\[,!;: ]|~)"
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
_JOINED = re.compile(r"(?:,\s*|\s+)(?:or|and)\s+|\s*,?\s*\\text\{\s*,?\s*(?:or|and)\s*\}\s*")
_SHORT = re.compile(r"\\(frac|binom)\s*(?:\{|(?P<over>[0-9A-Za-z]))")
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose" + _COMMAND_END + r"([^{}]*)\}")
_PERIODIC = re.compile(r"(?<![\d.])(\d{1,12})\.(\d{0,12})\\(?:overline|dot|bar)\s*\{(\d{1,12})\}", re.ASCII)
_SCIENTIFIC = re.compile(r"(?<![\dA-Za-z.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])", re.ASCII)
_CIRCLE = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ" + _COMMAND_END + ")")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)" + _COMMAND_END)
_IN_DEGREES = re.compile(r"(\d+(?:\.\d+)?|(?<![A-Za-z])[A-Za-z]|\\(?:alpha|beta|gamma|theta|phi|pi))\^\\circ", re.ASCII)
_TRAILING = re.compile(r"(?<![.\\])[.,;]\s*$|^\s*=")
PERCENT, DEGREE = "percent", "degree"


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
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", _braced(_rooted(text)))
    text = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", _PERIODIC.sub(_periodic, text))
    if _ANGLE.search(text):
        text = _IN_DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    return text


def _word(found: re.Match[str]) -> str:
    """A word stays a word; a letter, a number or a function in upright type loses that type."""
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
    depth, inside = 0, list[bool]()  # of each character
    for position, character in enumerate(text):
        escaped = text[position - 1 : position] == "\\"
        opens, closes = "([{" if escaped else "([", ")]}" if escaped else ")]"
        depth = max(0, depth + (character in opens) - (character in closes))
        inside.append(depth > 0)
    pieces: list[str] = []
    for enclosed, characters in groupby(zip(inside, text, strict=True), key=itemgetter(0)):
        piece = "".join(character for _, character in characters)
        pieces.append(piece if enclosed else _COMMA_GROUPS.sub(lambda found: found[0].replace(",", ""), piece))
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


def _rooted(text: str) -> str:
    """sqrt(2) as a command."""
    while (found := _PLAIN_ROOT.search(text)) is not None:
        end = _group_end(text, found.end() - 1, "()")
        if text[end - 1] != ")":
            break
        text = rf"{text[: found.start()]}\sqrt{{{text[found.end() : end - 1]}}}{text[end:]}"
    return text


def _group_end(text: str, start: int, pair: str = "{}") -> int:
    """Behind the brace that closes the one at `start`."""
    depths = accumulate((character == pair[0]) - (character == pair[1]) for character in islice(text, start, None))
    return next((start + place for place, depth in enumerate(depths, start=1) if depth == 0), len(text))


def _periodic(found: re.Match[str]) -> str:
    """A decimal with a period, as a fraction: 0.1(6) is 1/6."""
    whole, head, period = found[1], found[2], found[3]
    value = Fraction(int(whole + head + period) - int(whole + head), 10 ** len(head + period) - 10 ** len(head))
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


class Quantity(Struct, frozen=True):
    """What was measured, as text in one spelling, and in which unit; `unit` is empty without one."""

    core: str
    unit: str


_UNIT_NAMES = (
    "m: meter, metre; cm: centimeter, centimetre; mm: millimeter, millimetre; km: kilometer, kilometre, kms; "
    "ft: foot, feet; in: inch, inche; yd: yard, yds; mi: mile; s: second, sec, secs; min: minute, mins; "
    "h: hour, hr, hrs; g: gram; kg: kilogram, kgs; mg: milligram; lb: pound, lbs; oz: ounce; l: liter, litre; "
    f"ml: milliliter, millilitre; {PERCENT}: percentage, per cent; {DEGREE}: deg; rad: radian; dollar: usd, buck; "
    "degree c: celsius; degree f: fahrenheit"
)
_UNIT_LINES = (line.partition(": ") for line in _UNIT_NAMES.split("; "))
_SAME = {name: unit for unit, _, names in _UNIT_LINES for name in names.split(", ")}
_SYMBOLS = (
    *("m", "cm", "mm", "km", "ft", "in", "yd", "mi", "s", "min", "h", "g", "kg", "mg", "lb", "oz", "l", "ml"),
    *("hr", "hrs", "sec", "N", "J", "W", "V", "A", "K", "C", "F", "Hz", "Pa", "mol", "mph", "kph", "am", "pm", "rad"),
)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_DOZEN = "dozen"

_POWER = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_TEXT = rf"\\text\{{[^{{}}0-9]*\}}{_POWER}"
_BARE = rf"(?:(?:{'|'.join(_SYMBOLS)}|[A-Za-z]{{3,}}|[ap]\.m\.?){_POWER}(?![A-Za-z(]))"
_BESIDE = rf"(?<=[\d}})!%])\s+{_BARE}(?:\s+{_BARE}|\s*/\s*{_BARE})*"
_UNIT_TAIL = re.compile(
    rf"(?P<mark>\s*(?:\^\\circ\s*[CF]?|\\?%))?(?:(?P<bare>{_BESIDE})|(?:\s*(?:/|\\cdot)?\s*{_TEXT}(?:\s*/\s*{_BARE})?)*)\s*$"
)
_GLUED = re.compile(r"(?<=\d)\s*(?:cm|mm|km|kg|mg|ml|mph|am|pm|a\.m\.|p\.m\.)(?:\^\{?[23]\}?)?\s*$")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER = re.compile(r"[A-Za-z]")
_MOST_WORDS = 4
_NO_UNIT = frozenset(("or", "and", "not", "no", "is", "isn", "but", "maybe", "about", "than", "if", "else", "if", "to"))
_CURRENCY = re.compile(r"^\s*(-?)\s*(?:\\dollar\s?|([\u20ac\u00a3\u00a5]))")
_CURRENCIES = {"\u20ac": "euro", "\u00a3": "sterling", "\u00a5": "yen"}
_MEASURED = re.compile(r"[0-9]|\\pi|\\infty|\\sqrt|^\s*[A-Za-z]\s*$")
_UNTEXT = re.compile(r"\\text\{([^{}]*)\}")
_UNIT_WORD = re.compile(r"[a-z]+|\^-?\d|/|[^\sa-z^/0-9]")


def quantity(text: str) -> Quantity:
    """Split a text in canonical notation. Without a number in front there is no unit, and all of it is the core."""
    whole = text
    currency = _CURRENCY.match(text)
    if currency is not None:
        text = currency[1] + text[currency.end() :]
    found = _GLUED.search(text) or _UNIT_TAIL.search(text)
    core, tail = (text, "") if found is None else (text[: found.start()].strip(), text[found.start() :])
    words = _words(tail)
    in_letters = (
        found is not None and found.re is _UNIT_TAIL and found["bare"] and _LETTER.search(_COMMAND.sub("", core))
    )
    says_more = len(words) > _MOST_WORDS or not _NO_UNIT.isdisjoint(words)
    if not core or in_letters or says_more or not (_MEASURED.search(core) or currency):
        return Quantity(whole, "")
    for word in [word for word in words if word in _POWERS_OF_TEN or word == _DOZEN]:
        core = rf"({core})\cdot 12" if word == _DOZEN else rf"({core})\cdot 10^{{{_POWERS_OF_TEN[word]}}}"
        words.remove(word)
    if currency is not None:
        words = [_CURRENCIES.get(currency[2] or "", "dollar"), *(word for word in words if word != "dollar")]
    return Quantity(core, " ".join(words))


def _words(tail: str) -> list[str]:
    """The names of a unit in one form: no plurals, long names short, powers behind what they belong to."""
    text = _UNTEXT.sub(r" \1 ", tail).replace(r"^\circ", " degree ").replace("%", " percent ").replace("\\", " ")
    text = text.lower().replace("{", "").replace("}", "").replace("a.m.", "am").replace("p.m.", "pm").replace(".", "")
    text = text.replace("cdot", " ").replace("per cent", PERCENT).replace("^ ", "^")
    found: list[str] = []
    power = ""
    for word in _UNIT_WORD.findall(text):
        name = _name(word)
        if name in ("square", "sq", "cubic", "cu"):
            power = "^2" if name in ("square", "sq") else "^3"
            continue
        found.append("/" if name == "per" else name)
        if power:
            found.append(power)
            power = ""
    if found[:1] == [DEGREE] and found[1:2] in (["c"], ["f"], ["degree c"], ["degree f"]):
        return [f"degree {found[1][-1]}", *found[2:]]
    return found


def _name(word: str) -> str:
    single = word[:-1] if word.endswith("s") and len(word) > 3 and not word.endswith("ss") else word
    return _SAME.get(word) or _SAME.get(single) or single
