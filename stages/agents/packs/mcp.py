"""Pack: the tools of a server of the Model Context Protocol (the package `mcp`, from version 2).

    [[environment]]
    name = "mcp"
    path = "stages.agents.packs.mcp:Mcp"
    options = { command = ["python", "my_server.py"] }      # or url = "http://127.0.0.1:8000/mcp"

The model calls the server's tools until it answers without a call; a grader says what the answer is worth. A server
that is started here speaks on its standard output, so it must print nothing else there. Each episode has a connection
of its own, and with `command` a server of its own; `shared = true` gives all episodes of a process one of both.

Invariants: what a tool reports as an error is an observation; a server that does not start, or is gone, is an
InfrastructureError.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from stages.agents.environment import Task
from stages.agents.packs.parts.mcp_session import McpSession, Target
from stages.agents.packs.parts.tool_episode import ToolEpisode
from stages.tools.errors import ToolCallError
from stages.tools.tool import Arguments, Schema, Tool, function_schema

_shared: dict[Target, McpSession] = {}  # of this process


class Mcp(ToolEpisode):
    """Options besides those of every tool pack: `command` with `environment`, or `url`; `tools` are those offered (all,
    if none is named), `effects` those that change the world (their calls are made once); `deadline_s` of a call,
    `start_s` until the server answers; `shared`."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        url: str = "",
        tools: Sequence[str] = (),
        effects: Sequence[str] = (),
        shared: bool = False,
        deadline_s: float = 30.0,
        start_s: float = 60.0,
        max_calls: int = 8,
        result_chars: int = 4096,
        system: str = "",
    ) -> None:
        super().__init__(max_calls=max_calls, result_chars=result_chars, system=system)
        if importlib.util.find_spec("mcp") is None:
            raise ValueError("the pack mcp needs its package: pip install 'mcp>=2'")
        if bool(command) == bool(url):
            raise ValueError("the pack mcp needs either a command or a url")
        self._target = Target(tuple(command), tuple(sorted((environment or {}).items())), url)
        self._offered, self._effects, self._shared = tuple(tools), tuple(effects), shared
        self._deadline_s, self._start_s = deadline_s, start_s
        self._session: McpSession | None = None

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        session = _shared.get(self._target) if self._shared else None
        if session is None or session.ended:
            session = McpSession(self._target)
            if self._shared:
                _shared[self._target] = session
        self._session = session
        listed = await session.opened(self._start_s)
        there = [tool.name for tool in listed]
        for option, names in (("tools", self._offered), ("effects", self._effects)):
            if missing := [name for name in names if name not in there]:
                raise ValueError(f"{option} has {missing[0]!r}, which the server has not; it has: {', '.join(there)}")
        return [
            _McpTool(session, tool, self._deadline_s, effects=tool.name in self._effects)
            for tool in listed
            if not self._offered or tool.name in self._offered
        ]

    async def close(self) -> None:
        if self._session is not None and not self._shared:
            await self._session.close()


class _McpTool:
    """A tool of the server as one of ours."""

    def __init__(self, session: McpSession, listed: Any, deadline_s: float, *, effects: bool) -> None:
        self.name, self.effects = str(listed.name), effects
        properties = dict(listed.input_schema.get("properties", {}))
        required = list(listed.input_schema.get("required", ()))
        self.schema: Schema = function_schema(self.name, listed.description or "", properties, required)
        self._only = next(iter(properties)) if len(properties) == 1 else None
        self._session, self._deadline_s = session, deadline_s

    async def call(self, arguments: Arguments) -> str:
        """The texts of the result. Raises ToolCallError with the server's words, and InfrastructureError."""
        if isinstance(arguments, str):
            if self._only is None:
                raise ToolCallError(f"{self.name} takes a JSON object of arguments")
            arguments = {self._only: arguments}
        result = await self._session.call(self.name, arguments, self._deadline_s)
        parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
        text = "\n".join(parts) or "(no text)"
        if result.is_error:
            raise ToolCallError(text)
        return text
