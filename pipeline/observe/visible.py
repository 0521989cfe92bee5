"""Text of others for a terminal: what models, programs and peers write may hold the commands of one."""

from __future__ import annotations

from typing import Final

# Control characters as the pictures that Unicode has of them; those without one as the sign of what is unreadable.
_PICTURES: Final = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    code: 0xFFFD for code in range(127, 160)
}


def visible(text: str) -> str:
    """The text with its control characters shown and not obeyed; line breaks and tabs stay."""
    return text.translate(_PICTURES)
