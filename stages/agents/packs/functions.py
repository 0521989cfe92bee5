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
from dataclasses import dataclass, field
from functools import lru_cache

from stages.agents.environment import Task
from stages.agents.tool_episode import ToolEpisode
from stages.tools.registry import resolve_tools
from stages.tools.tool import RESULT_CHARS, Tool


@dataclass
class Functions(ToolEpisode):
    """`memory_gb`: memory limit of a function's process; 0 = no limit."""

    tools: Sequence[str]
    deadline_s: float = 10.0
    memory_gb: float = 4.0
    result_chars: int = field(default=RESULT_CHARS, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._functions = _of_process(tuple(self.tools), self.memory_gb, self.deadline_s)

    async def open_tools(self, task: Task) -> Sequence[Tool]:
        return list(self._functions.values())


# Tools for all episodes of this process. Their processes end with it.
_of_process = lru_cache(resolve_tools)
