"""Common beginnings, held against a look at all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stages.prefix_tree
from stages.prefix_tree import PrefixTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=10), st.booleans())
def test_the_longest_common_beginning_and_of_several_the_first(
    known: list[list[int]], asked: list[int], columns: bool
) -> None:
    def array(ids: list[int]) -> np.ndarray:
        return np.array([(i % 2, i // 2) for i in ids]).reshape(-1, 2) if columns else np.array(ids, np.int32)

    tree = PrefixTree()
    for number, ids in enumerate(known):
        tree.add(array(ids), number)
    lengths = [common(ids, asked) for ids in known]
    best = max(lengths, default=0)
    assert tree.longest(array(asked)) == ((lengths.index(best), best) if best else (-1, 0))


@pytest.mark.parametrize("part", ["one grows", "all branch off"])
def test_each_token_is_compared_twice_at_the_most(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 turns, as a function returns them that gives out one sample for each."""
    turns, tokens = 200, 10
    whole = np.arange(turns * tokens)
    rows = [whole[: (n + 1) * tokens].copy() for n in range(turns)]
    if part == "all branch off":
        for n, row in enumerate(rows):
            row[-1] = -1 - n
    compared, alike = [0], stages.prefix_tree._alike

    def counted(first: np.ndarray, second: np.ndarray) -> int:
        compared[0] += min(len(first), len(second))
        return alike(first, second)

    monkeypatch.setattr(stages.prefix_tree, "_alike", counted)
    tree = PrefixTree()
    for number, row in enumerate(rows):
        tree.longest(row)
        tree.add(row, number)
    looks = 2  # to look for it, and to add it
    assert compared[0] <= looks * 2 * sum(map(len, rows))
