"""What an expression could cost, from its text alone: a look before sympy gets it.

A symbolic engine evaluates 10^{10^{10}} or (10^7)! before any question about it can be answered. The scan below bounds
how many digits the numbers of a text can have, taking every operator for a product, and refuses what exceeds the
limits. It parses no mathematics: a text that passes may still be nonsense, or take long, for which processes have a
deadline.

Invariants: one pass, linear in the text; recursion no deeper than the nesting limit, which is checked first.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate

import msgspec
from msgspec import Struct

MAX_CHARS = 2048
MAX_DEPTH = 64  # of brackets
MAX_PARSED_DEPTH = 12  # of brackets, for a LaTeX parser whose time grows with a power of the depth
MAX_POWERS = 2  # of ^ above each other
MAX_EXPONENT = 9_999
MAX_DIGITS = 20_000  # of any number that the text can mean
MAX_FACTORIAL = 1_000
MAX_TERMS = 500  # that the text could have when its brackets with letters are multiplied out
MAX_LETTERS = 64  # in a row: a word, which a parser takes for a product
MAX_OPERATORS = 100  # signs in a row

_TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:[.,][0-9]+)*|\.[0-9]+)|(?P<open>\\?[({\[])|(?P<close>\\?[)}\]])"
    r"|(?P<command>\\(?:[A-Za-z]+|.))|(?P<power>\*\*|\^)|(?P<factorial>!)|(?P<space>\s+)"
    r"|(?P<letter>[^\W\d_])|(?P<other>.)",
    re.DOTALL,
)
_EXPONENT_NOTATION = re.compile(r"[0-9.][eE][+-]?[0-9]{4}")
_LONG_WORD = re.compile(rf"[^\W\d_]{{{MAX_LETTERS}}}")
_LONG_RUN = re.compile(rf"[-+!'|_]{{{MAX_OPERATORS}}}")
# Sums, products, integrals and the like, and functions that would be worked out.
_EVALUATED = frozenset(
    "\\" + name
    for name in (
        *("sum", "prod", "coprod", "int", "iint", "iiint", "oint", "lim", "limsup", "liminf"),
        *("bigcup", "bigcap", "Gamma", "zeta"),
    )
)
_BINOMIALS = frozenset(("\\binom", "\\dbinom", "\\tbinom", "\\choose"))
_TRANSPARENT = frozenset(("\\left", "\\right", "\\,", "\\!", "\\;", "\\:", "\\ ", "\\displaystyle", "\\limits"))
_GROWING = frozenset(("\\exp", "\\sinh", "\\cosh", "\\tanh", "\\coth", "\\sech", "\\csch"))  # as powers of e do
_FRACTIONS = frozenset(("\\frac", "\\dfrac", "\\tfrac", "\\cfrac"))
# Closing signs that look like opening ones, or close what a command opened: everything before them may be in brackets.
_DELIMITERS = frozenset(("|", "\\|", "\\vert", "\\rvert", "\\Vert", "\\rVert", "\\rfloor", "\\rceil", "\\rangle"))


class _Refused(Exception):
    """The text could cost too much; the message is the reason."""


class _Bound(Struct):
    """What a piece of text can mean at most."""

    digits: float = 0.0  # of the largest number in it, at least log10
    powers: int = 0  # of ^ above each other
    letters: int = 0  # how many
    terms: float = 1.0  # when its powers of brackets with letters are multiplied out
    group: bool = False  # something in brackets
    closes: bool = False  # a sign that closes what came before it

    def value(self) -> float:
        """An upper bound of its value."""
        return math.inf if self.digits > 300 else 10.0**self.digits

    def include(self, other: _Bound) -> None:
        """Take the other as a factor."""
        self.digits += other.digits
        self.powers = max(self.powers, other.powers)
        self.letters += other.letters
        self.terms *= other.terms


def refusal_of(text: str, *, evaluates: bool = True) -> str | None:
    """Why a text must not reach a symbolic engine, or None. `evaluates`: it works out sums, integrals and limits."""
    if len(text) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    shapes = (
        ("factorial" in text.lower(), "a factorial in words"),
        ("__" in text, "a double underscore, which no formula has"),
        (_EXPONENT_NOTATION.search(text), "an exponent of 4 digits or more"),
        (_LONG_RUN.search(text), f"{MAX_OPERATORS} signs in a row"),
        (_LONG_WORD.search(text), f"a word of {MAX_LETTERS} letters"),
        (nesting(text) > MAX_DEPTH, f"brackets nested deeper than {MAX_DEPTH}"),
    )
    for found, reason in shapes:
        if found:
            return reason
    try:
        _Scan(text, evaluates).sequence()
    except _Refused as refused:
        return str(refused)
    return None


def nesting(text: str) -> int:
    """How deep the brackets of a text are nested."""
    return max(accumulate(((character in "({[") - (character in ")}]") for character in text), initial=0))


class _Scan:
    """One pass over the tokens of a text."""

    def __init__(self, text: str, evaluates: bool) -> None:
        self._evaluates = evaluates
        self._tokens = [
            (found.lastgroup or "other", found[0]) for found in _TOKEN.finditer(text) if found.lastgroup != "space"
        ]
        self._position = 0
        self._depth = 0

    def sequence(self, in_group: bool = False) -> _Bound:
        """What stands up to the end of the group, or of the text, as one product."""
        whole = _Bound()
        operand: _Bound | None = None
        while self._position < len(self._tokens):
            kind, text = self._tokens[self._position]
            if kind == "close" and in_group:
                break
            self._position += 1
            if operand is not None and operand.closes and kind in ("power", "factorial"):
                operand = msgspec.structs.replace(whole, group=True)
            if kind == "power":
                operand = self._power(operand or _Bound())
            elif kind == "factorial":
                operand = _factorial(operand or _Bound())
            elif text not in _TRANSPARENT:
                if operand is not None:
                    whole.include(operand)
                operand = self._operand(kind, text)
        if operand is not None:
            whole.include(operand)
        if whole.terms > MAX_TERMS:
            raise _Refused(f"brackets with letters that give more than {MAX_TERMS} terms")
        if whole.digits > MAX_DIGITS:
            raise _Refused(f"a number of more than {MAX_DIGITS} digits")
        return whole

    def _operand(self, kind: str, text: str) -> _Bound:
        self._depth += 1
        if self._depth > 2 * MAX_DEPTH:
            raise _Refused("commands nested too deeply")
        bound = self._operand_of(kind, text)
        self._depth -= 1
        return bound

    def _operand_of(self, kind: str, text: str) -> _Bound:
        if kind == "number":
            return _Bound(_log10(text))
        if kind == "letter":
            return _Bound(letters=1)
        if kind == "open":
            inner = self.sequence(in_group=True)
            self._position += 1  # the closing bracket, whichever it is
            inner.group = True
            return inner
        if kind == "command":
            return self._command(text)
        return _Bound(closes=text in _DELIMITERS)

    def _command(self, name: str) -> _Bound:
        if name in _EVALUATED and self._evaluates:
            raise _Refused(f"{name}, which would be evaluated")
        if name in _BINOMIALS:
            upper, lower = self._argument(), self._argument()
            if name == "\\choose" or max(upper.value(), lower.value()) > MAX_EXPONENT or upper.powers or lower.powers:
                raise _Refused(f"{name} of a large number")
            return _Bound(max(upper.value(), lower.value()) * math.log10(2), group=True, letters=upper.letters)
        if name in _FRACTIONS or name == "\\sqrt":
            inside = self._argument()
            if name in _FRACTIONS:
                inside.include(self._argument())
            else:
                inside.letters += 1  # a root multiplies out like one
            inside.group = True
            return inside
        if name in _GROWING:
            inside = self._next()
            if inside.value() > MAX_EXPONENT:
                raise _Refused(f"{name} of a number above {MAX_EXPONENT}")
            return _Bound(inside.value(), inside.powers, inside.letters, group=True)
        if name == "\\end":
            self._next()
            return _Bound(closes=True)
        return _Bound(closes=name in _DELIMITERS)

    def _argument(self) -> _Bound:
        """The next argument of a command: of a number without braces, one digit."""
        if self._at("number"):
            digit, rest = self._tokens[self._position][1][:1], self._tokens[self._position][1][1:]
            self._tokens[self._position : self._position + 1] = [("number", part) for part in (digit, rest) if part]
        return self._next()

    def _next(self) -> _Bound:
        """The next operand: a group, a number, a letter or a command with its sign."""
        while self._position < len(self._tokens):
            kind, text = self._tokens[self._position]
            if kind == "close":
                break
            self._position += 1
            if kind == "power":
                raise _Refused("a power of nothing")
            if text not in _TRANSPARENT and text not in "+-":
                return self._operand(kind, text)
        return _Bound()

    def _at(self, kind: str) -> bool:
        return self._position < len(self._tokens) and self._tokens[self._position][0] == kind

    def _power(self, base: _Bound) -> _Bound:
        exponent = self._next()
        if self._at("power"):
            raise _Refused("a power of a power without brackets")
        if self._at("factorial"):
            raise _Refused("a factorial in an exponent")
        powers = max(base.powers, exponent.powers) + 1
        if powers > MAX_POWERS:
            raise _Refused(f"more than {MAX_POWERS} powers above each other")
        times = exponent.value()
        if times > MAX_EXPONENT:
            raise _Refused(f"an exponent above {MAX_EXPONENT}")
        terms = base.terms
        if base.letters and base.group:
            whole = min(int(times), MAX_TERMS)
            terms *= min(math.comb(whole + base.letters, whole), 10 * MAX_TERMS)
            if terms > MAX_TERMS:
                raise _Refused(f"brackets with letters that give more than {MAX_TERMS} terms")
        digits = base.digits * max(times, 1.0)
        if digits > MAX_DIGITS:
            raise _Refused(f"a number of more than {MAX_DIGITS} digits")
        return _Bound(digits, powers, base.letters + exponent.letters, terms, base.group)


def _factorial(argument: _Bound) -> _Bound:
    value = argument.value()
    if value > MAX_FACTORIAL:
        raise _Refused(f"the factorial of a number above {MAX_FACTORIAL}")
    return _Bound(value * max(argument.digits, 1.0), argument.powers, argument.letters, group=True)


def _log10(number: str) -> float:
    """Of a number as written, with the digits behind the point on top; 0 for the numbers up to 1."""
    whole, _, rest = number.replace(",", "").partition(".")
    rest = rest.replace(".", "")
    whole = whole.lstrip("0")
    leading = math.log10(int(whole[:15])) + max(0, len(whole) - 15) if whole else 0.0
    return leading + len(rest)
