"""Text for the user: words for a process that is down, and untrusted text made safe to show. No I/O, no clock."""

from __future__ import annotations

from typing import Final

from configs.graph import engine_count, replicas
from configs.schema import Config

# Control characters as the pictures that Unicode has of them; those without one as the sign of what is unreadable.
_PICTURES: Final = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    code: 0xFFFD for code in range(127, 160)
}


def visible(text: str) -> str:
    """The text with its control characters shown, so that a terminal does not obey them; line breaks and tabs stay.

    For text that models, programs and peers write.
    """
    return text.translate(_PICTURES)


def outage_text(config: Config, kind: str) -> str:
    """What happens to a process's work while it is down. `kind`: engine, frozen, router, or the name of a stage."""
    if kind == "router":
        return "new requests wait for it, those it had go on at the engines directly"
    if kind == "engines":
        return "the engines go on with the weights that they have until it is back"
    if kind == "hub":
        return "its streams wait until it is back, and their senders keep what is in them"
    if kind == "fetcher":
        return "the engines of its node go on with the weights that they have until it is back"
    if kind == "frozen":
        return "what is asked of it waits until it is back"
    there = engine_count(config) if kind == "engine" else replicas(config).get(kind, 1)
    return "its work goes to others" if there > 1 else "its work waits until it is back"
