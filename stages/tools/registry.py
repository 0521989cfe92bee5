"""From the names in `--tools` to tools: built-in ones by name, the user's own by import path.

An import path names an async function, an object with `name`, `schema` and `call`, or a class of such objects that
needs no arguments.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence

from configs.schema.did_you_mean import nearest
from models.import_path import ImportPathError, import_path
from stages.tools.calculator import Calculator
from stages.tools.calls import ToolCall, parse_call
from stages.tools.errors import ToolCallError, UnknownToolError
from stages.tools.tool import FunctionTool, Tool

BUILT_IN: dict[str, Callable[[], Tool]] = {"calculator": Calculator}


def resolve_tools(names: Sequence[str]) -> dict[str, Tool]:
    """Tools by the name under which the model calls them, in the order given. Raises UnknownToolError."""
    tools: dict[str, Tool] = {}
    for name in names:
        tool = BUILT_IN[name]() if name in BUILT_IN else _import_tool(name)
        if tool.name in tools:
            raise UnknownToolError(f"tools: two of them are called {tool.name!r}; rename one or leave it out")
        tools[tool.name] = tool
    return tools


async def answer_call(tools: dict[str, Tool], text: str, opening: str, closing: str, deadline_s: float) -> str:
    """Carry out the call that ends the text; whatever goes wrong is an answer of the form `error: ...`."""
    call = parse_call(text, opening, closing, tuple(tools))
    if not isinstance(call, ToolCall):
        return f"error: {call}"
    try:
        async with asyncio.timeout(deadline_s):
            return await tools[call.name].call(call.arguments)
    except ToolCallError as error:
        return f"error: {error}"
    except TimeoutError:
        return f"error: no answer within {deadline_s:g} s"
    except Exception as error:  # a tool is somebody's program: the model sees what it raised, the run goes on
        return f"error: {type(error).__name__}: {error}"


def _import_tool(path: str) -> Tool:
    if not all(path.partition(":")):
        near = nearest(path, BUILT_IN)
        guess = f"did you mean {near!r}? " if near else ""
        raise UnknownToolError(
            f"tools: {path!r} is no tool; {guess}Known: {', '.join(BUILT_IN)}, or your own as package.module:function"
        )
    try:
        return _as_tool(import_path(path), path)
    except ImportPathError as error:
        raise UnknownToolError(f"tools: {error}") from error


def _as_tool(found: object, path: str) -> Tool:
    if inspect.iscoroutinefunction(found):
        return FunctionTool(found, path)
    if inspect.isfunction(found):
        raise UnknownToolError(
            f"tools: {path!r} is a plain function, which would block all other calls; make it 'async def'"
        )
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            raise UnknownToolError(
                f"tools: {path!r} cannot be made without arguments ({error}); name an instance"
            ) from error
    if not isinstance(found, Tool) or not inspect.iscoroutinefunction(found.call):
        raise UnknownToolError(
            f"tools: {path!r} is no tool; it must be an async function, or have 'name', 'schema' and an async 'call'"
        )
    return found
