"""Whether two lines of plain arithmetic have the same value, decided by sympy.

Text becomes a sympy expression through Python's own parser and a walk over the few node types that arithmetic needs:
nothing is evaluated as code. Decimals are exact. Refused before sympy sees anything: more than two different letters,
exponents of two digits or in brackets, powers of powers.

Invariant: for a grader process only, as sympy may take long; sympy is imported when it is first needed.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy

_MAX_CHARS = 1024
_MAX_LETTERS = 2
_MAX_BITS = 4096  # of an integer power
_TOKEN = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<name>sqrt|pi|[a-z])|(?P<sign>[-+*/^()])")
_BAD_POWER = re.compile(r"\^\(|\^-?[0-9]{2}|\^-?[0-9a-z]\^|\^\^|\^-?[0-9]\.")
_SIGN_RUN = re.compile(r"[-+]{3}")


class NotArithmetic(ValueError):
    """A text that is no plain arithmetic, or more than the limits allow."""


def equal_values(given: str, wanted: str) -> bool:
    """Whether both have one value. Raises NotArithmetic."""
    import sympy

    letters = {name for text in (given, wanted) for name in _letters(text)}
    if len(letters) > _MAX_LETTERS:
        raise NotArithmetic(f"{len(letters)} different letters")
    one, other = (_expression(text) for text in (given, wanted))
    difference = one - other  # of quotients by zero it has no value, and is not 0
    if difference.is_number and (difference.is_Rational or difference.is_Float):
        return bool(difference == 0)
    return bool(sympy.simplify(difference) == 0)


def _letters(text: str) -> set[str]:
    return {found["name"] for found in _TOKEN.finditer(text) if found["name"] not in (None, "sqrt", "pi")}


def _expression(text: str) -> sympy.Expr:
    if len(text) > _MAX_CHARS or _BAD_POWER.search(text) or _SIGN_RUN.search(text):
        raise NotArithmetic("a power or a length that is not allowed")
    try:
        tree = ast.parse(_python(text), mode="eval")
        return _value(tree.body)
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
        case ast.BinOp(left=left, op=operator, right=right):
            return _binary(_value(left), operator, _value(right))
    raise NotArithmetic("something that is no arithmetic")


def _binary(left: sympy.Expr, operator: ast.operator, right: sympy.Expr) -> sympy.Expr:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Pow():
            return _power(left, right)
    raise NotArithmetic("an operator that is no arithmetic")


def _power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """A power whose size is known beforehand."""
    if exponent.is_Integer and base.is_Rational:
        if max(int(base.p).bit_length(), int(base.q).bit_length()) * abs(int(exponent)) > _MAX_BITS:
            raise NotArithmetic("a power of too many digits")
    elif base.is_Pow and not base.is_Atom and base.free_symbols and exponent.is_Integer and abs(int(exponent)) > 9:
        raise NotArithmetic("a power of a power")
    return base**exponent
