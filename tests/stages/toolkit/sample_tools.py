"""Tools that the tests import by path."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
