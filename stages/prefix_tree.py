"""Which of many sequences another one begins like: a tree of their beginnings. Pure.

Invariants: to look for a sequence or to add it takes as many comparisons as it is long, twice at the most, however many
others are there; of several that begin equally alike, the first that was added is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]  # [T, columns]: two places are alike if all columns are


@dataclass
class _Node:
    edge: Rows  # what leads here from the node above
    name: int  # the first sequence that came by
    children: dict[bytes, _Node] = field(default_factory=dict)  # by the first row of their edge


class PrefixTree:
    """Sequences by number, each an array [T] or [T, columns] of integers; all of one tree have equally many columns."""

    def __init__(self) -> None:
        self._root = _Node(np.zeros((0, 1), np.int64), -1)

    def longest(self, sequence: npt.NDArray[np.integer]) -> tuple[int, int]:
        """(number of the sequence with the longest common beginning, its length); (-1, 0) if none begins alike."""
        node, at, _ = self._walk(_rows(sequence))
        return node.name, at

    def add(self, sequence: npt.NDArray[np.integer], number: int) -> None:
        rows = _rows(sequence)
        node, at, on_edge = self._walk(rows)
        if on_edge < len(node.edge):
            rest = _Node(node.edge[on_edge:], node.name, node.children)
            node.edge, node.children = node.edge[:on_edge], {rest.edge[0].tobytes(): rest}
        if at < len(rows):
            node.children[rows[at].tobytes()] = _Node(rows[at:], number)

    def _walk(self, rows: Rows) -> tuple[_Node, int, int]:
        """(the node that the rows lead to or towards, how many of them, how many of those are on its edge)."""
        node, at, on_edge = self._root, 0, 0
        while at < len(rows) and on_edge == len(node.edge):
            child = node.children.get(rows[at].tobytes())
            if child is None:
                break
            node, on_edge = child, _alike(child.edge, rows[at:])
            at += on_edge
        return node, at, on_edge


def _rows(sequence: npt.NDArray[np.integer]) -> Rows:
    rows = np.ascontiguousarray(sequence, np.int64)
    return rows[:, None] if rows.ndim == 1 else rows


def _alike(first: Rows, second: Rows) -> int:
    """How many rows two arrays begin with alike."""
    n = min(len(first), len(second))
    differ = np.flatnonzero((first[:n] != second[:n]).any(axis=1))
    return int(differ[0]) if len(differ) else n
