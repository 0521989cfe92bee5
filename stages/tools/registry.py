"""From the names in `--tools` to tools: built-in ones by name, the user's own by import path, and calls of them.

Built-in tools are bounded in what they do and answer at once, in this process. A tool of the user is imported here for
its schema only: its calls run in a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from configs.schema.did_you_mean import nearest
from stages.agents.chat_formats.parsers.found import Offered
from stages.agents.chat_formats.parsers.marked import Marked
from stages.agents.messages import ToolCall
from stages.tools.calculator import Calculator
from stages.tools.errors import ToolCallError, UnknownToolError
from stages.tools.imports import import_tool
from stages.tools.process import ToolProcess
from stages.tools.tool import Tool

BUILT_IN: dict[str, Callable[[], Tool]] = {"calculator": Calculator}


def resolve_tools(names: Sequence[str], memory_gb: float = 0.0) -> dict[str, Tool]:
    """Tools by the name under which the model calls them, in the order given. Raises UnknownToolError.

    Close those that were called with `close_tools`. `memory_gb`: of the process of each of the user's; 0 = no limit.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        tool = BUILT_IN[name]() if name in BUILT_IN else _own_tool(name, int(memory_gb * (1 << 30)))
        if tool.name in tools:
            raise UnknownToolError(f"tools: two of them are called {tool.name!r}; rename one or leave it out")
        tools[tool.name] = tool
    return tools


async def close_tools(tools: Mapping[str, Tool]) -> None:
    """End the processes of tools."""
    for tool in tools.values():
        if isinstance(tool, ToolProcess):
            await tool.close()


async def answer_call(tools: Mapping[str, Tool], text: str, opening: str, closing: str, deadline_s: float) -> str:
    """Carry out the call that ends the text; whatever goes wrong is an answer of the form `error: ...`."""
    call = Marked(opening, closing).last(text, Offered([tool.schema for tool in tools.values()]))
    if not isinstance(call, ToolCall):
        return f"error: {call}"
    tool = tools[call.name]
    try:
        if isinstance(tool, ToolProcess):
            await tool.ready()  # importing a tool is not counted
        async with asyncio.timeout(deadline_s):
            return await tool.call(call.arguments)
    except ToolCallError as error:
        return f"error: {error}"
    except TimeoutError:
        return f"error: no answer within {deadline_s:g} s"


def _own_tool(path: str, memory_bytes: int) -> Tool:
    if not all(path.partition(":")):
        near = nearest(path, BUILT_IN)
        guess = f"did you mean {near!r}? " if near else ""
        raise UnknownToolError(
            f"tools: {path!r} is no tool; {guess}Known: {', '.join(BUILT_IN)}, or your own as package.module:function"
        )
    tool = import_tool(path)
    return ToolProcess(path, tool.name, tool.schema, memory_bytes)
