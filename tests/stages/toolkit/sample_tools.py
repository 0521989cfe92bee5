"""Tools that the tests import by path."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal


async def lookup(city: str, days: int = 1, unit: Literal["C", "F"] = "C", note: str | None = None) -> dict[str, object]:
    """Weather of a city.

    Only the first paragraph is shown to the model.
    """
    return {"city": city, "days": days, "unit": unit}


async def echo(text: str) -> str:
    return text


async def hang(text: str) -> str:
    await asyncio.sleep(3600)
    return text


async def explode(text: str) -> str:
    raise RuntimeError("the tool is broken")


async def give_up(text: str) -> str:
    raise asyncio.CancelledError


async def leave(text: str) -> str:
    sys.exit(3)


async def block(text: str) -> str:
    """Stop the event loop where the text says so."""
    if text == "block":
        time.sleep(3600)  # noqa: ASYNC251 - what a careless tool does
    if text == "wait":
        await asyncio.sleep(3600)
    return text


async def spin(text: str) -> str:
    while text == "spin":
        pass
    return text


async def deaf(text: str) -> str:
    """Go on after being cancelled."""
    while text == "deaf":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
    return text


async def crash(text: str) -> str:
    if text == "crash":
        os._exit(7)
    return text


async def hoard(text: str) -> str:
    """Keep more and more memory, by pieces, and never give it back."""
    kept = []
    while text == "all":
        kept.append(bytearray(1 << 20))
    return text


async def much(text: str) -> str:
    return text * int(1e8)


async def note(text: str) -> str:
    """Write this process and that of a daemon into the file that the text names, and wait; or that it was cancelled."""
    daemon = os.fork()
    if daemon == 0:
        os.setsid()
        time.sleep(3600)  # noqa: ASYNC251 - it has no event loop
    Path(text).write_text(f"{os.getpid()} {daemon}")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        Path(text).write_text("cancelled")
        raise
    return text


async def variadic(*texts: str) -> str:
    return "".join(texts)


def plain(text: str) -> str:
    return text


class Reverse:
    """A tool as a class."""

    name = "reverse"
    schema: Mapping[str, object] = {"type": "function", "function": {"name": "reverse"}}

    async def call(self, arguments: Mapping[str, object] | str) -> str:
        return str(arguments)[::-1]


class NoSchema:
    name = "x"

    async def call(self, arguments: Mapping[str, object] | str) -> str:
        return ""
