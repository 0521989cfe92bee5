"""Pack: the tools of a server of the Model Context Protocol (the package `mcp`, from version 2).

    [[environment]]
    name = "mcp"
    path = "stages.agents.packs.mcp:Mcp"
    options = { command = ["python", "my_server.py"] }      # or url = "http://127.0.0.1:8000/mcp"

The model calls the server's tools until it answers without a call; a grader scores the answer. A server started by
`command` writes the protocol to its standard output, so it must print nothing else there. Each episode has its own
connection, and with `command` its own server; with `shared = true` all episodes of a process share them.

The library requires that a session ends in the task that began it, but many tasks call an environment. So one thread
has an event loop with one task for each session, which lives as long as the session.

Invariants: an error that a tool reports is an observation; a server that does not start, does not list its tools or is
lost is an InfrastructureError.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from stages.agents.environment import InfrastructureError, Task, need_package
from stages.agents.tool_episode import ToolEpisode
from stages.tools.tool import Arguments, NoAnswer, Schema, Tool, ToolCallError, function_schema

_CLOSE_S: Final = 10.0  # for a server to end
_CLOSED: Final = -32000  # the library's code for a lost connection


class McpSession:
    """One session with the server of these options, which begins at construction."""

    def __init__(self, options: Mcp) -> None:
        self._options, self._name = options, options.url or " ".join(options.command)
        self._listed: Future[list[Any]] = Future()
        self._closing = asyncio.Event()
        self._client: Any = None
        self.held: Future[None] = asyncio.run_coroutine_threadsafe(self._hold(), _loop())

    async def opened(self) -> list[Any]:
        """The server's tools, once it answers. Raises InfrastructureError."""
        start_s = self._options.start_s
        try:
            async with asyncio.timeout(start_s):
                return await asyncio.shield(asyncio.wrap_future(self._listed))
        except TimeoutError:
            self.held.cancel()
            words = f"the MCP server {self._name} does not answer within {start_s:g} s"
            raise InfrastructureError(words) from None

    async def call(self, name: str, arguments: Mapping[str, object]) -> Any:
        """The result of a tool. Raises ToolCallError and InfrastructureError."""
        call, deadline_s = self._client.call_tool(name, dict(arguments)), self._options.deadline_s
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call, deadline_s), _loop())
        try:
            return await asyncio.wrap_future(future)
        except TimeoutError:
            raise NoAnswer(f"no answer within {deadline_s:g} s") from None
        except Exception as error:
            code = getattr(error, "code", None)  # of the server's error
            if code is None or code == _CLOSED or self.held.done():
                raise InfrastructureError(f"the MCP server {self._name} is gone ({error!r})") from error
            raise ToolCallError(str(getattr(error, "message", error))) from error

    async def close(self) -> None:
        """End the session and its server."""
        _loop().call_soon_threadsafe(self._closing.set)
        await asyncio.wait({asyncio.wrap_future(self.held)}, timeout=_CLOSE_S)

    async def _hold(self) -> None:
        """The session's task on the thread: begin, wait for the end, close."""
        import mcp

        try:
            server: Any = self._options.url
            if self._options.command:
                first, *rest = self._options.command
                environment = dict(self._options.environment) or None
                server = mcp.StdioServerParameters(command=first, args=rest, env=environment)
            async with mcp.Client(server) as self._client:
                self._listed.set_result(await _all_tools(self._client))
                await self._closing.wait()
        except BaseException as error:
            if not self._listed.done():
                words = f"the MCP server {self._name} begins no session ({_reason(error)})"
                self._listed.set_exception(InfrastructureError(words))


async def _all_tools(client: Any) -> list[Any]:
    page = await client.list_tools()
    listed = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        listed += page.tools
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


_shared: dict[str, McpSession] = {}  # of this process, by server


@dataclass(repr=False)  # the environment may hold keys
class Mcp(ToolEpisode):
    """Options besides those of every tool pack: `command` with `environment`, or `url`; `tools`: the offered tools
    (default: all); `effects`: the tools with side effects, whose calls are made once; `deadline_s` of a call; `start_s`
    until the server answers; `shared`."""

    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    tools: Sequence[str] = ()
    effects: Sequence[str] = ()
    shared: bool = False
    deadline_s: float = 30.0
    start_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        need_package("mcp", "'mcp>=2'")
        if bool(self.command) == bool(self.url):
            raise ValueError("the pack mcp needs either a command or a url")
        self._session: McpSession | None = None

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        server = repr((self.command, self.environment, self.url))
        session = _shared.get(server) if self.shared else None
        if session is None or session.held.done():
            session = McpSession(self)
            if self.shared:
                _shared[server] = session
        self._session = session
        listed = await session.opened()
        listed_names = [tool.name for tool in listed]
        for option, names in (("tools", self.tools), ("effects", self.effects)):
            if missing := [name for name in names if name not in listed_names]:
                raise ValueError(
                    f"{option} has {missing[0]!r}, which the server has not; it has: {', '.join(listed_names)}"
                )
        return [
            _McpTool(session, tool, effects=tool.name in self.effects)
            for tool in listed
            if not self.tools or tool.name in self.tools
        ]

    async def close(self) -> None:
        if self._session is not None and not self.shared:
            await self._session.close()


class _McpTool:
    """A tool of the server, as a `Tool`."""

    def __init__(self, session: McpSession, listed: Any, *, effects: bool) -> None:
        self.name, self.effects = str(listed.name), effects
        properties = dict(listed.input_schema.get("properties", {}))
        required = list(listed.input_schema.get("required", ()))
        self.schema: Schema = function_schema(self.name, listed.description or "", properties, required)
        self._only = next(iter(properties)) if len(properties) == 1 else None
        self._session = session

    async def call(self, arguments: Arguments) -> str:
        """The texts of the result. Raises ToolCallError with the server's text, and InfrastructureError."""
        if isinstance(arguments, str):
            if self._only is None:
                raise ToolCallError(f"{self.name} takes a JSON object of arguments")
            arguments = {self._only: arguments}
        result = await self._session.call(self.name, arguments)
        parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
        text = "\n".join(parts) or "(no text)"
        if result.is_error:
            raise ToolCallError(text)
        return text
