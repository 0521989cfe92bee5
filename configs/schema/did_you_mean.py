"""The known name that was probably meant. Errors of all packages ask here, so that all guess alike.

difflib is imported at the first mistake only: `launch.py --help` must answer at once.
"""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that resembles the word most, or None if none does. `cutoff`: 1 = equal, 0 = anything."""
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def closest(word: str, known: Iterable[str]) -> str | None:
    """As `nearest`, but a name that begins with the word counts as near."""
    names = list(known)
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    return nearest(word, names) or min(longer, key=len, default=None)


def cure(word: str, known: Iterable[str], otherwise: str = "", *, form: str = "{}") -> str:
    """The end of a sentence: "did you mean x?", else `otherwise`, by default "choose one of x, y, z". `form`: how a
    name is written."""
    names = list(known)
    best = closest(word, names)
    return f"did you mean {form.format(best)}?" if best else otherwise or f"choose one of {', '.join(names)}"


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6, otherwise: str = "") -> str:
    """The end of a sentence: "; did you mean 'x'?", or `otherwise`."""
    near = nearest(word, known, cutoff)
    return otherwise if near is None else f"; did you mean {near!r}?"
