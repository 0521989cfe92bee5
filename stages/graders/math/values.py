"""Whether two expressions have one value, decided by numbers: exactly for fractions, else at fixed points to 30 digits.

latex2sympy2_extended reads LaTeX; decimals become fractions before, so that nothing is rounded, and a letter i is the
imaginary unit. Sums, products, integrals, limits and unknown functions are never worked out: each is a symbol of its
own, the same one for the same body and bounds whatever its running index is called. So a reordered sum is equal, and a
question repeated as an integral is no answer.

Invariant: for a grader process only, under a limit of processor time; sympy is imported when it is first needed.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from stages.graders.math.guards import MAX_PARSED_DEPTH, nesting

if TYPE_CHECKING:
    import sympy

_DIGITS = 40
_TOLERANCE = 1e-30  # relative
_NOTHING = 1e-60  # absolute: the rounding error of a zero that was evaluated with many digits
_POINTS = 4
_MAX_SYMBOLS = 16
_NAME = re.compile(r"[A-Za-z]+")
GREEK = frozenset(
    _NAME.findall(
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
        "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega pi ell"
    )
)
_KNOWN = GREEK | frozenset(  # commands that the parser reads as what they mean
    _NAME.findall(
        "frac sqrt binom cdot times div infty sum prod int lim to max min gcd lcm lfloor rfloor lceil rceil lvert "
        "rvert sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp det overline bar vec hat tilde"
    )
)
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_STRANGE = re.compile(
    r"['?@#&\"`:|<>=]|[A-Za-z]{4,}|[-+*/^]\s*[*/^]|[-+]{2}|(?<!_)\d\s+\d|\d_|[*/^+-]\s*$|[^\x00-\x7f]"
)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])", re.ASCII)
_MIXED = re.compile(
    r"(?<![\d.}/^_])(-?)(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}|(?<![\d.}/^_])(-?)(\d+)\s+(\d+)/(\d+)", re.ASCII
)
_ABSOLUTE = re.compile(r"\|([^|]*)\|")
_RUNNING = re.compile(r"_\{\s*[A-Za-z]\s*=")  # of a sum
_INTEGER = re.compile(r"[-+]?\d{1,400}", re.ASCII)
_BOUND = "bound_"


def is_formula(text: str) -> bool:
    """Whether a text has known commands alone and nothing that a parser would read as something else, or pass over."""
    if nesting(text) > MAX_PARSED_DEPTH:
        return False  # as text only: the parser's time grows with a power of the depth
    text = _RUNNING.sub("_{", text)
    known = all(command in _KNOWN for command in _COMMAND.findall(text))
    return known and _STRANGE.search(_COMMAND.sub("~", _MIXED.sub("1", _ABSOLUTE.sub(r"(\1)", text)))) is None


@lru_cache(maxsize=256)
def value_of(text: str) -> sympy.Expr | None:
    """The expression that a text means, None if it is none."""
    import sympy

    if _INTEGER.fullmatch(text):
        return sympy.Integer(int(text))
    if not is_formula(text):
        return None
    text = _MIXED.sub(_mixed, _ABSOLUTE.sub(r"\\lvert \1\\rvert ", text))
    text = _DECIMAL.sub(_as_fraction, text)
    try:
        expression = _library()(text)
        return _closed(expression, 0) if isinstance(expression, sympy.Expr) else None
    except Exception:  # the parser raises bare Exception, and sympy any kind, for a text that is no formula
        return None


def same_value(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Whether both have one value, at every point that was tried."""
    if one == other:
        return not one.has(*_undefined()[:2])
    if one.is_Rational and other.is_Rational:
        return False
    pairs = _evaluated(one, other)
    return bool(pairs) and all(_close(*pair) for pair in pairs)


def proportional(one: sympy.Expr, other: sympy.Expr, *, positive: bool) -> bool:
    """Whether one is the other times a constant that is not 0 (or is above 0): so are equations of one line."""
    import mpmath

    if not one.free_symbols or one.free_symbols != other.free_symbols:
        return False
    ratios = [(above, below) for above, below in _evaluated(one, other) if abs(below) > _NOTHING]
    if len(ratios) < 2:
        return False
    with mpmath.workdps(_DIGITS):
        first = ratios[0][0] / ratios[0][1]
        if abs(first) < _NOTHING or (positive and not (first.imag == 0 and first.real > 0)):
            return False
        return all(_close(above, below * first) for above, below in ratios)


def _evaluated(one: sympy.Expr, other: sympy.Expr) -> list[tuple[Any, Any]]:
    """Both values at each point where both have one; real ones alone, if there are at least two such points."""
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    if len(names) > _MAX_SYMBOLS:
        return []
    pairs = []
    for point in range(_POINTS if names else 1):
        position = {name: _coordinate(str(name), point) for name in names}
        values = [_number(expression, position) for expression in (one, other)]
        if None not in values:
            pairs.append((values[0], values[1]))
    real = [pair for pair in pairs if all(value.imag == 0 for value in pair)]
    return real if len(real) >= 2 else pairs


def _number(expression: sympy.Expr, position: dict[Any, sympy.Rational]) -> Any:
    import mpmath

    value = expression.evalf(_DIGITS, subs=position) if position else expression.evalf(_DIGITS)
    if not value.is_number or value.has(*_undefined()):
        return None
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        return None
    with mpmath.workdps(_DIGITS):
        return mpmath.mpc(real._to_mpmath(140), imaginary._to_mpmath(140))


def _close(one: Any, other: Any) -> bool:
    import mpmath

    with mpmath.workdps(_DIGITS):
        distance = abs(one - other)
        return bool(distance <= _NOTHING or distance <= _TOLERANCE * max(abs(one), abs(other)))


@lru_cache(maxsize=4096)
def _coordinate(name: str, point: int) -> sympy.Rational:
    """A fixed number between 0.2 and 2.2 for a symbol; below 0 at the third point, and for half of them at the last."""
    import sympy

    drawn = int.from_bytes(hashlib.blake2b(f"{name}/{point}".encode(), digest_size=8).digest(), "little")
    sign = -1 if point == 2 or (point == 3 and drawn & 1) else 1
    return sign * (sympy.Rational(1, 5) + sympy.Rational(drawn % 999_983, 499_979))


@lru_cache(maxsize=1)
def _undefined() -> tuple[Any, ...]:
    import sympy

    return sympy.nan, sympy.zoo, sympy.oo, -sympy.oo


@lru_cache(maxsize=1)
def _library() -> Any:
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    config = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
    return lambda text: latex2sympy(text, normalization_config=None, conversion_config=config)


def _closed(expression: sympy.Basic, depth: int) -> Any:
    """The expression with a symbol in the place of each sum, product, integral, limit and unknown function."""
    import sympy
    from sympy.core.function import AppliedUndef

    if isinstance(expression, sympy.Symbol):
        return sympy.I if expression.name == "i" else expression
    if isinstance(
        expression, sympy.concrete.expr_with_limits.ExprWithLimits | sympy.Limit | AppliedUndef | sympy.Derivative
    ):
        return sympy.Symbol(f"closed_{_fingerprint(expression, depth)}")
    if isinstance(expression, sympy.UnevaluatedExpr):
        return _closed(expression.args[0], depth)
    if not expression.args:
        return expression
    return expression.func(*(_closed(argument, depth) for argument in expression.args))


def _fingerprint(expression: sympy.Basic, depth: int) -> str:
    """A short text that is the same for bodies and bounds of one value. Running indices are numbered by depth."""
    import sympy

    pieces = [type(expression).__name__, str(getattr(expression, "name", ""))]
    renamed = expression
    if isinstance(expression, sympy.concrete.expr_with_limits.ExprWithLimits):
        for place, limits in enumerate(expression.limits):
            index = sympy.Symbol(f"{_BOUND}{depth}_{place}")
            pieces += [_print(bound, depth + 1) for bound in limits[1:]]
            renamed = renamed.replace(limits[0], index)
        body = renamed.function
    elif isinstance(expression, sympy.Limit):
        body = expression.args[0].subs(expression.args[1], sympy.Symbol(f"{_BOUND}{depth}"))
        pieces += [_print(expression.args[2], depth + 1), str(expression.args[3])]
    else:
        pieces += [_print(argument, depth + 1) for argument in expression.args[1:]]
        body = expression.args[0]
    pieces.append(_print(body, depth + 1))
    return hashlib.blake2b("/".join(pieces).encode(), digest_size=8).hexdigest()


def _print(expression: sympy.Basic, depth: int) -> str:
    """Values at two points with 20 digits, or the expression itself where it has none."""
    import sympy

    closed = _closed(expression, depth)
    if not isinstance(closed, sympy.Expr):
        return str(closed)
    names = sorted(closed.free_symbols, key=str)
    values = [_number(closed, {name: _coordinate(str(name), point) for name in names}) for point in (0, 1)]
    return str(closed) if None in values else " ".join(f"{value.real!s:.24} {value.imag!s:.24}" for value in values)


def _mixed(found: re.Match[str]) -> str:
    sign, whole, over, under = (found[1], found[2], found[3], found[4]) if found[2] else found.groups()[4:]
    return rf"{sign}({whole}+\frac{{{over}}}{{{under}}})"


def _as_fraction(found: re.Match[str]) -> str:
    return rf"(\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}})"
