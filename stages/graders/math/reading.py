"""The structure of an answer: lists, sets, pairs, intervals, matrices, unions, relations, and what they are made of.

Text in canonical notation becomes a tree. What this file does not know the structure of stays a leaf, as text. Brackets
count as they nest, and of any kind closes any, so that half-open intervals are read.

Invariants: each level removes at least one character, and no tree is deeper than MAX_DEPTH; a text has at most
MAX_PARTS parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from stages.graders.math.notation import Quantity, quantity

MAX_DEPTH = 12
MAX_PARTS = 64
LIST, SET, MATRIX, DETERMINANT, ROW, UNION = "list", "{}", "matrix", "determinant", "row", "union"


class UnreadableError(ValueError):
    """Brackets that do not fit, or more of them than an answer has."""


class Parts(Struct, frozen=True):
    """Several things: a list, a set, a union, rows of a matrix, or what two brackets enclose (`()`, `[)`, ...)."""

    kind: str
    parts: tuple[Node, ...]


class Chain(Struct, frozen=True):
    """Sides and the relations between them: 1 < x < 2 has three sides."""

    sides: tuple[Node, ...]
    relations: tuple[str, ...]
    texts: tuple[str, ...]


Node = Quantity | Parts | Chain  # a leaf is an expression, a word or a number, with the unit taken off

_PIECE = re.compile(r"\\(?:begin|end)\{[a-zA-Z*]+\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = frozenset(("(", "[", "{", r"\{"))
_CLOSING = frozenset((")", "]", "}", r"\}"))
_COMMAS = frozenset((",", ";"))
RELATIONS = {
    "=": "=", "<": "<", ">": ">", r"\le": "<=", r"\leq": "<=", r"\ge": ">=", r"\geq": ">=", r"\lt": "<", r"\gt": ">",
    r"\in": "in", r"\ne": "!=", r"\neq": "!=", r"\approx": "~", r"\sim": "~", r"\simeq": "~", r"\cong": "~",
    r"\equiv": "equiv", r"\notin": "not in", r"\subset": "subset", r"\subseteq": "subset", r"\to": "to",
    r"\implies": "implies", r"\Rightarrow": "implies", r"\iff": "iff", r"\parallel": "parallel", r"\perp": "perp",
}  # fmt: skip
_EVERYTHING = {r"\mathbb{R}": "()", r"\mathbb R": "()", r"\R": "()"}
_MATRIX = re.compile(
    r"\\begin\{(?P<name>[a-zA-Z]*matrix|array)\}(?:\{[clr| ]*\})?(?P<inside>.*)\\end\{(?P=name)\}", re.DOTALL
)


def read(text: str, depth: int = 0) -> Node:
    """The tree of an answer. Raises UnreadableError."""
    if depth > MAX_DEPTH:
        raise UnreadableError("nested too deeply")
    text = text.strip()
    elements, _ = _split(text, _COMMAS)
    if len(elements) > 1:
        return Parts(LIST, _flat(_read_element(element, depth) for element in elements))
    return _read_element(text, depth)


def _flat(nodes: Iterator[Node]) -> tuple[Node, ...]:
    """Lists inside of a list, as 1 plus or minus 2 is one, are part of it."""
    found: list[Node] = []
    for node in nodes:
        found.extend(node.parts if isinstance(node, Parts) and node.kind == LIST else (node,))
    return tuple(found)


def _read_element(text: str, depth: int) -> Node:
    sides, relations = _split(text, frozenset(RELATIONS))
    if not relations:
        return _read_union(text, depth)
    return Chain(
        tuple(_read_union(side, depth) for side in sides), tuple(RELATIONS[name] for name in relations), tuple(sides)
    )


def _read_union(text: str, depth: int) -> Node:
    members, _ = _split(text, frozenset((r"\cup",)))
    if len(members) > 1:
        return Parts(UNION, tuple(_read_item(member, depth) for member in members))
    return _read_item(text, depth)


def _read_item(text: str, depth: int) -> Node:
    text = text.strip()
    if text in _EVERYTHING:
        return read(r"(-\infty,\infty)", depth + 1)
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        return _read_matrix(matrix, depth)
    opening, closing = _enclosing(text)
    if opening:
        inside = text[len(opening) : len(text) - len(closing)]
        elements, _ = _split(inside, _COMMAS)
        if opening == r"\{" and closing == r"\}":
            return _read_set(inside, elements, depth)
        if opening == "{" or (len(elements) == 1 and opening + closing in ("()", "[]")):
            return read(inside, depth + 1)
        if len(elements) > 1 and closing != r"\}":
            return Parts(opening + closing, tuple(read(element, depth + 1) for element in elements))
    signs = [piece for piece, level, _ in _pieces(text) if piece == r"\pm" and level == 0]
    if len(signs) == 1 and r"\mp" not in text:
        return Parts(LIST, tuple(_read_item(text.replace(r"\pm", sign), depth) for sign in ("+", "-")))
    return quantity(text)


def _read_set(inside: str, elements: list[str], depth: int) -> Node:
    if not inside.strip():
        return Quantity(r"\emptyset", "")
    if re.search(r":|\||\\mid(?![A-Za-z])", inside):
        return Quantity(rf"\{{{inside}\}}", "")  # described, not listed
    return Parts(SET, tuple(read(element, depth + 1) for element in elements))


def _read_matrix(found: re.Match[str], depth: int) -> Node:
    rows = [row for row in re.split(r"\\cr(?![A-Za-z])", found["inside"]) if row.strip()]
    cells = [row.split("&") for row in rows]
    if len(rows) > MAX_PARTS or any(len(row) > MAX_PARTS for row in cells):
        raise UnreadableError("a matrix with too many rows or columns")
    kind = DETERMINANT if found["name"] in ("vmatrix", "Vmatrix") else MATRIX
    return Parts(kind, tuple(Parts(ROW, tuple(read(cell, depth + 1) for cell in row)) for row in cells))


def _pieces(text: str) -> Iterator[tuple[str, int, int]]:
    """Each character or command, how deep in brackets it stands, and where it begins."""
    depth = 0
    for found in _PIECE.finditer(text):
        piece = found[0]
        if piece in _CLOSING or piece.startswith(r"\end{"):
            depth -= 1
        yield piece, depth, found.start()
        if piece in _OPENING or piece.startswith(r"\begin{"):
            depth += 1
        if depth < 0:
            raise UnreadableError("a bracket that nothing opened")
    if depth:
        raise UnreadableError("a bracket that nothing closes")


def _split(text: str, separators: frozenset[str]) -> tuple[list[str], list[str]]:
    """The pieces between separators outside of brackets, and the separators. Raises UnreadableError."""
    parts, between, start = [], [], 0
    for piece, depth, position in _pieces(text):
        if depth == 0 and piece in separators:
            parts.append(text[start:position].strip())
            between.append(piece)
            start = position + len(piece)
    parts.append(text[start:].strip())
    if len(parts) > MAX_PARTS:
        raise UnreadableError(f"more than {MAX_PARTS} parts")
    return parts, between


def _enclosing(text: str) -> tuple[str, str]:
    """The brackets around all of a text, two empty ones if there are none."""
    pieces = list(_pieces(text))
    if len(pieces) < 2 or pieces[0][0] not in _OPENING or pieces[-1][0] not in _CLOSING or pieces[-1][1] != 0:
        return "", ""
    if any(depth == 0 for _, depth, _ in pieces[1:-1]):
        return "", ""
    return pieces[0][0], pieces[-1][0]
