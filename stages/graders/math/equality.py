"""Whether two answers mean the same: structure by structure, then value by value.

Three outcomes: yes, no, and None for unknown, so that another method decides. The rules:
- words are equal as words: letters in another order are another word, though a parser takes them for a product;
- a command that is not known (\\phantom, \\not, ...) makes a text that is equal to the same text only;
- an equation is its sides: names may be left out, and all that stands for a value must be the label's value, so that
  42 = 43 is neither 42 nor 43;
- units that are both there must agree; where one side has none, the numbers decide;
- lists and sets have no order, pairs and intervals have one, brackets are of one kind;
- numbers are equal exactly, nothing is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from stages.graders.math.notation import DEGREE, PERCENT, Quantity, canonical
from stages.graders.math.reading import LIST, SET, UNION, Chain, Node, Parts, UnreadableError, read
from stages.graders.math.values import GREEK, is_formula, proportional, same_value, value_of

_UNORDERED = frozenset((LIST, SET, UNION))
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)
_RATIO = re.compile(r"\d+(?:\.\d+)?(?::\d+(?:\.\d+)?)+", re.ASCII)
_UNTEXT = re.compile(r"\\(?:text|mathrm)\{([^{}]*)\}")
_WORD = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s'.,!-])*[^\W\d_.!]?[.!]?")
_PRODUCT = re.compile(r"[a-dkmnp-z]{2}")  # two letters that may both name quantities
_LETTERS = rf"\\(?:{'|'.join(name for name in sorted(GREEK) if name != 'pi')})(?![A-Za-z])"
_SIMPLE_NAME = re.compile(
    rf"(?:m?\s*\\(?:angle|triangle|overline|vec)\s*)?\{{?\|?\(?(?:[A-Za-z]|[A-Z]{{2,4}}|{_LETTERS}|\\text\{{[^{{}}]*\}})"
    r"(?:_\{?[A-Za-z0-9,+-]*\}?|'|\^\{?[*']\}?)*(?:\([A-Za-z0-9,+ -]*\))?\)?\|?\}?(?:\s*,\s*[A-Za-z]\)?)*"
)
_NEEDLESS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|.)")
_VALUES = re.compile(r"\\(?:pi|infty|cdot|frac|sqrt|times)(?![A-Za-z])")
_SCRIPT = re.compile(r"[_^](?:\{[^{}]*\}|.)")
_FLIPPED = {">": "<", ">=": "<="}
_Answer = bool | None


def same_answer(given: str, wanted: str) -> _Answer:
    """Whether an answer is the label; None if that is unknown. A comma between digits is read both ways."""
    verdict = _same_texts(canonical(given), canonical(wanted))
    if verdict is not True and "," in given + wanted:
        split = _same_texts(canonical(given, commas_group=False), canonical(wanted, commas_group=False))
        return True if split else verdict
    return verdict


def same_spelling(given: str, wanted: str) -> bool:
    """Whether two texts differ in their spelling only."""
    return _squeezed(canonical(given)) == _squeezed(canonical(wanted))


def _same_texts(given: str, wanted: str) -> _Answer:
    if _squeezed(given) == _squeezed(wanted):
        return bool(given)
    try:
        return _same(read(given), read(wanted))
    except UnreadableError:
        return False


def _squeezed(text: str) -> str:
    """Without spaces, except between digits, where one makes two numbers."""
    return _NEEDLESS.sub("", text)


def _all(verdicts: Sequence[_Answer]) -> _Answer:
    return False if False in verdicts else None if None in verdicts else True


def _same(given: Node, wanted: Node) -> _Answer:
    if isinstance(given, Chain) or isinstance(wanted, Chain):
        return _same_chains(given, wanted)
    if isinstance(given, Parts) and isinstance(wanted, Parts):
        return _same_parts(given, wanted)
    if isinstance(given, Quantity) and isinstance(wanted, Quantity):
        return _same_leaves(given, wanted)
    parts, single = (given, wanted) if isinstance(given, Parts) else (wanted, given)
    if isinstance(parts, Parts) and parts.kind in (LIST, SET) and len(parts.parts) == 1:
        return _same(parts.parts[0], single)
    return False


def _same_parts(given: Parts, wanted: Parts) -> _Answer:
    if {given.kind, wanted.kind} == {LIST, UNION}:
        given, wanted = (_union_of_ranges(parts) if parts.kind == LIST else parts for parts in (given, wanted))
    kinds = {given.kind, wanted.kind}
    if kinds <= _UNORDERED and (UNION not in kinds or len(kinds) == 1):
        return _same_unordered(given, wanted)
    if len(given.parts) != len(wanted.parts) or not (len(kinds) == 1 or kinds == {LIST, "()"}):
        return False
    return _all([_same(*pair) for pair in zip(given.parts, wanted.parts, strict=True)])


def _union_of_ranges(parts: Parts) -> Parts:
    """`x < 1 or x > 3` as a union; another list as it is."""
    ranges = [_as_interval(part) for part in parts.parts if isinstance(part, Chain)]
    known = tuple(interval for interval in ranges if interval is not None)
    return Parts(UNION, known) if len(known) == len(parts.parts) else parts


def _same_unordered(given: Parts, wanted: Parts) -> _Answer:
    """Each part has an equal one. Equality can be passed on, so that the first fit is as good as any."""
    ones, others = (_distinct(parts) if parts.kind == SET else list(parts.parts) for parts in (given, wanted))
    if len(ones) != len(others):
        return False
    unknown = False
    for one in ones:
        verdicts = [_same(one, other) for other in others]
        if True in verdicts:
            others.pop(verdicts.index(True))
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def _distinct(parts: Parts) -> list[Node]:
    distinct: list[Node] = []
    for part in parts.parts:
        if not any(_same(part, known) for known in distinct):
            distinct.append(part)
    return distinct


def _same_chains(given: Node, wanted: Node) -> _Answer:
    if isinstance(given, Chain) and isinstance(wanted, Chain):
        return _same_relations(given, wanted)
    if isinstance(given, Chain):
        return _chain_is(given, wanted, _names_something)
    assert isinstance(wanted, Chain)
    return _chain_is(wanted, given, lambda text, _: _SIMPLE_NAME.fullmatch(text) is not None)


def _chain_is(chain: Chain, other: Node, is_name: Callable[[str, bool], bool]) -> _Answer:
    """Whether all that a chain gives a value is the other; a range of one letter is its interval."""
    interval = _as_interval(chain)
    if interval is not None:
        return _same(interval, other) if isinstance(other, Parts) else False
    if chain.relations == ("in",):
        return _same(chain.sides[1], other) if _SIMPLE_NAME.fullmatch(chain.texts[0]) else False
    if set(chain.relations) != {"="} or not chain.texts[-1]:
        return False
    sides = zip(chain.sides, chain.texts, range(len(chain.sides)), strict=True)
    values = [side for side, text, place in sides if text and not is_name(text, place == 0)]
    return _all([_same(value, other) for value in values or chain.sides[-1:]])


def _names_something(text: str, first: bool) -> bool:
    """Whether a side names the quantity of the question, as A and pi r^2 in A = pi r^2 = 25 pi, or m + n: letters only.

    The first side has no powers either: x^2 + y^2 = 25 is an equation, and not a way to write 25.
    """
    bare = (_SUBSCRIPT if first else _SCRIPT).sub("", text)
    letters = _VALUES.sub("", bare)
    named = re.search(r"[A-Za-z]", letters) and not re.search(r"\d", bare) and is_formula(text)
    return bool(named) or _SIMPLE_NAME.fullmatch(text) is not None


def _as_interval(chain: Chain) -> Parts | None:
    """`a < x <= b`, `x > a` as the interval of x; None for other relations."""
    sides, texts, relations = _oriented(chain)
    if not set(relations) <= {"<", "<="}:
        return None
    brackets = {"<": "()", "<=": "[]"}
    endless = tuple(read(text) for text in (r"-\infty", r"\infty"))
    if len(sides) == 3 and _SIMPLE_NAME.fullmatch(texts[1]):
        return Parts(brackets[relations[0]][0] + brackets[relations[1]][1], (sides[0], sides[2]))
    if len(sides) == 2 and _SIMPLE_NAME.fullmatch(texts[0]):
        return Parts("(" + brackets[relations[0]][1], (endless[0], sides[1]))
    if len(sides) == 2 and _SIMPLE_NAME.fullmatch(texts[1]):
        return Parts(brackets[relations[0]][0] + ")", (sides[0], endless[1]))
    return None


def _oriented(chain: Chain) -> tuple[tuple[Node, ...], tuple[str, ...], tuple[str, ...]]:
    """Sides, their texts and relations, with the smaller side first."""
    if set(chain.relations) <= set(_FLIPPED):
        flipped = tuple(_FLIPPED[relation] for relation in chain.relations)
        return chain.sides[::-1], chain.texts[::-1], flipped[::-1]
    return chain.sides, chain.texts, chain.relations


def _same_relations(given: Chain, wanted: Chain) -> _Answer:
    for chain, other in ((given, wanted), (wanted, given)):
        interval = _as_interval(other)
        if chain.relations == ("in",) and interval is not None:
            return _same(chain.sides[1], interval)
    ones, texts, relations = _oriented(given)
    others, other_texts, other_relations = _oriented(wanted)
    if relations == other_relations:
        verdict = _all([_same(*pair) for pair in zip(ones, others, strict=True)])
        if verdict is not False:
            return verdict
        if len(relations) == 1 and relations[0] in ("=", "<", "<="):
            return _same_equation(ones, others, positive=relations[0] != "=")
    if set(relations) | set(other_relations) == {"="} and _squeezed(texts[0]) == _squeezed(other_texts[0]):
        ends = Chain(ones[1:], relations[1:], texts[1:]) if len(ones) > 2 else ones[1]
        return _same(ends, others[-1])
    return False


def _same_equation(ones: tuple[Node, ...], others: tuple[Node, ...], *, positive: bool) -> _Answer:
    values = [_value(side) for side in (*ones, *others)]
    if any(value is None for value in values):
        return False
    one, another, other, yet_another = values
    return proportional(one - another, other - yet_another, positive=positive)


def _value(node: Node) -> Any:
    return value_of(node.core) if isinstance(node, Quantity) and not node.unit else None


def _same_leaves(one: Quantity, other: Quantity) -> _Answer:
    if _squeezed(one.core) == _squeezed(other.core) and one.core:
        return _units_fit(one.unit, other.unit)
    words = [_words(quantity.core) for quantity in (one, other)]
    if words[0] is not None or words[1] is not None:
        return words[0] == words[1] and _units_fit(one.unit, other.unit)
    if any(_CLOCK.fullmatch(quantity.core) for quantity in (one, other)):
        return False
    if any(_BASED.fullmatch(quantity.core) for quantity in (one, other)):
        return _same_digits(one, other)
    values = [value_of(_ratio(quantity.core)) for quantity in (one, other)]
    if values[0] is None or values[1] is None:
        formulas = [is_formula(_ratio(quantity.core)) for quantity in (one, other)]
        spelled = [_squeezed(_UNTEXT.sub(r" \1 ", quantity.core)).strip().casefold() for quantity in (one, other)]
        return None if all(formulas) else not any(formulas) and spelled[0] == spelled[1]
    if same_value(values[0], values[1]):
        return _units_fit(one.unit, other.unit)
    return _converted(one, other, values[0], values[1])


_BASED = re.compile(r"([0-9A-F]+)_\{?(\d+)\}?", re.ASCII)


def _same_digits(one: Quantity, other: Quantity) -> bool:
    """Digits in a base: the base may be left out on one side, because the question states it."""
    found = [(quantity.core, _BASED.fullmatch(quantity.core)) for quantity in (one, other)]
    (digits, base), (others, other_base) = ((based[1], based[2]) if based else (core, "") for core, based in found)
    return digits == others and _units_fit(base, other_base)


def _units_fit(one: str, other: str) -> bool:
    return not one or not other or one == other


def _converted(one: Quantity, other: Quantity, value: Any, other_value: Any) -> bool:
    """5 % is 0.05 as well as 5, and 45 degrees are a quarter of pi."""
    import sympy

    for quantity, own, against, otherwise in ((one, value, other_value, other), (other, other_value, value, one)):
        if otherwise.unit:
            continue
        if quantity.unit == PERCENT and same_value(own / 100, against):
            return True
        if quantity.unit == DEGREE and r"\pi" in otherwise.core:
            return same_value(own * sympy.pi / 180, against)
    return False


def _ratio(core: str) -> str:
    """2:3 as a quotient; a ratio of more numbers is no value."""
    if _RATIO.fullmatch(core) and core.count(":") == 1:
        over, _, under = core.partition(":")
        return rf"({over})/({under})"
    return core


def _words(core: str) -> str | None:
    """The text of words in one form, None for what may be mathematics."""
    text = _UNTEXT.sub(r" \1 ", core)
    if "\\" in text or not _WORD.fullmatch(text.strip()):
        return None
    letters = re.sub(r"[^\w]", "", text)
    return None if text == core and (len(letters) == 1 or _PRODUCT.fullmatch(letters)) else letters.casefold()
