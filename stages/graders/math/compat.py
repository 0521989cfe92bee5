"""The `compat` dialect of `math`: equal as strings in the form of the MATH data set, or equal by careful arithmetic.

The symbolic pass rewrites an answer to one line of plain arithmetic, splits it at its commas, and compares element by
element in order. Two fractions of integers must agree literally (6/8 is not 3/4: unreduced), an integer equals only an
integer as written, and brackets must be of the same kind. Whatever is no arithmetic is equal as text only.

`equal_values` turns text into a sympy expression through Python's own parser and a walk over the few node types that
arithmetic needs: nothing is evaluated as code. Decimals are exact. Refused before sympy sees anything: more than two
different letters, exponents of two digits or in brackets, powers of powers.

Invariant: for a grader process only, as sympy may take long; sympy is imported when it is first needed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from stages.graders.math.answer import math_style, untexted

if TYPE_CHECKING:
    import sympy

_MAX_CHARS = 1024
_MAX_LETTERS = 2
_MAX_BITS = 4096  # of an integer power
_TOKEN = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<name>sqrt|pi|[a-z])|(?P<sign>[-+*/^()])")
_BAD_POWER = re.compile(r"\^\(|\^-?[0-9]{2}|\^-?[0-9a-z]\^|\^\^|\^-?[0-9]\.")
_SIGN_RUN = re.compile(r"[-+]{3}")
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
    *((rf"\{name}", r"\frac") for name in ("dfrac", "tfrac", "cfrac")),
    *((r"\cdot", "*"), (r"\times", "*"), (r"\div", "/"), (r"\pi", "pi"), ("**", "^")),
    *((r"\{", "\x01"), (r"\}", "\x02")),  # a set's braces, kept apart from braces that group
)
_OPEN, _CLOSE = "([\x01", ")]\x02"
_MAX_NESTING = 16


class NotArithmetic(ValueError):
    """A text that is no plain arithmetic, or more than the limits allow."""


def equal_values(given: str, wanted: str) -> bool:
    """Whether both have one value. Raises NotArithmetic."""
    import sympy

    found = (match["name"] for text in (given, wanted) for match in _TOKEN.finditer(text))
    letters = {name for name in found if name not in (None, "sqrt", "pi")}
    if len(letters) > _MAX_LETTERS:
        raise NotArithmetic(f"{len(letters)} different letters")
    difference = _expression(given) - _expression(wanted)  # of quotients by zero it has no value, and is not 0
    if difference.is_number and (difference.is_Rational or difference.is_Float):
        return bool(difference == 0)
    return bool(sympy.simplify(difference) == 0)


def _expression(text: str) -> sympy.Expr:
    if len(text) > _MAX_CHARS or _BAD_POWER.search(text) or _SIGN_RUN.search(text):
        raise NotArithmetic("a power or a length that is not allowed")
    try:
        return _value(ast.parse(_python(text), mode="eval").body)
    except (SyntaxError, RecursionError) as error:
        raise NotArithmetic(str(error)) from None


def _python(text: str) -> str:
    """The line with its implied products written out."""
    pieces: list[str] = []
    position = 0
    ended = False  # whether an operand ended just before
    last = ""
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise NotArithmetic(f"{text[position]!r} in it")
        token, kind = found[0], found.lastgroup
        position = found.end()
        if ended and (token == "(" or kind in ("name", "number")):
            if kind == "number" and last != ")":
                raise NotArithmetic("a number right after a number or a letter")
            pieces.append("*")
        if last == "sqrt" and token != "(":
            raise NotArithmetic("a root of nothing")
        pieces.append("**" if token == "^" else f"'{token}'" if kind == "number" else token)
        ended = token == ")" or kind == "number" or (kind == "name" and token != "sqrt")
        last = token
    return "".join(pieces)


def _value(node: ast.expr) -> sympy.Expr:
    """The expression of a syntax tree; numbers come as text, so that decimals stay exact."""
    import sympy

    match node:
        case ast.Constant(value=str() as number):
            return sympy.Rational(number)
        case ast.Name(id="pi"):
            return sympy.pi
        case ast.Name(id=name) if len(name) == 1:
            return sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument], keywords=[]):
            return sympy.sqrt(_value(argument))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(left), _value(right))
    raise NotArithmetic("something that is no arithmetic")


def _power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """A power whose size is known beforehand."""
    if exponent.is_Integer and base.is_Rational:
        if max(int(base.p).bit_length(), int(base.q).bit_length()) * abs(int(exponent)) > _MAX_BITS:
            raise NotArithmetic("a power of too many digits")
    elif base.is_Pow and not base.is_Atom and base.free_symbols and exponent.is_Integer and abs(int(exponent)) > 9:
        raise NotArithmetic("a power of a power")
    return base**exponent


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}


def compat_equal(answer: str, label: str) -> bool:
    """Whether two answers are equal in this dialect."""
    # In the form of the MATH data set, after unwrapping \\text{}; units only at the end.
    given, wanted = (math_style(untexted(text), strict_units=True) for text in (answer, label))
    return given == wanted or same_value(answer, label)


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
    while text.startswith("{") and text.endswith("}") and "{" not in text[1:]:
        text = text[1:-1]
    return _integral(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)


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


def _elements(text: str) -> list[str]:
    """The parts between the commas at the top, of a bracketed list inside its brackets."""
    inside = text[1:-1] if _is_bracketed(text) and "," in text else text
    commas = [place for place, depth in enumerate(_depths(inside)) if depth == 0 and inside[place] == ","]
    parts = [inside[start + 1 : end] for start, end in pairwise([-1, *commas, len(inside)])]
    return parts if len(parts) > 1 else [text]


def _is_bracketed(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    if len(text) < 2 or text[0] not in _OPEN or text[-1] not in _CLOSE:
        return False
    return next((position for position, depth in enumerate(_depths(text)) if depth == 0), -1) == len(text) - 1


def _depths(text: str) -> Iterator[int]:
    """In how many brackets each character stands; one that opens counts as inside, one that closes as outside."""
    return accumulate((character in _OPEN) - (character in _CLOSE) for character in text)


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
