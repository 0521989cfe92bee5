"""The tool `calculator`: exact arithmetic on expressions of the model: + - * / // % ** and parentheses.

The text is parsed to a syntax tree. Each node is checked against a list of allowed nodes and computed here, so the
interpreter never evaluates the text. Numbers are rational: 0.1 + 0.2 is 0.3 and 1 / 3 * 3 is 1. Only powers with a
fractional exponent are floats. Operations whose result would exceed 4096 bits are refused beforehand, so the length of
the text bounds the time.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from stages.tools.tool import Arguments, TextTool, ToolCallError

MAX_CHARS = 1000
MAX_DEPTH = 64
MAX_BITS = 4096
_DIGITS = 15  # significant digits of a number without a finite decimal form
_DECIMALS = 30  # longest decimal fraction that is written in full

Number = Fraction | float
_REPLACED = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "\u00a0": " "})


def evaluate(expression: str) -> str:
    """The value of an arithmetic expression as text. Raises ToolCallError with a text for the model."""
    text = expression.translate(_REPLACED).strip()
    if not text:
        raise ToolCallError("the expression is empty")
    if len(text) > MAX_CHARS:
        raise ToolCallError(f"the expression is longer than {MAX_CHARS} characters")
    try:
        # The parentheses allow line breaks, which would end the expression otherwise.
        tree = ast.parse(" ".join(text.split()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolCallError("the expression is not valid arithmetic") from None
    return format_number(_value(tree.body, 0))


def format_number(value: Number) -> str:
    """Integers as integers, finite decimals exactly, the rest with 15 significant digits."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.{_DIGITS}g}"
    if value.denominator == 1:
        return str(value.numerator)
    decimals = _finite_decimals(value.denominator)
    if decimals is None:
        return _rounded(value)
    digits = str(abs(value.numerator) * 10**decimals // value.denominator).rjust(decimals + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-decimals]}.{digits[-decimals:]}"


def _finite_decimals(denominator: int) -> int | None:
    """Number of decimals of a fraction with this denominator; None if it is infinite or too long."""
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0 and fives <= _DECIMALS:
        rest //= 5
        fives += 1
    decimals = max(twos, fives)
    return decimals if rest == 1 and decimals <= _DECIMALS else None


def _rounded(value: Fraction) -> str:
    try:
        number = value.numerator / value.denominator
    except OverflowError:
        return str(round(value))  # beyond a float's range, where the fraction is irrelevant
    if number == 0.0:
        raise ToolCallError("the result is too close to zero")
    return f"{number:.{_DIGITS}g}"


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolCallError(f"the expression is nested deeper than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _literal(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            first, second = _value(left, depth + 1), _value(right, depth + 1)
            if isinstance(first, float) or isinstance(second, float):
                first, second = _float(first), _float(second)
            if second == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
                raise ToolCallError("division by zero")
            value = _OPERATIONS[type(op)](first, second)
            return _finite(value) if isinstance(value, float) else _bounded(Fraction(value))
    raise ToolCallError(_refusal(node))


def _literal(number: int | float) -> Fraction:
    if isinstance(number, float) and not math.isfinite(number):
        raise ToolCallError("a number in the expression is too large")
    return _bounded(Fraction(repr(number)))  # the decimal as written, not the nearest float


def _refusal(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        return "^ is not an operator here; write ** for a power"
    if isinstance(node, ast.Tuple):
        return "a comma is not allowed; write numbers without thousands separators"
    return "only numbers, + - * / // % ** and parentheses are allowed"


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ToolCallError("a number in the expression is too large")
    return value


def _float(value: Number) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ToolCallError("a number in the expression is too large") from None


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ToolCallError("the result is too large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if base == 0 and exponent < 0:
        raise ToolCallError("division by zero")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        if abs(base) != 1 and base != 0 and _bits(base) * abs(exponent.numerator) > 2 * MAX_BITS:
            raise ToolCallError("the power is too large")
        if abs(exponent.numerator) > MAX_BITS and base != 0:
            return Fraction(1) if base == 1 or exponent.numerator % 2 == 0 else Fraction(-1)
        return Fraction(base**exponent.numerator)
    if base < 0:
        raise ToolCallError("a negative number has no real power with a fractional exponent")
    try:
        return _finite(_float(base) ** _float(exponent))
    except OverflowError:
        raise ToolCallError("the power is too large") from None


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


class Calculator(TextTool):
    """Computes arithmetic expressions exactly; takes `{"expression": ...}` or the bare expression."""

    def __init__(self) -> None:
        description = "Compute an arithmetic expression with numbers, + - * / // % ** and parentheses."
        super().__init__("calculator", description, "expression", "the expression, for example (3 + 4) * 2", _evaluated)

    async def call(self, arguments: Arguments) -> str:
        """The value as text. Raises ToolCallError with a text for the model."""
        number = None if isinstance(arguments, str) else arguments.get("expression")
        given = isinstance(number, int | float) and not isinstance(number, bool)
        return await super().call(str(number) if given else arguments)


async def _evaluated(expression: str) -> str:
    return evaluate(expression)
