"""The last \\boxed{...} or \\fbox{...} of a text, by brace counting: what `boxed_` in front of a grader reads.

Only the last box counts, also when it is broken: an answer that was cut off is no answer, whatever came before it.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

TAIL_CHARS = 100_000
_COMMANDS: tuple[Literal["\\boxed"], Literal["\\fbox"]] = ("\\boxed", "\\fbox")
_SPACE = re.compile(r"\s*")
_EMPTY = re.compile(r"\s*\\(?:boxed|fbox)\s*\{\s*\}\s*")
_BARE = re.compile(r"[^\s$]+")


class Box(Struct, frozen=True):
    """A box with something in it."""

    command: Literal["\\boxed", "\\fbox"]
    content: str  # trimmed, not empty


def find_box(text: str) -> Box | None:
    """The last box; None without one, or if it is empty or not closed.

    `\\boxed x` (without braces) gives the token up to a space or a dollar sign. Looks at the last 100 000 characters.
    """
    text = text[-TAIL_CHARS:]
    start, command = max(((text.rfind(name), name) for name in _COMMANDS), key=lambda found: found[0])
    if start < 0:
        return None
    after = start + len(command)
    inner = _SPACE.match(text, after)
    position = inner.end() if inner is not None else after
    if position < len(text) and text[position] == "{":
        content = _braced(text, position)
    elif text[after : after + 1].isalpha():
        return None  # \boxedfoo is another command
    else:
        bare = _BARE.match(text, position)
        content = bare.group() if bare is not None else None
    content = "" if content is None else content.strip()
    return Box(command, content) if content else None


def last_box(text: str) -> str | None:
    """Content of the last box, trimmed; None without a box, or if it is empty or not closed."""
    box = find_box(text)
    return None if box is None else box.content


def unboxed(label: str) -> str:
    """A label that is itself boxed, unboxed once; a box with nothing in it is an empty label."""
    inner = last_box(label)
    if inner is not None:
        return inner
    return "" if _EMPTY.fullmatch(label) else label.strip()


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and the one that closes it; escaped braces do not count."""
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None
