"""Tools by name: built-in tools by their names in `--tools`, a user's tools by import path.

An import path `package.module:name` names an async function, an object with `name`, `schema` and `call`, or a class
whose instances have them and need no arguments. Built-in tools are bounded and answer at once, in this process. A
user's tool is imported here only for its schema: its calls run in a separate process, which the first call starts and
which is restarted after a loss.

    python -m stages.tools.registry SOCKET_FD PARENT_PID     the process of one tool; IMPORT_PATH MEMORY_BYTES on stdin

Its calls carry the arguments; the answer is the tool's, as text, bounded. See stages/workers/serve.py.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from configs.schema.notation import did_you_mean
from models.import_path import ImportPathError, import_path
from stages.tools.calculator import Calculator
from stages.tools.tool import Arguments, FunctionTool, Tool, ToolCallError, UnknownToolError, bounded
from stages.workers.guard import read_arguments
from stages.workers.process import CallFailed, WorkerLost, WorkerProcess
from stages.workers.serve import Handler, Refusal, become_worker, serve


def import_tool(path: str) -> Tool:
    """The tool of an import path. Raises UnknownToolError."""
    try:
        candidate: object = import_path(path)
    except ImportPathError as error:
        raise UnknownToolError(f"tools: {error}") from error
    if inspect.iscoroutinefunction(candidate):
        return FunctionTool(candidate, path)
    if inspect.isfunction(candidate):
        raise UnknownToolError(
            f"tools: {path!r} is a plain function, which would block its other calls; make it 'async def'"
        )
    if isinstance(candidate, type):
        try:
            candidate = candidate()
        except TypeError as error:
            raise UnknownToolError(
                f"tools: {path!r} cannot be made without arguments ({error}); name an instance"
            ) from error
    if not isinstance(candidate, Tool) or not inspect.iscoroutinefunction(candidate.call):
        raise UnknownToolError(
            f"tools: {path!r} is no tool; it must be an async function, or have 'name', 'schema' and an async 'call'"
        )
    return candidate


class ToolProcess:
    """A tool by its import path, in its own process. Call `close` at the end."""

    def __init__(self, path: str, tool: Tool, memory_bytes: int, deadline_s: float) -> None:
        self.name, self.schema = tool.name, tool.schema
        self._worker, self.deadline_s = WorkerProcess("stages.tools.registry", (path, memory_bytes)), deadline_s

    async def call(self, arguments: Arguments) -> str:
        """The answer to a call. Cancellation also cancels the call in the process. Raises ToolCallError."""
        try:
            await self._worker.ready()  # the deadline excludes the import of the tool
            async with asyncio.timeout(self.deadline_s):
                return msgspec.msgpack.decode(await self._worker.call(arguments), type=str)
        except TimeoutError:
            raise ToolCallError(f"no answer within {self.deadline_s:g} s") from None
        except (CallFailed, WorkerLost) as error:
            raise ToolCallError(str(error)) from None

    async def close(self) -> None:
        """End the process and its descendants."""
        await self._worker.close()


BUILT_IN: dict[str, Callable[[], Tool]] = {"calculator": Calculator}


def resolve_tools(names: Sequence[str], memory_gb: float = 0.0, deadline_s: float = 60.0) -> dict[str, Tool]:
    """Tools by the model's name for them, in the given order. Raises UnknownToolError.

    Close them with `close_tools`. Limits of a user's tool: `memory_gb` of its process (0 = no limit), and `deadline_s`
    of each call.
    """
    tools, memory = dict[str, Tool](), int(memory_gb * (1 << 30))
    for name in names:
        if name not in BUILT_IN and not all(name.partition(":")):
            guess = did_you_mean(name, BUILT_IN, otherwise=";")
            known = f"{', '.join(BUILT_IN)}, or your own as package.module:function"
            raise UnknownToolError(f"tools: {name!r} is no tool{guess} Known: {known}")
        tool: Tool = BUILT_IN[name]() if name in BUILT_IN else ToolProcess(name, import_tool(name), memory, deadline_s)
        if tool.name in tools:
            raise UnknownToolError(f"tools: two of them are called {tool.name!r}; rename one or leave it out")
        tools[tool.name] = tool
    return tools


async def close_tools(tools: Mapping[str, Tool]) -> None:
    """End the processes of tools."""
    for tool in tools.values():
        if isinstance(tool, ToolProcess):
            await tool.close()


def main(arguments: list[str]) -> None:
    """Serve until the socket closes. Does not return."""

    def prepare() -> tuple[Handler, object]:
        tool = import_tool(arguments[2])

        async def answer(call: msgspec.Raw) -> str:
            given: Arguments = msgspec.msgpack.decode(call)
            try:
                return bounded(await tool.call(given))
            except MemoryError:
                raise  # ends this process
            except Exception as error:  # user code may raise anything; the model reads the error
                words = str(error) if isinstance(error, ToolCallError) else f"{type(error).__name__}: {error}"
                raise Refusal("error", bounded(words)) from None

        return answer, None

    serve(become_worker(int(arguments[0]), int(arguments[1]), int(arguments[3])), prepare)


if __name__ == "__main__":
    main([*sys.argv[1:], *read_arguments()])
