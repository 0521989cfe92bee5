"""How the fields of the schema are written, and which known name an unknown name probably meant.

A field is `name: Type = default`. The string below it is its description in `--help` and docs/configuration.md.
`Annotated[Positive, ReadBy("--use-tis")]`: nothing reads the field unless the run has that setting. An option that
nothing reads is refused; the grammar of conditions is in `configs.rules.validate`.

Errors of all packages take the nearest known name from here, so that all guess alike. difflib is imported at the first
mistake only: `launch.py --help` must answer at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]  # both ends included
Factor = Annotated[float, Meta(gt=0, le=1)]  # above 0
Decay = Annotated[float, Meta(ge=0, lt=1)]  # below 1


class ReadBy(Struct, frozen=True):
    """What must be set for a field to be read, as a user writes it: `--engine simulated`, `--use-tis`, `a judge`."""

    condition: str


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections and tables. The first line of a docstring is the title in `--help`."""

    READ_BY: ClassVar[str] = ""  # as `ReadBy`, for all fields of the section


def as_number(value: object) -> float | None:
    """A text, or what else a user may write, as a number; None if it is none."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def repeated(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Names that are there several times, with their number."""
    return ((name, count) for name, count in Counter(names).items() if count > 1)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that resembles the word most, or None if none does. `cutoff`: 1 = equal, 0 = anything."""
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def _longer(word: str, names: Iterable[str]) -> str | None:
    """The shortest name that begins with the word."""
    return min((name for name in names if len(word) > 2 and name.startswith(word)), key=len, default=None)


def closest_by_words(word: str, known: Iterable[str]) -> str | None:
    """As `nearest`, for names of several words: those that only share words such as use, custom or path are not near,
    but a name that begins with the word is.

    Each word of the given name must resemble one of the other's, unless the two differ in little but their separators.
    """
    import difflib

    def alike(one: str, other: str, least: float) -> bool:
        return difflib.SequenceMatcher(None, one, other).ratio() >= least

    given = re.split("[-_.]", word)
    for name in difflib.get_close_matches(word, names := list(known), n=10):
        theirs = re.split("[-_.]", name)
        if all(any(alike(one, other, 0.6) for other in theirs) for one in given):
            return name
        if alike("".join(given), "".join(theirs), 0.85):
            return name
    return _longer(word, names)


def cure(word: str, known: Iterable[str], otherwise: str = "", *, form: str = "{}") -> str:
    """The end of a sentence: "did you mean x?", else `otherwise`, by default "choose one of x, y, z". `form`: how a
    name is written."""
    names = list(known)
    best = nearest(word, names) or _longer(word, names)
    return f"did you mean {form.format(best)}?" if best else otherwise or f"choose one of {', '.join(names)}"


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6, otherwise: str = "") -> str:
    """The end of a sentence: "; did you mean 'x'?", or `otherwise`."""
    near = nearest(word, known, cutoff)
    return otherwise if near is None else f"; did you mean {near!r}?"
