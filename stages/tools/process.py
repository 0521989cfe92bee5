"""A tool of the user as the stage sees it: its process, started at the first call and again after it was lost."""

from __future__ import annotations

import msgspec

from stages.tools.errors import ToolCallError
from stages.tools.tool import Arguments, Schema
from stages.workers.process import CallFailed, WorkerLost, WorkerProcess


class ToolProcess:
    """A tool by its import path. Use `ready` before `call`, and `close` at the end."""

    def __init__(self, path: str, name: str, schema: Schema, memory_bytes: int = 0) -> None:
        """0 bytes: as many as there are."""
        self.name, self.schema = name, schema
        self._worker = WorkerProcess("stages.tools.worker", (path, memory_bytes))

    async def ready(self) -> None:
        """Waits until the process serves, and starts it where there is none. Raises ToolCallError."""
        try:
            await self._worker.ready()
        except WorkerLost as error:
            raise ToolCallError(str(error)) from None

    async def call(self, arguments: Arguments) -> str:
        """The answer to a call. Raises ToolCallError. Cancelled, it tells the tool to stop."""
        try:
            return msgspec.msgpack.decode(await self._worker.call(arguments), type=str)
        except (CallFailed, WorkerLost) as error:
            raise ToolCallError(str(error)) from None

    async def close(self) -> None:
        """End the process and what the tool started."""
        await self._worker.close()
