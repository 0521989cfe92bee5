"""The built-in corpus of the pack `search`: how many towers, trees or carts there are in towns that do not exist.

Nothing of it can be known without looking it up. It is made anew wherever it is needed, always the same, of the few
characters that the tiny model of sums knows, which then learns to search on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

THINGS: Final = ("towers", "trees", "carts", "stores", "cows", "roads", "seats", "actors")
_FIRST: Final = ("an", "ca", "co", "da", "do", "na", "no", "ra", "ro", "sa", "so", "ta", "to", "wa", "wo")
_SECOND: Final = ("cada", "dera", "nda", "ndo", "ne", "rano", "re", "ston", "tone", "tu", "wen", "te")
_THIRD: Final = ("", "n", "r", "s", "st")
TOWNS: Final = 400
_HELDOUT: Final = 5  # every fifth town is asked for in the held-out tasks only

Fact = tuple[str, str, int]  # town, thing, how many


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """All towns, in a fixed order."""
    every = sorted({a + b + c for a in _FIRST for b in _SECOND for c in _THIRD} - set(THINGS))
    random.Random("towns").shuffle(every)
    return tuple(every[:TOWNS])


def facts() -> list[Fact]:
    """Every fact of the corpus, one document each."""
    chosen = random.Random("facts")
    return [(town, thing, chosen.randint(2, 99)) for town in names() for thing in THINGS]


def questions(split: str, seed: int) -> Iterator[Fact]:
    """Facts to ask for, without end; held-out ones are of towns that training never asks for."""
    heldout = {town for at, town in enumerate(names()) if at % _HELDOUT == 0}
    asked = [fact for fact in facts() if (fact[0] in heldout) == (split == "heldout")]
    chosen = random.Random(f"questions {split} {seed}")
    while True:
        yield chosen.choice(asked)
