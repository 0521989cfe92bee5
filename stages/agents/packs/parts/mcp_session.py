"""Sessions with servers of the Model Context Protocol, on a thread of their own.

The library's sessions must end in the task that began them, and an environment is called from many: so each session is
one task, on the event loop of one thread, which waits until it is told to end.

Invariant: whatever goes wrong before the tools are listed, or with the connection, is an InfrastructureError.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, Final

from msgspec import Struct

from stages.agents.environment import InfrastructureError
from stages.tools.errors import NoAnswer, ToolCallError

_CLOSE_S: Final = 10.0  # for a server to end
_CLOSED: Final = -32000  # the library's code for a connection that is gone


class Target(Struct, frozen=True):
    """A server: the command that starts it, or where it is."""

    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    url: str = ""

    @property
    def name(self) -> str:
        return self.url or " ".join(self.command)


class McpSession:
    """One session, begun at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._listed: Future[list[Any]] = Future()
        self._closing = asyncio.Event()
        self._client: Any = None
        self._held: Future[None] = asyncio.run_coroutine_threadsafe(self._hold(), _loop())

    @property
    def ended(self) -> bool:
        return self._held.done()

    async def opened(self, start_s: float) -> list[Any]:
        """The server's tools, once it answers. Raises InfrastructureError."""
        try:
            async with asyncio.timeout(start_s):
                return await asyncio.shield(asyncio.wrap_future(self._listed))
        except TimeoutError:
            self._held.cancel()
            words = f"the MCP server {self._target.name} does not answer within {start_s:g} s"
            raise InfrastructureError(words) from None

    async def call(self, name: str, arguments: Mapping[str, object], deadline_s: float) -> Any:
        """The result of a tool. Raises ToolCallError and InfrastructureError."""
        call = self._client.call_tool(name, dict(arguments))
        asked = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call, deadline_s), _loop())
        try:
            return await asyncio.wrap_future(asked)
        except TimeoutError:
            raise NoAnswer(f"no answer within {deadline_s:g} s") from None
        except Exception as error:
            code = getattr(error, "code", None)  # of an error that the server answered with
            if code is None or code == _CLOSED or self.ended:
                raise InfrastructureError(f"the MCP server {self._target.name} is gone ({error!r})") from error
            raise ToolCallError(str(getattr(error, "message", error))) from error

    async def close(self) -> None:
        """End the session, and the server that was started for it."""
        _loop().call_soon_threadsafe(self._closing.set)
        await asyncio.wait({asyncio.wrap_future(self._held)}, timeout=_CLOSE_S)

    async def _hold(self) -> None:
        """Begins the session, waits until it is to end, and ends it. On the thread."""
        import mcp

        try:
            server: Any = self._target.url
            if self._target.command:
                first, *rest = self._target.command
                environment = dict(self._target.environment) or None
                server = mcp.StdioServerParameters(command=first, args=rest, env=environment)
            async with mcp.Client(server) as self._client:
                self._listed.set_result(await _all_tools(self._client))
                await self._closing.wait()
        except BaseException as error:
            if not self._listed.done():
                words = f"the MCP server {self._target.name} begins no session ({_reason(error)})"
                self._listed.set_exception(InfrastructureError(words))


async def _all_tools(client: Any) -> list[Any]:
    listed: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return listed


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return repr(error)


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of the thread, which ends with the process."""
    started: Future[asyncio.AbstractEventLoop] = Future()

    async def serve() -> None:
        started.set_result(asyncio.get_running_loop())
        await asyncio.Event().wait()

    threading.Thread(target=asyncio.run, args=(serve(),), name="mcp", daemon=True).start()
    return started.result()
