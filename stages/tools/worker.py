"""The process of one tool: `python -m stages.tools.worker SOCKET_FD PARENT_PID IMPORT_PATH MEMORY_BYTES`.

A call carries the arguments; the reply is the tool's answer as text, bounded. See stages/workers/serve.py.
"""

from __future__ import annotations

import sys

import msgspec

from stages.tools.registry import import_tool
from stages.tools.tool import Arguments, ToolCallError, bounded
from stages.workers.serve import Handler, Refusal, become_worker, serve


def main(arguments: list[str]) -> None:
    """Serve until the socket closes. Does not return."""

    def prepare() -> tuple[Handler, object]:
        tool = import_tool(arguments[2])

        async def answer(call: msgspec.Raw) -> str:
            given: Arguments = msgspec.msgpack.decode(call)
            try:
                return bounded(await tool.call(given))
            except ToolCallError as error:
                raise Refusal("error", bounded(str(error))) from None
            except MemoryError:
                raise  # ends this process
            except Exception as error:  # user code may raise anything; the model reads the error
                raise Refusal("error", bounded(f"{type(error).__name__}: {error}")) from None

        return answer, None

    serve(become_worker(int(arguments[0]), int(arguments[1]), int(arguments[3])), prepare)


if __name__ == "__main__":
    main(sys.argv[1:])
