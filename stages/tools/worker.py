"""The process of one tool: `python -m stages.tools.worker SOCKET_FD PARENT_PID IMPORT_PATH`.

A line in is a JSON list: [number, arguments] begins a call, [number] cancels it. A line out is [number, good, text],
the end of a call, and before all others [-1, true, ""]: the tool is there. Calls run side by side on one event loop,
which is this process's own: a tool that blocks it keeps nobody waiting but its own callers, and these end the process.

Invariants: each call has one answer, whatever the tool does (CancelledError and SystemExit are answers too); an answer
is bounded; the process dies with its parent, and what the tool started dies with it; what it prints is error output.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

from stages.process_guard import become_guarded
from stages.tools.errors import ToolCallError
from stages.tools.imports import import_tool
from stages.tools.tool import Arguments, Tool, bounded

LINE_BYTES = 4 << 20  # of a call: 32,768 characters, escaped


def main(arguments: list[str]) -> None:
    """Serve until the socket closes. Does not return."""
    socket_fd, parent = int(arguments[0]), int(arguments[1])
    become_guarded(parent)
    os.dup2(2, 1)
    os.set_inheritable(socket_fd, False)  # what a tool starts must not keep the socket open
    asyncio.run(_serve(socket.socket(fileno=socket_fd), import_tool(arguments[2])))


async def _serve(link: socket.socket, tool: Tool) -> None:
    """Waits for calls; ends the process when the stage closes its end, whatever is still running."""
    reader, writer = await asyncio.open_connection(sock=link, limit=LINE_BYTES)
    _send(writer, -1, True, "")
    running: dict[int, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            number, *arguments = json.loads(line)
            if arguments:
                running[number] = tasks.create_task(_answer(writer, tool, number, arguments[0]))
            elif (task := running.pop(number, None)) is not None:
                task.cancel()
            running = {number: task for number, task in running.items() if not task.done()}
        os._exit(0)


async def _answer(writer: asyncio.StreamWriter, tool: Tool, number: int, arguments: Arguments) -> None:
    try:
        good, text = True, await tool.call(arguments)
    except ToolCallError as error:
        good, text = False, str(error)
    except BaseException as error:  # a tool is somebody's program: the model sees what it raised, the run goes on
        good, text = False, f"{type(error).__name__}: {error}"
    _send(writer, number, good, bounded(text))


def _send(writer: asyncio.StreamWriter, number: int, good: bool, text: str) -> None:
    writer.write(json.dumps((number, good, text)).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
