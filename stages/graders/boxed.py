"""`boxed`: the content of the last \\boxed{...} or \\fbox{...} equals the label; and the extraction behind `boxed_`.

Only the last box counts, also when it is broken: an answer that was cut off is no answer, whatever came before it.
"""

from __future__ import annotations

import re

from stages.graders.grade import Grade, GradeRequest, judged

TAIL_CHARS = 100_000
_COMMANDS = ("\\boxed", "\\fbox")
_SPACE = re.compile(r"\s*")
_BARE = re.compile(r"[^\s$]+")


def last_box(text: str) -> str | None:
    """Content of the last box, trimmed, by brace counting; None without a box, or if it is empty or not closed.

    `\\boxed x` (without braces) gives the token up to a space or a dollar sign. Looks at the last 100 000 characters.
    """
    text = text[-TAIL_CHARS:]
    start, command = max((text.rfind(name), name) for name in _COMMANDS)
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
    return (content.strip() or None) if content is not None else None


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


def unboxed(label: str) -> str:
    """A label that is itself boxed, unboxed once."""
    inner = last_box(label)
    return label.strip() if inner is None else inner


def grade_boxed(request: GradeRequest) -> Grade:
    """Score 1 if the content of the last box is the label, character by character after trimming."""
    answer = last_box(request.response)
    return judged(answer is not None and answer == unboxed(request.label or ""), answer)
