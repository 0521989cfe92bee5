"""A number and its unit, taken apart, so that 5 m is not 5 km and 5 is right where 5 cm was asked for.

A unit is what follows a number as `\\text{}` or, after a space, as known letters or words; a currency sign stands in
front. Units are compared by name: nothing is converted, except per cent, degrees and number words such as million.
"""

from __future__ import annotations

import re

from msgspec import Struct

PERCENT, DEGREE = "percent", "degree"


class Quantity(Struct, frozen=True):
    """What was measured, as text in one spelling, and in which unit; `unit` is empty without one."""

    core: str
    unit: str


_SAME = {
    **dict.fromkeys(("meter", "metre"), "m"),
    **dict.fromkeys(("centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("millimeter", "millimetre"), "mm"),
    **dict.fromkeys(("kilometer", "kilometre", "kms"), "km"),
    **dict.fromkeys(("foot", "feet"), "ft"),
    **dict.fromkeys(("inch", "inche"), "in"),
    **dict.fromkeys(("yard", "yds"), "yd"),
    **dict.fromkeys(("mile",), "mi"),
    **dict.fromkeys(("second", "sec", "secs"), "s"),
    **dict.fromkeys(("minute", "mins"), "min"),
    **dict.fromkeys(("hour", "hr", "hrs"), "h"),
    **dict.fromkeys(("gram",), "g"),
    **dict.fromkeys(("kilogram", "kgs"), "kg"),
    **dict.fromkeys(("milligram",), "mg"),
    **dict.fromkeys(("pound", "lbs"), "lb"),
    **dict.fromkeys(("ounce",), "oz"),
    **dict.fromkeys(("liter", "litre"), "l"),
    **dict.fromkeys(("milliliter", "millilitre"), "ml"),
    **dict.fromkeys(("percentage", "per cent"), PERCENT),
    **dict.fromkeys(("deg",), DEGREE),
    **dict.fromkeys(("radian",), "rad"),
    **dict.fromkeys(("usd", "buck"), "dollar"),
    **dict.fromkeys(("celsius",), "degree c"),
    **dict.fromkeys(("fahrenheit",), "degree f"),
}
_SHORT = (
    *("m", "cm", "mm", "km", "ft", "in", "yd", "mi", "s", "min", "h", "g", "kg", "mg", "lb", "oz", "l", "ml"),
    *("hr", "hrs", "sec", "N", "J", "W", "V", "A", "K", "C", "F", "Hz", "Pa", "mol", "mph", "kph", "am", "pm", "rad"),
)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_DOZEN = "dozen"

_POWER = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_TEXT = rf"\\text\{{[^{{}}0-9]*\}}{_POWER}"
_BARE = rf"(?:(?:{'|'.join(_SHORT)}|[A-Za-z]{{3,}}|[ap]\.m\.?){_POWER}(?![A-Za-z(]))"
_BESIDE = rf"(?<=[\d}})!%])\s+{_BARE}(?:\s+{_BARE}|\s*/\s*{_BARE})*"
_TRAILING = re.compile(
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
    found = _GLUED.search(text) or _TRAILING.search(text)
    core, tail = (text, "") if found is None else (text[: found.start()].strip(), text[found.start() :])
    words = _words(tail)
    in_letters = (
        found is not None and found.re is _TRAILING and found["bare"] and _LETTER.search(_COMMAND.sub("", core))
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
