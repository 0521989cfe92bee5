"""Pack: built-in tools by name, and async functions by import path.

    [[environment]]
    name = "functions"
    options = { tools = ["calculator", "my_project.tools:search"] }

The model calls them in its chat format until it answers without a call; a grader scores the answer. `--tools` offers
the same tools in plain text. Each worker process runs each function in a separate process.

Invariant: no call takes longer than `deadline_s`, whatever the tool does; the time of its import does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from stages.agents.environment import Task
from stages.agents.tool_episode import ToolEpisode
from stages.tools.registry import Bounded, resolve_tools
from stages.tools.tool import RESULT_CHARS, Tool


class Functions(ToolEpisode):
    """`memory_gb`: memory limit of a function's process; 0 = no limit."""

    def __init__(
        self,
        tools: Sequence[str],
        *,
        deadline_s: float = 10.0,
        memory_gb: float = 4.0,
        max_calls: int = 8,
        result_chars: int = RESULT_CHARS,
        system: str = "",
    ) -> None:
        super().__init__(max_calls=max_calls, result_chars=result_chars, system=system)
        self._functions = [Bounded(tool, deadline_s) for tool in _of_process(tuple(tools), memory_gb)]

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        return self._functions


@lru_cache
def _of_process(names: tuple[str, ...], memory_gb: float) -> tuple[Tool, ...]:
    """Tools for all episodes of this process. Their processes end with it. Raises UnknownToolError."""
    return tuple(resolve_tools(names, memory_gb).values())
